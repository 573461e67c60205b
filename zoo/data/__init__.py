"""Labelled images: sources, sampling order and batches.

`plan` holds the batch sampler, `loader` the batches of a DataLoader, and `cached` the batches of images kept on the
device.
"""

import torch

from zoo.data.batch import AnyBatch, Batch, check_unreadable
from zoo.data.cached import CachedImages, share_data, shared
from zoo.data.loader import LoadedImages
from zoo.data.plan import BatchPlan
from zoo.data.settings import AugmentSettings, DataSettings
from zoo.data.sources import Source, Subset, open_source
from zoo.data.transforms import InputSpec, check_cacheable

Images = CachedImages | LoadedImages


def open_sources(data: DataSettings) -> tuple[Source, Source]:
    """Open the training and validation sets. Raises ValueError if their classes differ, or if the training set has
    another number of classes than `data.num_classes`."""
    train, val = _open(data, True), validation_source(data)
    n = len(train.classes)
    if data.num_classes not in (None, n):
        raise ValueError(f"data.num_classes is {data.num_classes}, but the training set has {n} classes")
    named = train.named and val.named and train.classes != val.classes
    if named or len(val.classes) > n:
        raise ValueError(f"the validation set has {len(val.classes)} classes that are not the {n} of the training set")
    return train, val


def validation_source(data: DataSettings) -> Source:
    """Open the validation set, or the held-out training images if there are any. Raises ValueError if it is missing."""
    return _open(data, False)


def _open(data: DataSettings, train: bool) -> Source:
    where = data.train if train or data.holdout else data.val
    given = data.source, where, train or data.holdout > 0, data.image_key, data.label_key
    whole = shared(given, lambda: open_source(*given)) if data.cache else open_source(*given)
    if not data.holdout:
        return whole
    first = len(whole) - data.holdout
    if first <= 0:
        raise ValueError(f"data.holdout is {data.holdout}, but the training set has only {len(whole)} images")
    return Subset(whole, 0, first) if train else Subset(whole, first, len(whole))


def open_images(
    source: Source, spec: InputSpec, data: DataSettings, augment: AugmentSettings, seed: int, device: torch.device
) -> Images:
    """Create the batches of a source for a model with the input `spec`. With `data.cache`, images are decoded once and
    kept on the device. Raises ValueError if `data.cache` does not allow the augmentation."""
    check_cacheable(data, augment)
    kind = CachedImages if data.cache else LoadedImages
    return kind(source, spec, augment, seed, device, data.workers)


__all__ = [
    "AnyBatch",
    "Batch",
    "BatchPlan",
    "CachedImages",
    "Images",
    "InputSpec",
    "LoadedImages",
    "Source",
    "check_unreadable",
    "open_images",
    "open_source",
    "open_sources",
    "share_data",
    "validation_source",
]
