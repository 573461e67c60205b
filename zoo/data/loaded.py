"""Images read, decoded and augmented by loader processes, batch after batch."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from zoo.data.batch import Batch
from zoo.data.plan import BatchPlan
from zoo.data.samples import Samples
from zoo.data.settings import AugmentSettings
from zoo.data.sources import Source
from zoo.data.transforms import InputSpec, eval_transform, train_transform


class _Parts:
    """The keys of each part as a batch sampler: fresh for every pass of a loader."""

    def __init__(self, plan: BatchPlan, first: int, last: int) -> None:
        self.plan, self.first, self.last = plan, first, last

    def __iter__(self) -> Iterator[list]:
        return self.plan.keys(self.first, self.last)

    def __len__(self) -> int:
        return (self.last - self.first) * self.plan.parts


class LoadedImages:
    """Batches of a source through torch's DataLoader and timm's transforms."""

    def __init__(
        self, source: Source, spec: InputSpec, augment: AugmentSettings, seed: int, device: torch.device, workers: int
    ) -> None:
        self.source, self.spec, self.augment, self.seed = source, spec, augment, seed
        self.device, self.workers = device, workers

    def train(self, plan: BatchPlan, first: int, last: int) -> Iterator[Batch]:
        """The parts of the steps [first, last) that the plan gives to this process, augmented."""
        return self._load(train_transform(self.spec, self.augment), _Parts(plan, first, last))

    def evaluation(self, batch_size: int, rank: int = 0, world: int = 1) -> Iterator[Batch]:
        """Every image of this process once, in order, without augmentation."""
        keys = [(0, i) for i in range(rank, len(self.source), world)]
        blocks = [keys[i : i + batch_size] for i in range(0, len(keys), batch_size)]
        return self._load(eval_transform(self.spec), blocks)

    def _load(self, transform: Any, keys: Any) -> Iterator[Batch]:
        loader = DataLoader(
            Samples(self.source, transform, self.seed),
            batch_sampler=keys,
            num_workers=self.workers,
            pin_memory=self.device.type == "cuda",
        )
        for images, labels, index, read in loader:
            to = {"device": self.device, "non_blocking": True}
            yield Batch(images.to(**to), labels.to(**to), index, read)
