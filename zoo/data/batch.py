"""What the loop and the evaluation read."""

from typing import NamedTuple

from torch import Tensor

BAD_PART = 0.01  # of the images may be unreadable


class Batch(NamedTuple):
    """images [B, 3, H, W] float32 and labels [B] int64 on the device; index and read [B]: the number that was wanted
    and the
    one that was read, different where an image was unreadable."""

    images: Tensor
    labels: Tensor
    index: Tensor  # type: ignore[assignment]  # hides tuple.index, which nobody needs here
    read: Tensor

    def unreadable(self) -> list[int]:
        """The numbers of the images that could not be read."""
        return self.index[self.index != self.read].tolist()


def check_unreadable(bad: int, n_images: int) -> None:
    """Raise ValueError when more than 1 % of the images cannot be read."""
    if bad > BAD_PART * n_images:
        raise ValueError(f"{bad} of {n_images} images cannot be read; at most {BAD_PART:.0%} may be unreadable")
