"""Parquet files, Hugging Face data sets and webdataset shards, through the `datasets` library, which gives every row a
number, so that any order can be repeated and continued. It copies parquet files and shards once into its cache folder.
"""

import contextlib
import glob
import os
import re
import tarfile
from typing import Any

import numpy as np
from PIL import Image

from zoo.data.classes import MOST, UNNAMED
from zoo.data.decoding import content, decode

MOST_FILES = 1_000_000  # that one pattern with braces may name


class Rows:
    """Rows of the `datasets` library with an image column and an integer label column. Raises ValueError for columns of
    another kind."""

    def __init__(self, rows: Any, where: str, image_key: str, label_key: str) -> None:
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


def undecoded(rows: Any, where: str, image_key: str, *others: str) -> Any:
    """`rows` with images as bytes or paths (we decode, to count what cannot be read). Raises ValueError when there is
    no row, a column is missing, or the one of images holds something else."""
    import datasets

    for key in (image_key, *others):
        if key not in rows.column_names:
            raise ValueError(f"{where} has no column {key!r}; its columns are {', '.join(rows.column_names)}")
    if len(rows) == 0:
        raise ValueError(f"{where} holds no images")
    feature = rows.features[image_key]
    try:
        return rows.cast_column(image_key, datasets.Image(decode=False))
    except Exception as error:  # pyarrow's, of many kinds
        raise ValueError(f"the column {image_key!r} of {where} holds {feature}, not images") from error


def _numbered(rows: Any, where: str, key: str) -> list[str]:
    """Names for classes of which only the numbers are known."""
    feature = rows.features[key]
    must = f"the column {key!r} of {where} must hold class numbers from 0"
    if not re.fullmatch(r"u?int\d+", str(getattr(feature, "dtype", ""))):
        raise ValueError(f"{must}, got {feature}")
    column = rows.with_format("arrow")[key][:]
    if column.null_count:
        raise ValueError(f"{must}, but {column.null_count} of its {len(column)} rows are empty")
    labels = np.asarray(column)
    if labels.min() < 0 or labels.max() >= MOST:
        wrong = labels.min() if labels.min() < 0 else labels.max()
        raise ValueError(f"{must} to {MOST - 1}, got {wrong}")
    return [UNNAMED.format(i) for i in range(int(labels.max()) + 1)]


def load_rows(kind: str, where: str, train: bool) -> Any:
    """The rows of parquet files, a Hugging Face data set or webdataset shards, as the `datasets` library reads them.

    Raises ValueError when the library or the files are missing, and for a file that is truncated, empty or of another
    kind.
    """
    try:
        import datasets
    except ImportError as error:
        raise ValueError(f"the source {kind!r} needs the package datasets: pip install 'hla-zoo[eval]'") from error
    if kind == "hf":
        name, _, split = where.partition(":")
        try:
            return datasets.load_dataset(name, split=split or ("train" if train else "validation"))
        except Exception as error:  # not there, not reachable, no such split, a script: errors of many libraries
            raise ValueError(f"the data set {where} cannot be loaded: {_reason(error)}") from error
    files = [file for pattern in _braces(where) for file in sorted(glob.glob(pattern, recursive=True))]
    if not files:
        raise ValueError(f"there is no {kind} file {where}")
    for file in files:
        _check_file(kind, file)
    try:
        return datasets.load_dataset(kind, data_files=files, split="train")  # one unnamed split is called train
    except Exception as error:  # of tarfile, pyarrow, json, pickle, ...
        for file in files:
            _check_file(kind, file, whole=True)
        raise ValueError(f"{where} cannot be read as {kind}: {_reason(error)}") from error


def _ends(file: str) -> bool:
    """Whether an uncompressed tar file ends in zeros: tarfile takes one that was cut at a header for a whole one."""
    with contextlib.suppress(tarfile.ReadError), tarfile.open(file, "r:"), open(file, "rb") as opened:
        opened.seek(-2 * tarfile.BLOCKSIZE, os.SEEK_END)
        return not any(opened.read())
    return True


def _check_file(kind: str, file: str, whole: bool = False) -> None:
    """Raise ValueError, with the file, for one that is no tar or parquet file or holds nothing; whole: or that ends too
    early."""
    import pyarrow.parquet

    try:
        if kind == "parquet":
            empty = pyarrow.parquet.read_metadata(file).num_rows == 0
        else:
            with tarfile.open(file) as tar:
                empty = tar.next() is None
                if not _ends(file):
                    raise ValueError("it has no end-of-archive mark, so it was truncated")
                for _ in tar if whole else ():
                    pass
    except Exception as error:
        raise ValueError(f"{file} cannot be read as {kind}: {_reason(error)}") from error
    if empty:
        raise ValueError(f"{file} cannot be read as {kind}: it holds nothing")


def _reason(error: BaseException) -> str:
    """What went wrong first, in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split()) or type(error).__name__


def _braces(where: str) -> list[str]:
    """The patterns of webdataset's notation: "shard-{000..002}.tar" is three files, "{a,b}.tar" two."""
    match = re.search(r"\{([^{}]*)\}", where)
    if match is None:
        return [where]
    first, dots, last = match[1].partition("..")
    choices = match[1].split(",")
    if dots and first.isdecimal() and last.isdecimal():
        if int(last) - int(first) >= MOST_FILES:
            raise ValueError(f"{where} names more than {MOST_FILES} files")
        choices = [str(i).zfill(len(first)) for i in range(int(first), int(last) + 1)]
    return [file for c in choices for file in _braces(where[: match.start()] + c + where[match.end() :])]
