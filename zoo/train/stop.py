"""Handling of SIGTERM and SIGINT during a run: the run finishes the current step before it stops."""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

import torch
import torch.distributed as dist
from accelerate import Accelerator

GRACE = 0.5  # seconds to wait for a signal that reached the DataLoader workers before this process
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stop:
    """Context in which a signal of `SIGNALS` is stored instead of ending the process.

    signal: the first signal received, 0 for none. A second SIGINT interrupts a run of one process at once. With several
    processes it is ignored, since launchers send the signal of the terminal again.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.signal = 0
        self._before: dict[int, signal._HANDLER] = {}
        self._last: torch.Tensor | None = None

    def __enter__(self) -> "Stop":
        if threading.current_thread() is threading.main_thread():  # others may not set handlers
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
    def guard(self, end: Callable[[int], BaseException]) -> Iterator[None]:
        """Context of a step. If the step fails because the signal also killed DataLoader workers, raises `end(signal)`
        instead of their error."""
        try:
            yield
        except RuntimeError as error:
            if "DataLoader worker" not in str(error):
                raise
            time.sleep(GRACE)
            if not self.signal:
                raise
            raise end(self.signal) from error

    def requested(self) -> int:
        """Return the signal because of which the run must stop after this step; 0 for none. Every process, once per
        step.

        Processes receive a signal at different times, so they agree by an all-reduce of the maximum. The result is read
        one step later, when it is ready, so that the host does not wait for it.
        """
        if self.accelerator.num_processes == 1:
            return self.signal
        received = torch.tensor(self.signal, device=self.accelerator.device)
        dist.all_reduce(received, dist.ReduceOp.MAX)
        last, self._last = self._last, received
        return 0 if last is None else int(last)
