"""Batches of labelled images."""

from typing import NamedTuple, Protocol

from torch import Tensor

MAX_UNREADABLE = 0.01  # fraction of the images


class AnyBatch(Protocol):
    """A micro-batch of any kind of samples."""

    def unreadable(self) -> list[int]:
        """Return the numbers of the samples that could not be read."""


class Batch(NamedTuple):
    """A batch of labelled images.

    images: float32 [B, 3, H, W] on the device.  labels: int64 [B] on the device.  index: requested image numbers [B].
    read: image numbers actually read [B], which differ from `index` where an unreadable image was replaced.
    """

    images: Tensor
    labels: Tensor
    index: Tensor  # type: ignore[assignment]  # replaces tuple.index, which is not used
    read: Tensor

    def unreadable(self) -> list[int]:
        """Return the numbers of the images that could not be read."""
        return self.index[self.index != self.read].tolist()


def check_unreadable(bad: int, n_images: int) -> None:
    """Raise ValueError if more than 1 % of the images cannot be read (bad: number of unreadable images)."""
    if bad > MAX_UNREADABLE * n_images:
        raise ValueError(f"{bad} of {n_images} images cannot be read; at most {MAX_UNREADABLE:.0%} may be unreadable")
