"""Timer of the intervals between two rows of metrics, with the peak memory of the GPU."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


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
