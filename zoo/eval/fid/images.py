"""Sets of uint8 images to be scored: a folder, an .npz in the layout of ADM, parquet files, or a live sampler.

Batches are cut from the whole set before they are dealt out to the processes, so that each batch, and with it every
rounding error of the network, is the same however many processes there are.
"""

import os
import re
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from zoo.data import open_source
from zoo.data.decoding import IMAGE_FILES, Unreadable, content, decode
from zoo.data.loader import Loader
from zoo.data.rows import load_rows, undecoded
from zoo.data.transforms import center_crop

VIDEO_FILES = (".mp4", ".avi", ".mov", ".mkv", ".webm", ".gif")
Numbered = tuple[Tensor, Tensor]  # the numbers [B] int64 and the images [B, 3, H, W] uint8


class ImageSet(Protocol):
    """Images with numbers from 0."""

    name: str

    @property
    def count(self) -> int | None:
        """How many images; None where only the end of the iteration tells."""
        ...

    def batches(self, size: int, rank: int, world: int) -> Iterator[Numbered]:
        """The batches of one of `world` processes: every world-th batch of `size` images."""
        ...


def open_images(where: Any, image_size: int | None = None, image_key: str = "image", workers: int = 0) -> ImageSet:
    """The images at a path (folder, .npz, .parquet file or pattern), the embedded `digits`, or of an iterable of
    uint8 batches [B, 3, H, W].

    image_size: cut and resize every image of a folder or of parquet files to this many pixels, as ADM does.  workers:
    loader processes. Raises ValueError when nothing is there, for videos, and for an .npz of another layout.
    """
    if not isinstance(where, str | os.PathLike):
        return Live(where)
    path = str(where)
    if path.lower().endswith(VIDEO_FILES):
        raise ValueError(f"{path} is a video, but images are scored here: a folder, an .npz or a .parquet file")
    if os.path.isdir(path):
        return Files(path, image_size, workers)
    if path == "digits":
        return Digits(image_size, workers)
    if path.endswith(".npz"):
        return Npz(path)
    if path.endswith(".parquet"):
        return Rows(path, image_size, image_key, workers)
    raise ValueError(f"cannot read images from {path!r}: expected an existing folder, an .npz or a .parquet file")


class _Decoded:
    """Images that are decoded one by one, in loader processes."""

    def __init__(self, name: str, count: int, image_size: int | None, workers: int) -> None:
        self.name, self.count, self.image_size, self.workers = name, count, image_size, workers

    def __getitem__(self, number: int) -> Numbered:
        try:
            image = decode(self.raw(number))
        except Unreadable as error:
            raise ValueError(f"{self.called(number)} cannot be read: {error}") from error
        if self.image_size:
            image = center_crop(image, self.image_size)
        return torch.tensor(number), torch.from_numpy(np.array(image)).permute(2, 0, 1)

    def raw(self, number: int) -> Any:
        """The bytes or the path of one image."""
        raise NotImplementedError

    def called(self, number: int) -> str:
        """What messages call one image."""
        return f"image {number} of {self.name}"

    def batches(self, size: int, rank: int, world: int) -> Iterator[Numbered]:
        parts = [list(range(i, min(i + size, self.count))) for i in range(0, self.count, size)]
        yield from Loader(self, parts[rank::world], self.workers, self._stack)

    def _stack(self, items: list[Numbered]) -> Numbered:
        sizes = {tuple(image.shape[1:]) for _, image in items}
        if len(sizes) > 1:
            one, other = sorted(sizes)[:2]
            raise ValueError(
                f"{self.name} holds images of several sizes ({one[1]} x {one[0]} and {other[1]} x {other[0]} pixels); "
                "give one with image_size"
            )
        return torch.stack([number for number, _ in items]), torch.stack([image for _, image in items])


class Files(_Decoded):
    """All image files below a folder, in the order of their paths."""

    def __init__(self, root: str, image_size: int | None, workers: int) -> None:
        found = sorted(p for p in Path(root).rglob("*") if p.is_file())
        self.files = [p for p in found if p.suffix.lower() in IMAGE_FILES]
        if not self.files and any(p.suffix.lower() in VIDEO_FILES for p in found):
            raise ValueError(f"{root} holds videos, but images are scored here")
        if not self.files:
            raise ValueError(f"the folder {root} holds no images ({', '.join(IMAGE_FILES)})")
        super().__init__(root, len(self.files), image_size, workers)

    def raw(self, number: int) -> Any:
        return self.files[number].read_bytes()

    def called(self, number: int) -> str:
        return str(self.files[number])


