"""Handling of SIGTERM and SIGINT during a run: the step is finished first."""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

import torch
import torch.distributed as dist
from accelerate import Accelerator

GRACE = 0.5  # seconds until a signal that killed DataLoader workers has arrived here too
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stop:
    """Context in which the first of `SIGNALS` is stored instead of ending the process.

    A second SIGINT interrupts a single process at once, as usual. Several processes ignore it, since launchers repeat
    the signal of the terminal.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.signal = 0
        self._before: dict[int, signal._HANDLER] = {}
        self._last: torch.Tensor | None = None

    def __enter__(self) -> "Stop":
        if threading.current_thread() is threading.main_thread():  # the only one that may
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal and number == signal.SIGINT and self.accelerator.num_processes == 1:
            raise KeyboardInterrupt
        self.signal = self.signal or number

    @contextlib.contextmanager
    def explained(self, end: Callable[[int], BaseException]) -> Iterator[None]:
        """Context of a step that fails because the signal also killed DataLoader workers: raises `end(signal)` instead
        of their error."""
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
        """The signal after which all processes stop at this step; 0 for none. Every process, once per step.

        Processes receive a signal at different times. They agree on the maximum of the step before, which is on the
        device by now, so that reading it does not wait.
        """
        if self.accelerator.num_processes == 1:
            return self.signal
        received = torch.tensor(self.signal, device=self.accelerator.device)
        dist.all_reduce(received, dist.ReduceOp.MAX)
        last, self._last = self._last, received
        return 0 if last is None else int(last)
