"""Progress of runs: a bar on a terminal or lines of text elsewhere, and a timer of training intervals."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import TypeVar

import torch
from tqdm import tqdm

T = TypeVar("T")
SECONDS_BETWEEN_LINES = 30.0
# keys of metrics that depend on the machine, not on the run
MEASURED = ("images_per_second", "seconds_per_step", "seconds", "peak_mib")


def progress(
    items: Iterable[T], title: str, total: int | None = None, first: int = 0, status: Callable[[], str] = str
) -> Iterator[T]:
    """Yield `items` and show progress on standard error: a bar on a terminal, else a line every 30 seconds. Both show
    the time left if the total is known.

    first: number of items done earlier, which are counted too.  status: returns text to show, such as the loss.
    """
    if total is None and isinstance(items, Sized):
        total = len(items)
    if sys.stderr.isatty():
        with tqdm(items, desc=title, total=total, initial=first, dynamic_ncols=True, leave=False) as bar:
            for item in bar:
                yield item
                bar.set_postfix_str(status(), refresh=False)
        return
    last = start = time.monotonic()
    for done, item in enumerate(items, start=first + 1):
        yield item
        if time.monotonic() - last > SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            count, left = str(done), ""
            if total:
                seconds = (last - start) / (done - first) * (total - done)
                count, left = f"{done}/{total}", f"{tqdm.format_interval(seconds)} left"
            print(", ".join(filter(None, [f"{title}: {count}", status(), left])), file=sys.stderr, flush=True)


class Timer:
    """Measures training time between log lines, excluding validation, sampling and checkpointing.

    device: of this process; peak memory of its tensors in MiB is measured for CUDA devices.  step: first step.
    """

    def __init__(self, device: torch.device, step: int) -> None:
        self.device, self.step = device, step
        self.began, self.paused, self.peak = time.perf_counter(), 0.0, 0.0
        self._new_peak()

    def interval(self, step: int) -> tuple[int, float, dict[str, float]]:
        """Return (steps, seconds of training, peak memory) since the last call."""
        now, peak = time.perf_counter(), max(self.peak, self._new_peak())
        found = step - self.step, now - self.began - self.paused, self._memory(peak)
        self.step, self.began, self.paused, self.peak = step, now, 0.0, 0.0
        return found

    @contextmanager
    def pause(self) -> Iterator[dict[str, float]]:
        """Context of work that is not training; afterwards the dict holds its seconds and peak memory."""
        self.peak, began = max(self.peak, self._new_peak()), time.perf_counter()
        took: dict[str, float] = {}
        yield took
        took["seconds"] = time.perf_counter() - began
        took |= self._memory(self._new_peak())
        self.paused += took["seconds"]

    def _new_peak(self) -> float:
        """Peak memory in MiB since the last call."""
        if self.device.type != "cuda":
            return 0.0
        peak = torch.cuda.max_memory_allocated(self.device) / 2**20
        torch.cuda.reset_peak_memory_stats(self.device)
        return peak

    def _memory(self, peak: float) -> dict[str, float]:
        return {"peak_mib": round(peak, 1)} if self.device.type == "cuda" else {}
