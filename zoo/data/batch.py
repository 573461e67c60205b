"""Batches of labelled images."""

from typing import NamedTuple, Protocol

from torch import Tensor

MAX_UNREADABLE = 0.01  # fraction of the images


class AnyBatch(Protocol):
    """A micro-batch of any kind of samples."""

    def unreadable(self) -> list[int]:
        """The numbers of its samples that could not be read."""


class Batch(NamedTuple):
    """images [B, 3, H, W] float32 and labels [B] int64 on the device; index and read [B]: the requested image numbers,
    and those actually read (they differ where an unreadable image was replaced)."""

    images: Tensor
    labels: Tensor
    index: Tensor  # type: ignore[assignment]  # hides tuple.index, which nobody needs here
    read: Tensor

    def unreadable(self) -> list[int]:
        """The numbers of the images that could not be read."""
        return self.index[self.index != self.read].tolist()


def check_unreadable(bad: int, n_images: int) -> None:
    """Raise ValueError when more than 1 % of the images cannot be read."""
    if bad > MAX_UNREADABLE * n_images:
        raise ValueError(f"{bad} of {n_images} images cannot be read; at most {MAX_UNREADABLE:.0%} may be unreadable")
