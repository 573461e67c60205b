"""Small images kept decoded on the device and augmented there, one batch at a time."""

import math
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import TypeVar, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.data.batch import Batch
from zoo.data.loader import ImageDataset, Loader
from zoo.data.plan import BatchPlan, Key
from zoo.data.settings import AugmentSettings
from zoo.data.sources import Source
from zoo.data.transforms import InputSpec, eval_transform
from zoo.progress import progress

DECODE_BATCH = 256
RATIOS = 3 / 4, 4 / 3  # range of the aspect ratio of a resized crop, as in torchvision

T = TypeVar("T")
_shared: dict[Hashable, object] | None = None  # results of `shared` by key; None outside of `share_data`


@contextmanager
def share_data() -> Iterator[None]:
    """Context in which opened sources and decoded images are kept, so that several runs in one process share them."""
    global _shared
    _shared = {}
    try:
        yield
    finally:
        _shared = None


def shared(key: Hashable, make: Callable[[], T]) -> T:
    """Return the result of `make`. Inside `share_data`, `make` is called once per key and its result is cached."""
    if _shared is None:
        return make()
    if key not in _shared:
        _shared[key] = make()
    return cast(T, _shared[key])


def decoded(source: Source, spec: InputSpec, workers: int) -> tuple[Tensor, Tensor, Tensor]:
    """Decode all images of a source: uint8 images [N, 3, H, W], labels [N] and the image numbers actually read [N], on
    the CPU."""
    samples = ImageDataset(source, eval_transform(spec, normalize=False), 0)  # any seed: the transform is deterministic
    keys = [(0, i) for i in range(len(source))]
    blocks = [keys[i : i + DECODE_BATCH] for i in range(0, len(keys), DECODE_BATCH)]
    loader: Loader[Key, list[Tensor]] = Loader(samples, blocks, workers if len(blocks) > 8 else 0)
    images, labels, _, read = (torch.cat(c) for c in zip(*progress(loader, "decoding images"), strict=True))
    return images, labels, read


class CachedImages:
    """All images of a source as uint8 [N, 3, H, W] on a device, resized and cropped as in evaluation.

    An image that cannot be read is replaced by the next readable one and reported in its batches.
    """

    def __init__(
        self, source: Source, spec: InputSpec, augment: AugmentSettings, seed: int, device: torch.device, workers: int
    ) -> None:
        images, labels, read = shared((source, spec), lambda: decoded(source, spec, workers))
        self.images, self.labels, self.read = images.to(device), labels.to(device), read
        self.source, self.augment, self.seed, self.device = source, augment, seed, device
        self.mean = torch.tensor(spec.mean, device=device).view(3, 1, 1)
        self.std = torch.tensor(spec.std, device=device).view(3, 1, 1)

    def train(self, plan: BatchPlan, first: int, last: int) -> Iterator[Batch]:
        """Yield the augmented micro-batches of the steps [first, last) for this process."""
        augmented, width = (self.resized, 5) if self.augment.crop == "resized" else (self.shifted, 3)
        for step in range(first, last):
            _, images = plan.step_images(step)
            # drawn for the global batch, so that the augmentation does not depend on the number of processes
            draws = torch.from_numpy(
                np.random.default_rng((self.seed, step)).random((plan.batch_size, width), dtype=np.float32)
            )
            for number in range(plan.micro_batches):
                where = plan.micro_batch_slice(number)
                index = torch.from_numpy(images[where])
                yield self._batch(augmented(self._to_device(index), self._to_device(draws[where])), index)

    def evaluation(self, batch_size: int, rank: int = 0, world: int = 1) -> Iterator[Batch]:
        """Yield every image of this process once, in order, without augmentation."""
        for index in torch.arange(rank, len(self.labels), world).split(batch_size):
            yield self._batch(self.images[self._to_device(index)], index)

    def _batch(self, pixels: Tensor, index: Tensor) -> Batch:
        images = (pixels.float() / 255 - self.mean) / self.std
        return Batch(images, self.labels[self._to_device(index)], index, self.read[index])

    def _to_device(self, small: Tensor) -> Tensor:
        return small.to(self.device, non_blocking=True)  # does not synchronize with queued kernels

    def shifted(self, index: Tensor, draws: Tensor) -> Tensor:
        """Return the images `index`, randomly shifted and flipped, uint8 [B, 3, H, W].

        draws: random numbers [B, 3] in [0, 1) for the shift down, the shift right and the flip.
        """
        pad = self.augment.pad if self.augment.crop == "padded" else 0
        height, width = self.images.shape[-2:]
        down, right = ((draws[:, i : i + 1] * (2 * pad + 1)).long() - pad for i in (0, 1))  # [B, 1]
        rows = torch.arange(height, device=self.device) + down  # [B, H]
        columns = torch.arange(width, device=self.device) + right  # [B, W]
        columns = torch.where(draws[:, 2:] < self.augment.hflip, columns.flip(1), columns)
        inside = ((rows >= 0) & (rows < height))[:, :, None] & ((columns >= 0) & (columns < width))[:, None, :]
        rows, columns = rows.clamp(0, height - 1), columns.clamp(0, width - 1)
        pixels = self.images[index[:, None, None], :, rows[:, :, None], columns[:, None, :]]  # [B, H, W, 3]
        return (pixels * inside[..., None]).permute(0, 3, 1, 2)

    def resized(self, index: Tensor, draws: Tensor) -> Tensor:
        """Random resized crops (bilinear) of the images `index`, randomly flipped, float32 [B, 3, H, W] in 0 to 255.

        draws: random numbers [B, 5] in [0, 1) for area, aspect ratio, vertical position, horizontal position and flip.
        As in torchvision's RandomResizedCrop, but a crop larger than the image is clipped instead of drawn again.
        """
        area, ratio, down, right, flip = draws.unbind(1)
        low, high = self.augment.scale
        least, most = (math.log(r) for r in RATIOS)
        area, ratio = low + (high - low) * area, torch.exp(least + (most - least) * ratio)
        width, height = (area * ratio).sqrt().clamp(max=1), (area / ratio).sqrt().clamp(max=1)  # fractions of the sides
        turn = torch.where(flip < self.augment.hflip, -1.0, 1.0)
        centre_x, centre_y = (1 - width) * (2 * right - 1), (1 - height) * (2 * down - 1)
        zero = torch.zeros_like(width)
        rows = torch.stack([width * turn, zero, centre_x, zero, height, centre_y], 1).view(-1, 2, 3)
        pixels = self.images[index].float()
        where = F.affine_grid(rows, list(pixels.shape), align_corners=False)
        return F.grid_sample(pixels, where, padding_mode="border", align_corners=False)
