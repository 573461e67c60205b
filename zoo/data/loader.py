"""Batches of images that DataLoader workers read, decode and augment."""

from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from zoo.data.batch import Batch
from zoo.data.decoding import Unreadable
from zoo.data.plan import BatchPlan, Key, seed_cpu
from zoo.data.settings import AugmentSettings
from zoo.data.sources import Source
from zoo.data.transforms import InputSpec, Transform, eval_transform, train_transform

Sample = tuple[Tensor, int, int, int]  # image, label, requested index, index actually read
K = TypeVar("K")
B = TypeVar("B")


class ImageDataset(Dataset):
    """Data set of the samples of a source, by (epoch, index). The same key gives the same tensor in any process and
    any order.

    An image that cannot be read is replaced by the next readable one; the sample then has different requested and read
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
            seed_cpu(self.seed, epoch, wanted)
            return self.transform(image), label, wanted, index
        raise ValueError(f"not one of the {len(self)} images of the set can be read; the last is {reason}")


class Loader(DataLoader, Generic[K, B]):
    """DataLoader that reads one batch of `samples` per list of `keys`, with `workers` processes (0: this process).

    collate: makes a batch from a list of samples. A ValueError or OSError of a sample is raised unchanged; torch would
    add the worker's traceback to its message.
    """

    def __init__(
        self,
        samples: Dataset,
        keys: Iterable[list[K]],
        workers: int,
        collate: Callable[[list], B] = default_collate,
        *,
        pin_memory: bool = False,
        persistent_workers: bool = False,
    ) -> None:
        batches: Dataset = _Batches(samples, collate)
        super().__init__(
            batches,
            batch_sampler=keys,
            num_workers=workers,
            collate_fn=_unchanged,
            pin_memory=pin_memory,
            persistent_workers=persistent_workers,
        )

    def __iter__(self) -> Iterator[B]:  # type: ignore[override]
        for batch in super().__iter__():
            if isinstance(batch, Exception):
                raise batch
            yield batch


class _Batches(Dataset, Generic[K, B]):
    """Data set of batches by list of keys; an error of reading a batch is returned in its place."""

    def __init__(self, samples: Dataset, collate: Callable[[list], B]) -> None:
        self.samples, self.collate = samples, collate

    def __getitems__(self, keys: list[K]) -> B | Exception:
        try:
            return self.collate([self.samples[key] for key in keys])
        except (ValueError, OSError) as error:
            return error


def _unchanged(batch: B) -> B:
    return batch


class LoadedImages:
    """Batches of a source through torch's DataLoader and timm's transforms."""

    def __init__(
        self, source: Source, spec: InputSpec, augment: AugmentSettings, seed: int, device: torch.device, workers: int
    ) -> None:
        self.source, self.spec, self.augment, self.seed = source, spec, augment, seed
        self.device, self.workers = device, workers
        self._evaluation: tuple[tuple[int, ...], Loader] | None = None

    def train(self, plan: BatchPlan, first: int, last: int) -> Iterator[Batch]:
        """Yield the augmented micro-batches of the steps [first, last) for this process."""
        return self._read(self._loader(train_transform(self.spec, self.augment), plan.keys(first, last)))

    def evaluation(self, batch_size: int, rank: int = 0, world: int = 1) -> Iterator[Batch]:
        """Yield every image of this process once, in order, without augmentation. Reuses the workers of the last
        call."""
        share = batch_size, rank, world
        if self._evaluation is None or self._evaluation[0] != share:
            self._evaluation = share, self._evaluation_loader(*share)
        return self._read(self._evaluation[1])

    def _evaluation_loader(self, batch_size: int, rank: int, world: int) -> Loader:
        keys = [(0, i) for i in range(rank, len(self.source), world)]
        blocks = [keys[i : i + batch_size] for i in range(0, len(keys), batch_size)]
        return self._loader(eval_transform(self.spec), blocks, persistent=self.workers > 0)

    def _loader(self, transform: Transform, keys: Iterable[list[Key]], persistent: bool = False) -> Loader:
        return Loader(
            ImageDataset(self.source, transform, self.seed),
            keys,
            self.workers,
            pin_memory=self.device.type == "cuda",
            persistent_workers=persistent,
        )

    def _read(self, loader: Loader) -> Iterator[Batch]:
        for images, labels, index, read in loader:
            images, labels = (t.to(self.device, non_blocking=True) for t in (images, labels))
            yield Batch(images, labels, index, read)
