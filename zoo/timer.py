"""How long the parts of a run take, and the most memory that they need."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# what a row of the record says of the machine, not of the run
MEASURED = ("images_per_second", "seconds_per_step", "seconds", "peak_mib")


class Clock:
    """Times the steps between two lines of the record, and what happens beside them (validation, samples, checkpoints),
    which does not count as training.

    device: of this process; memory is that of its tensors, in MiB, and only of CUDA devices.  step: done before.
    """

    def __init__(self, device: torch.device, step: int) -> None:
        self.device, self.step = device, step
        self.began, self.beside_it, self.peak = time.perf_counter(), 0.0, 0.0
        self._new_peak()

    def lap(self, step: int) -> tuple[int, float, dict[str, float]]:
        """(steps, seconds of training, memory) since the last lap."""
        now, peak = time.perf_counter(), max(self.peak, self._new_peak())
        found = step - self.step, now - self.began - self.beside_it, self._memory(peak)
        self.step, self.began, self.beside_it, self.peak = step, now, 0.0, 0.0
        return found

    @contextmanager
    def beside(self) -> Iterator[dict[str, float]]:
        """Around something beside the training: seconds and memory of it, once it is done."""
        self.peak, began = max(self.peak, self._new_peak()), time.perf_counter()
        took: dict[str, float] = {}
        yield took
        took["seconds"] = time.perf_counter() - began
        took |= self._memory(self._new_peak())
        self.beside_it += took["seconds"]

    def _new_peak(self) -> float:
        """MiB at most since the last call."""
        if self.device.type != "cuda":
            return 0.0
        peak = torch.cuda.max_memory_allocated(self.device) / 2**20
        torch.cuda.reset_peak_memory_stats(self.device)
        return peak

    def _memory(self, peak: float) -> dict[str, float]:
        return {"peak_mib": round(peak, 1)} if self.device.type == "cuda" else {}
