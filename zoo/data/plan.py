"""The order of the training images: a function of (seed, epoch), so that a run can continue at the exact image."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

Key = tuple[int, int]  # (epoch, index): what decides a sample and its augmentation


@dataclass(frozen=True)
class BatchPlan:
    """Which images each step sees. Each epoch is a fresh permutation; the images that do not fill a last batch are
    left out.

    n_images: images in the set.  batch_size: images a step, over all processes and parts.
    rank, world: this process and their number.  parts: how many parts a process splits its share into (gradient
    accumulation).

    A batch does not depend on `world` or `parts`: process r takes its r-th contiguous share. Raises ValueError when the
    batch cannot be shared out equally or is larger than the set.
    """

    n_images: int
    batch_size: int
    seed: int
    rank: int = 0
    world: int = 1
    parts: int = 1

    def __post_init__(self) -> None:
        if self.batch_size > self.n_images:
            raise ValueError(
                f"data.batch_size is {self.batch_size}, but the training set has only {self.n_images} images"
            )
        if self.batch_size % (self.world * self.parts):
            raise ValueError(
                f"data.batch_size {self.batch_size} cannot be shared by {self.world} processes "
                f"with {self.parts} parts each"
            )

    @property
    def steps_per_epoch(self) -> int:
        return self.n_images // self.batch_size

    @property
    def part_size(self) -> int:
        """Images that one process sees at once."""
        return self.batch_size // (self.world * self.parts)

    def step_images(self, step: int) -> tuple[int, np.ndarray]:
        """(epoch, image numbers [batch_size]) of a step, counted from 0 over the whole run."""
        epoch, i = divmod(step, self.steps_per_epoch)
        return epoch, _order(self.seed, epoch, self.n_images)[i * self.batch_size : (i + 1) * self.batch_size]

    def part_slice(self, part: int) -> slice:
        """Where this process's part lies in the batch."""
        start = (self.rank * self.parts + part) * self.part_size
        return slice(start, start + self.part_size)

    def keys(self, first_step: int, last_step: int) -> Iterator[list[Key]]:
        """The keys of every part of this process, part after part, for the steps in [first_step, last_step)."""
        for step in range(first_step, last_step):
            epoch, images = self.step_images(step)
            for part in range(self.parts):
                yield [(epoch, int(i)) for i in images[self.part_slice(part)]]

    def mirrored(
        self, first_step: int, last_step: int, seed: int, hflip: float
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(image numbers, which of them are mirrored: bool) [part_size] of the same parts; hflip: the probability,
        drawn for each step from (seed, step)."""
        for step in range(first_step, last_step):
            _, images = self.step_images(step)
            mirrored = np.random.default_rng((seed, step)).random(self.batch_size) < hflip
            for part in range(self.parts):
                where = self.part_slice(part)
                yield images[where], mirrored[where]


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, n: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(n)
