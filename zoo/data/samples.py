"""Single samples for loader processes: seeded by (seed, epoch, index), with unreadable images replaced and reported."""

import random

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from zoo.data.decoding import Unreadable
from zoo.data.plan import Key
from zoo.data.sources import Source
from zoo.data.transforms import Transform

Sample = tuple[Tensor, int, int, int]  # image, label, wanted index, index that was read


def seed_everything(*numbers: int) -> None:
    """Seed python, numpy and torch (all devices) with a hash of `numbers`."""
    state = np.random.SeedSequence(numbers).generate_state(3)
    random.seed(int(state[0]))
    np.random.seed(int(state[1]))
    torch.manual_seed(int(state[2]))


class Samples(Dataset):
    """(epoch, index) -> Sample. The same key gives the same tensor in any process, in any order.

    An image that cannot be read is replaced by the next readable one; the sample then has different wanted and read
    indices.
    """

    def __init__(self, source: Source, transform: Transform, seed: int) -> None:
        self.source, self.transform, self.seed = source, transform, seed

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, key: Key) -> Sample:
        epoch, wanted, reason = *key, ""
        for step in range(len(self.source)):
            index = (wanted + step) % len(self.source)
            try:
                image, label = self.source.read(index)
            except Unreadable as error:
                reason = f"{self.source.name(index)}: {error}"
                continue
            seed_everything(self.seed, epoch, wanted)
            return self.transform(image), label, wanted, index
        raise ValueError(f"not one of the {len(self)} images of the set can be read; the last is {reason}")
