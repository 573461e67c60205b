"""Sources of labelled images.

Scikit-learn's digits and image folders are read directly. Parquet files, Hugging Face data sets and webdataset shards
are read through the `datasets` library, which copies them once into its cache folder and numbers the rows, so that any
order can be repeated and resumed.
"""

import contextlib
import glob
import os
import re
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from PIL import Image
from timm.utils.misc import natural_key

from zoo.data.decoding import IMAGE_FILES, Unreadable, content, decode

if TYPE_CHECKING:
    from datasets import Dataset

DIGITS_TRAIN = 1000  # number of training images among the 1797; the rest is the validation set
FOLDER_FILES = (*IMAGE_FILES, ".gif")  # only the first frame of an animation is read
UNNAMED = "class {}"  # name of a class that has only a number
MAX_CLASSES = 1_000_000  # a column with larger numbers does not hold class labels
MAX_FILES = 1_000_000  # files per pattern with braces


class Source(Protocol):
    """A numbered set of labelled images.

    classes: class names by number.  named: whether the names come from the data; the named classes of the training and
    validation sets must be equal.
    """

    @property
    def classes(self) -> list[str]: ...

    @property
    def named(self) -> bool: ...

    def __len__(self) -> int: ...

    def read(self, index: int) -> tuple[Image.Image, int]:
        """Return the RGB image and the class number of a sample. Raises Unreadable."""

    def name(self, index: int) -> str:
        """Return the name of an image in its source, for messages."""


def open_source(
    kind: str,
    where: str,
    train: bool,
    image_key: str = "image",
    label_key: str = "label",
    class_map: Mapping[str, int] | None = None,
) -> Source:
    """Open a source of images.

    kind, where: as `source` and as `train` or `val` in `DataSettings`.  train: whether to open the training set, for
    kinds that hold both.  class_map: class number of each sub-folder (folder only); by default sub-folders are numbered
    in natural order. Raises ValueError for a source that is missing or has no images.
    """
    if kind == "digits":
        return Digits(train)
    if not where:
        raise ValueError(
            f"data.{'train' if train else 'val'} is empty: the source {kind!r} needs a path or name"
        )
    if kind == "folder":
        return Folder(where, class_map)
    return Rows(load_rows(kind, where, train), where, image_key, label_key)


class Digits:
    """1797 scans of handwritten digits, 8 x 8 pixels, in a fixed random split (scikit-learn, from UCI)."""

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
class Subset:
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


def same_classes(ours: list[str], theirs: list[str]) -> bool:
    """Whether two lists of classes are compatible: of equal length, and with equal names where both have names."""
    if len(ours) != len(theirs):
        return False
    pairs = enumerate(zip(ours, theirs, strict=True))
    return all(a == b or UNNAMED.format(i) in (a, b) for i, (a, b) in pairs)


# Folders


class Folder:
    """All images below a folder, in timm's order: natural order of paths, and of sub-folder names for class numbers.

    The class of an image is the name of its folder. Links are followed, except back into a folder around them.
    class_map: class number of each sub-folder, others are ignored. Raises ValueError if there is no
    folder or no image, and without a class_map for a sub-folder without images.
    """

    named = True

    def __init__(self, root: str, class_map: Mapping[str, int] | None = None) -> None:
        if not os.path.isdir(root):
            raise ValueError(f"there is no image folder {root}")
        found = [(file, os.path.basename(os.path.relpath(os.path.dirname(file), root))) for file in _images(root)]
        names = sorted({name for _, name in found}, key=natural_key)
        numbers: Mapping[str, int] = class_map or {name: i for i, name in enumerate(names)}
        self.root = root
        self.samples = sorted(
            ((file, numbers[name]) for file, name in found if name in numbers),
            key=lambda sample: natural_key(sample[0]),
        )
        if not self.samples:
            raise ValueError(
                f"the folder {root} holds no images: expected one sub-folder of image files per class "
                f"({', '.join(FOLDER_FILES)})"
            )
        if class_map is None and (empty := _without_images(root, found)):
            raise ValueError(f"the folder {root} has no image of the class {empty}: delete its sub-folder or fill it")
        known = {number: name for name, number in numbers.items()}
        self.classes = [known.get(i, UNNAMED.format(i)) for i in range(max(known) + 1)]

    def __len__(self) -> int:
        return len(self.samples)

    def read(self, index: int) -> tuple[Image.Image, int]:
        file, label = self.samples[index]
        try:
            with open(file, "rb") as opened:
                return decode(opened), label
        except OSError as error:  # a dangling link, no permission
            raise Unreadable(str(error)) from error

    def name(self, index: int) -> str:
        return os.path.relpath(self.samples[index][0], self.root)