class Digits(_Decoded):
    """The embedded digits that are not trained on."""

    def __init__(self, image_size: int | None, workers: int) -> None:
        self.source = open_source("digits", "", train=False)
        super().__init__("digits", len(self.source), image_size, workers)

    def __getitem__(self, number: int) -> Numbered:
        image = self.source.read(number)[0]
        image = center_crop(image, self.image_size) if self.image_size else image
        return torch.tensor(number), torch.from_numpy(np.array(image)).permute(2, 0, 1)


class Rows(_Decoded):
    """The image column of parquet files."""

    def __init__(self, where: str, image_size: int | None, image_key: str, workers: int) -> None:
        rows = undecoded(load_rows("parquet", where, True), where, image_key)
        self.rows, self.image_key = rows.select_columns([image_key]), image_key
        super().__init__(where, len(self.rows), image_size, workers)

    def raw(self, number: int) -> Any:
        return content(self.rows[number][self.image_key])


class Npz:
    """The array `arr_0`, uint8 [N, H, W, 3], of an .npz file, read piece by piece and never held whole."""

    def __init__(self, file: str) -> None:
        self.name, self.file = file, file
        with self._open() as (_, shape, dtype):
            if len(shape) == 5:
                raise ValueError(f"arr_0 of {file} holds videos, {list(shape)}; images are uint8 [N, H, W, 3]")
            if dtype != np.uint8 or len(shape) != 4 or shape[3] != 3:
                raise ValueError(f"arr_0 of {file} must be uint8 [N, H, W, 3], got {dtype} {list(shape)}")
            self.shape = shape
        self.count: int = shape[0]

    def _open(self) -> Any:
        return _OpenArray(self.file)

    def batches(self, size: int, rank: int, world: int) -> Iterator[Numbered]:
        row = int(np.prod(self.shape[1:]))
        with self._open() as (stream, shape, _):
            for i, start in enumerate(range(0, shape[0], size)):
                n = min(size, shape[0] - start)
                if i % world != rank:
                    stream.seek(n * row, 1)
                    continue
                content = stream.read(n * row)
                if len(content) < n * row:
                    raise ValueError(f"{self.file} is truncated: it ends in image {start + len(content) // row}")
                images = torch.frombuffer(bytearray(content), dtype=torch.uint8).reshape(n, *shape[1:])
                yield torch.arange(start, start + n), images.permute(0, 3, 1, 2)


class _OpenArray:
    """Context: (stream after the header, shape, dtype) of arr_0."""

    def __init__(self, file: str) -> None:
        self.file = file

    def __enter__(self) -> tuple[Any, tuple[int, ...], np.dtype]:
        try:
            self.archive = zipfile.ZipFile(self.file)
        except (OSError, zipfile.BadZipFile) as error:
            raise ValueError(f"{self.file} is not a readable .npz file: {error}") from error
        if "arr_0.npy" not in self.archive.namelist():
            names = ", ".join(n.removesuffix(".npy") for n in self.archive.namelist())
            self.archive.close()
            raise ValueError(f"{self.file} holds no images: expected the array arr_0, found {names}")
        stream = self.archive.open("arr_0.npy")
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if version[0] == 1 else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(stream)
        if fortran:
            raise ValueError(f"arr_0 of {self.file} is in Fortran order; images are read row by row")
        return stream, shape, dtype

    def __exit__(self, *_: object) -> None:
        self.archive.close()


class Live:
    """The images of a running sampler: an iterable of uint8 batches [B, 3, H, W], the share of this process."""

    name = "live sampler"
    count: int | None = None

    def __init__(self, batches: Iterable[Any]) -> None:
        self.source = batches

    def batches(self, size: int, rank: int, world: int) -> Iterator[Numbered]:
        done = 0
        for batch in self.source:
            images = torch.as_tensor(batch)
            if images.ndim == 5:
                raise ValueError(f"the sampler yields videos, {list(images.shape)}; images are uint8 [B, 3, H, W]")
            if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] != 3:
                found = f"{re.sub('torch.', '', str(images.dtype))} {list(images.shape)}"
                raise ValueError(f"the sampler must yield uint8 batches [B, 3, H, W], got {found}")
            yield (done + torch.arange(len(images))) * world + rank, images
            done += len(images)
