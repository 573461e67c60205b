"""SIGTERM and SIGINT during a run: the step is finished first."""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator

GRACE = 0.5  # s, in which a signal that loader processes had comes here too
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stop:
    """Within `with`: takes note of the first of `SIGNALS`, which end the process otherwise.

    A second SIGINT interrupts a lone process at once, as usual; one of several ignores it, since launchers send what
    the terminal sends once more.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.signal = 0
        self._before: dict[int, Any] = {}
        self._last: torch.Tensor | None = None

    def __enter__(self) -> "Stop":
        if threading.current_thread() is threading.main_thread():  # the only one that may
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal and number == signal.SIGINT and self.accelerator.num_processes == 1:
            raise KeyboardInterrupt
        self.signal = self.signal or number

    @contextlib.contextmanager
    def explained(self, end: Callable[[int], BaseException]) -> Iterator[None]:
        """Around a step that fails when the signal ends the loader processes too: `end` of the signal in the place of
        their error."""
        try:
            yield
        except RuntimeError as error:
            if "DataLoader worker" not in str(error):
                raise
            time.sleep(GRACE)
            if not self.signal:
                raise
            raise end(self.signal) from error

    def asked(self) -> int:
        """The signal after which all processes stop at this step; 0 for none. Every process, once a step.

        Of several processes each hears of it at another time: they agree on what one of them had heard by the step
        before, whose numbers the device has by now.
        """
        if self.accelerator.num_processes == 1:
            return self.signal
        heard = torch.tensor(self.signal, device=self.accelerator.device)
        dist.all_reduce(heard, dist.ReduceOp.MAX)
        last, self._last = self._last, heard
        return 0 if last is None else int(last)
