"""Where labelled images lie: scikit-learn's digits, image folders, and rows (parquet files, Hugging Face data sets,
webdataset shards)."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from PIL import Image

from zoo.data.folder import Folder
from zoo.data.rows import Rows, load_rows

DIGITS_TRAIN = 1000  # of 1797; the rest is the validation set


class Source(Protocol):
    """A numbered set of labelled images.

    classes: name of each class number.  named: whether the names come with the data, so that two sets must agree.
    """

    @property
    def classes(self) -> list[str]: ...

    @property
    def named(self) -> bool: ...

    def __len__(self) -> int: ...

    def read(self, index: int) -> tuple[Image.Image, int]:
        """The RGB image and class number of one index. Raises Unreadable."""
        ...

    def name(self, index: int) -> str:
        """What the image is called where it came from."""
        ...


def open_source(
    kind: str,
    where: str,
    train: bool,
    image_key: str = "image",
    label_key: str = "label",
    class_map: dict | None = None,
) -> Source:
    """The images at `where`, of the kinds that `DataSettings.source` lists.

    `class_map` (folder only) gives the class number of each sub-folder; without it they count up in natural order.
    Raises
    ValueError when nothing is there, or no image is in it.
    """
    if kind == "digits":
        return Digits(train)
    if not where:
        raise ValueError(
            f"data.{'train' if train else 'val'} is empty: say where the images of the source {kind!r} lie"
        )
    if kind == "folder":
        return Folder(where, class_map)
    return Rows(load_rows(kind, where, train), where, image_key, label_key)


class Digits:
    """1797 scans of handwritten digits, 8 x 8 grey levels, in a fixed random split (scikit-learn, from UCI)."""

    named = True

    def __init__(self, train: bool) -> None:
        from sklearn.datasets import load_digits

        self.classes = [str(i) for i in range(10)]
        data = load_digits()
        order = np.random.RandomState(0).permutation(len(data.target))
        self.indices = order[:DIGITS_TRAIN] if train else order[DIGITS_TRAIN:]
        self.images = (data.images[self.indices] * (255 / 16)).round().astype(np.uint8)
        self.labels = data.target[self.indices]

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> tuple[Image.Image, int]:
        return Image.fromarray(self.images[index]).convert("RGB"), int(self.labels[index])

    def name(self, index: int) -> str:
        return f"digit-{self.indices[index]:04d}"


@dataclass(frozen=True)
class Part:
    """The images [first, last) of another source."""

    source: Source
    first: int
    last: int

    @property
    def classes(self) -> list[str]:
        return self.source.classes

    @property
    def named(self) -> bool:
        return self.source.named

    def __len__(self) -> int:
        return self.last - self.first

    def read(self, index: int) -> tuple[Image.Image, int]:
        return self.source.read(self.first + index)

    def name(self, index: int) -> str:
        return self.source.name(self.first + index)
