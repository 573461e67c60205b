"""Deterministic batch sampler.

The image order is a function of (seed, epoch), so that a run resumes at the exact image.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

Key = tuple[int, int]  # (epoch, index), which determines a sample and its augmentation


@dataclass(frozen=True)
class BatchPlan:
    """Batch sampler. Each epoch is a new permutation of the images; an incomplete last batch is dropped.

    n_images: number of images in the set.  batch_size: global batch size per step.  rank, world: index and number of
    processes.  micro_batches: micro-batches per process and step (gradient accumulation).

    The images of a step do not depend on `world` or `micro_batches`: process r takes the r-th contiguous share of the
    global batch. Raises ValueError if the batch cannot be split equally or is larger than the set.
    """

    n_images: int
    batch_size: int
    seed: int
    rank: int = 0
    world: int = 1
    micro_batches: int = 1

    def __post_init__(self) -> None:
        if self.batch_size > self.n_images:
            raise ValueError(
                f"data.batch_size is {self.batch_size}, but the training set has only {self.n_images} images"
            )
        if self.batch_size % (self.world * self.micro_batches):
            raise ValueError(
                f"data.batch_size {self.batch_size} cannot be shared by {self.world} processes "
                f"with {self.micro_batches} micro-batches each"
            )

    @property
    def steps_per_epoch(self) -> int:
        return self.n_images // self.batch_size

    @property
    def micro_batch_size(self) -> int:
        """Images per micro-batch."""
        return self.batch_size // (self.world * self.micro_batches)

    def step_images(self, step: int) -> tuple[int, np.ndarray]:
        """Return (epoch, image numbers [batch_size]) of a step. Steps are counted from 0 over the whole run."""
        epoch, i = divmod(step, self.steps_per_epoch)
        return epoch, _order(self.seed, epoch, self.n_images)[i * self.batch_size : (i + 1) * self.batch_size]

    def micro_batch_slice(self, number: int) -> slice:
        """Return the slice of the global batch that is micro-batch `number` of this process."""
        start = (self.rank * self.micro_batches + number) * self.micro_batch_size
        return slice(start, start + self.micro_batch_size)

    def keys(self, first_step: int, last_step: int) -> Iterator[list[Key]]:
        """Yield the keys of each micro-batch of this process in the steps [first_step, last_step)."""
        for step in range(first_step, last_step):
            epoch, images = self.step_images(step)
            for number in range(self.micro_batches):
                yield [(epoch, int(i)) for i in images[self.micro_batch_slice(number)]]

    def mirrored(
        self, first_step: int, last_step: int, seed: int, hflip: float
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield (image numbers, whether each is mirrored), both [micro_batch_size], per micro-batch of this process in
        the steps [first_step, last_step). Images are mirrored with probability `hflip`, drawn from (seed, step)."""
        for step in range(first_step, last_step):
            _, images = self.step_images(step)
            mirrored = np.random.default_rng((seed, step)).random(self.batch_size) < hflip
            for number in range(self.micro_batches):
                where = self.micro_batch_slice(number)
                yield images[where], mirrored[where]


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, n: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(n)


def seed_everything(*numbers: int) -> None:
    """Seed python, numpy and torch (all devices) with a hash of `numbers`."""
    torch.manual_seed(seed_cpu(*numbers))


def seed_cpu(*numbers: int) -> int:
    """Seed python, numpy and torch's generator of the CPU with a hash of `numbers`, and return torch's seed.

    It takes microseconds; `torch.manual_seed` takes milliseconds in a process that has not used its GPU.
    """
    state = np.random.SeedSequence(numbers).generate_state(3)
    random.seed(int(state[0]))
    np.random.seed(int(state[1]))
    torch.default_generator.manual_seed(int(state[2]))
    return int(state[2])
