"""Small images kept decoded on the device, with shift and flip as one gather: the loader is never the bottleneck."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from zoo.data.batch import Batch
from zoo.data.plan import BatchPlan
from zoo.data.progress import progress
from zoo.data.samples import Samples
from zoo.data.settings import AugmentSettings
from zoo.data.sources import Source
from zoo.data.transforms import InputSpec, eval_transform

DECODE_BATCH = 256


class CachedImages:
    """All images of a source as uint8 [N, 3, H, W] on a device, resized and cropped as for evaluation.

    An image that cannot be read is replaced by the next readable one, and reported in the batches it is in.
    """

    def __init__(
        self, source: Source, spec: InputSpec, augment: AugmentSettings, seed: int, device: torch.device, workers: int
    ) -> None:
        samples = Samples(source, eval_transform(spec, normalize=False), seed)
        keys = [(0, i) for i in range(len(source))]
        blocks = [keys[i : i + DECODE_BATCH] for i in range(0, len(keys), DECODE_BATCH)]
        loader = DataLoader(samples, batch_sampler=blocks, num_workers=workers if len(blocks) > 8 else 0)
        parts = list(progress(loader, "decoding images"))
        images, labels, _, read = (torch.cat(column) for column in zip(*parts, strict=True))
        self.images, self.labels, self.read = images.to(device), labels.to(device), read
        self.augment, self.seed, self.device = augment, seed, device
        self.mean = torch.tensor(spec.mean, device=device).view(3, 1, 1)
        self.std = torch.tensor(spec.std, device=device).view(3, 1, 1)

    def train(self, plan: BatchPlan, first: int, last: int) -> Iterator[Batch]:
        """The parts of the steps [first, last) that the plan gives to this process, augmented."""
        for step in range(first, last):
            _, images = plan.step_images(step)
            # drawn for the whole batch, so that the draws do not depend on the number of processes
            draws = torch.from_numpy(
                np.random.default_rng((self.seed, step)).random((plan.batch_size, 3), dtype=np.float32)
            )
            for part in range(plan.parts):
                where = plan.part_slice(part)
                index = torch.from_numpy(images[where])
                yield self._batch(self.shifted(self._there(index), self._there(draws[where])), index)

    def evaluation(self, batch_size: int, rank: int = 0, world: int = 1) -> Iterator[Batch]:
        """Every image of this process once, in order, without augmentation."""
        for index in torch.arange(rank, len(self.labels), world).split(batch_size):
            yield self._batch(self.images[self._there(index)], index)

    def _batch(self, pixels: Tensor, index: Tensor) -> Batch:
        images = (pixels.float() / 255 - self.mean) / self.std
        return Batch(images, self.labels[self._there(index)], index, self.read[index])

    def _there(self, small: Tensor) -> Tensor:
        return small.to(self.device, non_blocking=True)  # without waiting for the work that is queued there

    def shifted(self, index: Tensor, draws: Tensor) -> Tensor:
        """Shifted and flipped uint8 images [B, 3, H, W]; `draws` [B, 3] in [0, 1) decide shift down, shift right,
        flip."""
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