def _images(folder: str, above: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the image files below a folder, at any depth.

    above: real paths of its parent folders, which are skipped if a link leads back to them.
    """
    here = os.path.realpath(folder)
    if here in above:
        return
    with os.scandir(folder) as entries:
        inside = list(entries)
    for entry in inside:
        if _is_folder(entry):
            yield from _images(entry.path, (*above, here))
        elif entry.name.lower().endswith(FOLDER_FILES):
            yield entry.path


def _without_images(root: str, found: list[tuple[str, str]]) -> str:
    """Return the name of a visible sub-folder that holds none of the images found; empty if every sub-folder has
    images."""
    filled = {os.path.relpath(file, root).split(os.sep)[0] for file, _ in found}
    with os.scandir(root) as entries:
        empty = [e.name for e in entries if e.name not in filled and e.name[0] != "." and _is_folder(e)]
    return min(empty, default="")


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that leads to itself
        return False


# Rows of the `datasets` library


class Rows:
    """Rows of the `datasets` library with an image column and an integer label column. Raises ValueError for other
    columns."""

    def __init__(self, rows: "Dataset", where: str, image_key: str, label_key: str) -> None:
        self.rows = undecoded(rows, where, image_key, label_key)
        self.image_key, self.label_key = image_key, label_key
        feature = rows.features[label_key]
        names = getattr(feature, "names", None)
        self.named = names is not None
        self.classes = list(names or []) or _numbered(rows, where, label_key)

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, index: int) -> tuple[Image.Image, int]:
        row = self.rows[int(index)]
        return decode(content(row[self.image_key])), int(row[self.label_key])

    def name(self, index: int) -> str:
        return str((self.rows[int(index)][self.image_key] or {}).get("path") or index)


def undecoded(rows: "Dataset", where: str, image_key: str, *others: str) -> "Dataset":
    """Return `rows` with undecoded images (bytes or paths). They are decoded later, where unreadable ones are counted.
    Raises ValueError if there are no rows, if a column is missing, and if the image column holds no images."""
    import datasets

    for key in (image_key, *others):
        if key not in rows.column_names:
            raise ValueError(f"{where} has no column {key!r}; its columns are {', '.join(rows.column_names)}")
    if len(rows) == 0:
        raise ValueError(f"{where} holds no images")
    feature = rows.features[image_key]
    try:
        return rows.cast_column(image_key, datasets.Image(decode=False))
    except Exception as error:  # pyarrow raises errors of many classes
        raise ValueError(f"the column {image_key!r} of {where} holds {feature}, not images") from error


def _numbered(rows: "Dataset", where: str, key: str) -> list[str]:
    """Make names for the classes of a column of class numbers. Raises ValueError for a column of other values."""
    feature = rows.features[key]
    must = f"the column {key!r} of {where} must hold class numbers from 0"
    if not re.fullmatch(r"u?int\d+", str(getattr(feature, "dtype", ""))):
        raise ValueError(f"{must}, got {feature}")
    column = rows.with_format("arrow")[key][:]
    if column.null_count:
        raise ValueError(f"{must}, but {column.null_count} of its {len(column)} rows are empty")
    labels = np.asarray(column)
    if labels.min() < 0 or labels.max() >= MAX_CLASSES:
        wrong = labels.min() if labels.min() < 0 else labels.max()
        raise ValueError(f"{must} to {MAX_CLASSES - 1}, got {wrong}")
    return [UNNAMED.format(i) for i in range(int(labels.max()) + 1)]


def load_rows(kind: str, where: str, train: bool) -> "Dataset":
    """Load parquet files, a Hugging Face data set or webdataset shards through the `datasets` library.

    kind: parquet, hf or webdataset. Raises ValueError if the library or the files are missing, and for a file that is
    truncated, empty or of another format.
    """
    try:
        import datasets
    except ImportError as error:
        raise ValueError(f"the source {kind!r} needs the package datasets: pip install 'hla-zoo[eval]'") from error
    if kind == "hf":
        name, _, split = where.partition(":")
        try:
            return datasets.load_dataset(name, split=split or ("train" if train else "validation"))
        except Exception as error:  # many classes: no such data set or split, no connection
            raise ValueError(f"the data set {where} cannot be loaded: {_reason(error)}") from error
    files = [file for pattern in _braces(where) for file in sorted(glob.glob(pattern, recursive=True))]
    if not files:
        raise ValueError(f"there is no {kind} file {where}")
    for file in files:
        _check_file(kind, file)
    try:
        return datasets.load_dataset(kind, data_files=files, split="train")  # one unnamed split is called train
    except Exception as error:  # raised by tarfile, pyarrow, json, pickle and others
        for file in files:
            _check_file(kind, file, whole=True)
        raise ValueError(f"{where} cannot be read as {kind}: {_reason(error)}") from error


def _has_end_mark(file: str) -> bool:
    """Whether an uncompressed tar file has its end-of-archive mark, two blocks of zeros. Tarfile does not check it, and
    accepts a file that was truncated between two members. True for compressed files."""
    with contextlib.suppress(tarfile.ReadError), tarfile.open(file, "r:"), open(file, "rb") as opened:
        opened.seek(-2 * tarfile.BLOCKSIZE, os.SEEK_END)
        return not any(opened.read())
    return True


def _check_file(kind: str, file: str, whole: bool = False) -> None:
    """Raise ValueError for a file that is empty or not of this kind (parquet or webdataset, a tar file).

    whole: read a tar file to its end, to find a damaged or truncated member.
    """
    import pyarrow.parquet

    try:
        if kind == "parquet":
            empty = pyarrow.parquet.read_metadata(file).num_rows == 0
        else:
            with tarfile.open(file) as tar:
                empty = tar.next() is None
                if not _has_end_mark(file):
                    raise ValueError("it has no end-of-archive mark, so it was truncated")
                for _ in tar if whole else ():
                    pass
    except Exception as error:
        raise ValueError(f"{file} cannot be read as {kind}: {_reason(error)}") from error
    if empty:
        raise ValueError(f"{file} cannot be read as {kind}: it holds nothing")


def _reason(error: BaseException) -> str:
    """Return the message of the original error in a chain of causes, on one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split()) or type(error).__name__


def _braces(where: str) -> list[str]:
    """Expand webdataset's braces: "shard-{000..002}.tar" gives three names, "{a,b}.tar" two. Raises ValueError for more
    than `MAX_FILES` names."""
    match = re.search(r"\{([^{}]*)\}", where)
    if match is None:
        return [where]
    first, dots, last = match[1].partition("..")
    choices = match[1].split(",")
    if dots and first.isdecimal() and last.isdecimal():
        if int(last) - int(first) >= MAX_FILES:
            raise ValueError(f"{where} names more than {MAX_FILES} files")
        choices = [str(i).zfill(len(first)) for i in range(int(first), int(last) + 1)]
    return [file for c in choices for file in _braces(where[: match.start()] + c + where[match.end() :])]
