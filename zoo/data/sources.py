"""Where labelled images lie: scikit-learn's digits, image folders, parquet files, Hugging Face data sets, webdataset
shards.

Folders are read by timm; the rest by the `datasets` library, which gives every row a number, so that any order can be
repeated and continued. It copies parquet files and shards once into its cache folder.
"""

import glob
import io
import os
import re
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from PIL import Image

DIGITS_TRAIN = 1000  # of 1797; the rest is the validation set
UNNAMED = "class {}"  # name of a class of which only the number is known


class Unreadable(Exception):
    """An image that cannot be decoded."""


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


def same_classes(ours: list[str], theirs: list[str]) -> bool:
    """Whether two lists of classes can be the same: as many, and alike where both have names."""
    if len(ours) != len(theirs):
        return False
    pairs = enumerate(zip(ours, theirs, strict=True))
    return all(a == b or UNNAMED.format(i) in (a, b) for i, (a, b) in pairs)


def decode(raw: Any) -> Image.Image:
    """An RGB image from an open file or bytes. Raises Unreadable."""
    try:
        image = Image.open(io.BytesIO(raw) if isinstance(raw, bytes) else raw)
        return image.convert("RGB")
    except (
        OSError,
        ValueError,
        SyntaxError,
        Image.DecompressionBombError,
    ) as error:  # what Pillow raises on broken files
        raise Unreadable(str(error)) from error


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


class Folder:
    """One sub-folder a class, read by timm's reader (natural order of the sub-folder names = class numbers)."""

    named = True

    def __init__(self, root: str, class_map: dict | None = None) -> None:
        from timm.data.readers import create_reader

        if not os.path.isdir(root):
            raise ValueError(f"there is no image folder {root}")
        try:
            self.reader = create_reader("", root=root, class_map=class_map)
        except RuntimeError as error:
            raise ValueError(
                f"the folder {root} holds no images: expected one sub-folder of image files a class"
            ) from error
        numbers: dict[str, int] = self.reader.class_to_idx
        names = {number: name for name, number in numbers.items()}
        self.classes = [names.get(i, UNNAMED.format(i)) for i in range(max(names) + 1)]

    def __len__(self) -> int:
        return len(self.reader)

    def read(self, index: int) -> tuple[Image.Image, int]:
        try:
            file, label = self.reader[index]
        except OSError as error:  # a dangling link, no permission
            raise Unreadable(str(error)) from error
        with file:
            return decode(file), label

    def name(self, index: int) -> str:
        return self.reader.filename(index)


class Rows:
    """Rows of the `datasets` library with an image column and an integer label column."""

    def __init__(self, rows: Any, where: str, image_key: str, label_key: str) -> None:
        import datasets

        for key in (image_key, label_key):
            if key not in rows.column_names:
                raise ValueError(f"{where} has no column {key!r}; its columns are {', '.join(rows.column_names)}")
        if len(rows) == 0:
            raise ValueError(f"{where} holds no images")
        self.rows = rows.cast_column(image_key, datasets.Image(decode=False))  # we decode, to count what cannot be read
        self.image_key, self.label_key = image_key, label_key
        feature = rows.features[label_key]
        self.named = isinstance(feature, datasets.ClassLabel)
        if self.named:
            self.classes = list(feature.names)
        else:
            labels = np.asarray(rows[label_key][:])
            if labels.dtype.kind not in "iu" or labels.min() < 0:
                raise ValueError(f"the column {label_key!r} of {where} must hold class numbers from 0, got {feature}")
            self.classes = [UNNAMED.format(i) for i in range(int(labels.max()) + 1)]

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, index: int) -> tuple[Image.Image, int]:
        row = self.rows[int(index)]
        image = row[self.image_key] or {}
        content = image.get("bytes") or image.get("path")
        if content is None:
            raise Unreadable("the row holds no image")
        return decode(content), int(row[self.label_key])

    def name(self, index: int) -> str:
        return str(self.rows[int(index)][self.image_key].get("path") or index)


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


def load_rows(kind: str, where: str, train: bool) -> Any:
    """The rows of parquet files, a Hugging Face data set or webdataset shards, as the `datasets` library reads them.

    Raises ValueError when the library or the files are missing.
    """
    try:
        import datasets
    except ImportError as error:
        raise ValueError(f"the source {kind!r} needs the package datasets: pip install 'hla-zoo[eval]'") from error
    if kind == "hf":
        name, _, split = where.partition(":")
        try:
            return datasets.load_dataset(name, split=split or ("train" if train else "validation"))
        except (OSError, ValueError) as error:  # not there, not reachable, no such split
            reason = " ".join(str(error).split())
            raise ValueError(f"the data set {where} cannot be loaded: {reason}") from error
    files = [file for pattern in _braces(where) for file in sorted(glob.glob(pattern, recursive=True))]
    if not files:
        raise ValueError(f"there is no {kind} file {where}")
    try:
        return datasets.load_dataset(kind, data_files=files, split="train")  # one unnamed split is called train
    except (datasets.exceptions.DatasetGenerationError, OSError, ValueError) as error:
        reason = " ".join(str(error.__cause__ or error).split())
        raise ValueError(f"{where} cannot be read as {kind}: {reason}") from error


def _braces(where: str) -> list[str]:
    """The patterns of webdataset's notation: "shard-{000..002}.tar" is three files, "{a,b}.tar" two."""
    match = re.search(r"\{([^{}]*)\}", where)
    if match is None:
        return [where]
    first, dots, last = match[1].partition("..")
    choices = match[1].split(",")
    if dots and first.isdecimal() and last.isdecimal():
        choices = [str(i).zfill(len(first)) for i in range(int(first), int(last) + 1)]
    return [file for c in choices for file in _braces(where[: match.start()] + c + where[match.end() :])]
