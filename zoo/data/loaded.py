"""Images read, decoded and augmented by loader processes, batch after batch."""

from collections.abc import Iterator
from typing import Any

import torch

from zoo.data.batch import Batch
from zoo.data.loader import Loader
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
        self._evaluation: tuple[tuple[int, ...], Loader] | None = None

    def train(self, plan: BatchPlan, first: int, last: int) -> Iterator[Batch]:
        """The parts of the steps [first, last) that the plan gives to this process, augmented."""
        return self._read(self._loader(train_transform(self.spec, self.augment), _Parts(plan, first, last)))

    def evaluation(self, batch_size: int, rank: int = 0, world: int = 1) -> Iterator[Batch]:
        """Every image of this process once, in order, without augmentation. The loader processes of the last call go
        on."""
        share = batch_size, rank, world
        if self._evaluation is None or self._evaluation[0] != share:
            self._evaluation = share, self._evaluation_loader(*share)
        return self._read(self._evaluation[1])

    def _evaluation_loader(self, batch_size: int, rank: int, world: int) -> Loader:
        keys = [(0, i) for i in range(rank, len(self.source), world)]
        blocks = [keys[i : i + batch_size] for i in range(0, len(keys), batch_size)]
        return self._loader(eval_transform(self.spec), blocks, persistent=self.workers > 0)

    def _loader(self, transform: Any, keys: Any, persistent: bool = False) -> Loader:
        return Loader(
            Samples(self.source, transform, self.seed),
            keys,
            self.workers,
            pin_memory=self.device.type == "cuda",
            persistent_workers=persistent,
        )

    def _read(self, loader: Loader) -> Iterator[Batch]:
        for images, labels, index, read in loader:
            to = {"device": self.device, "non_blocking": True}
            yield Batch(images.to(**to), labels.to(**to), index, read)
