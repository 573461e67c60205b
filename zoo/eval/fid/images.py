"""Sets of uint8 images to be scored: image folders, .npz files, parquet files and running samplers.

Batches do not depend on the number of processes, so that the rounding errors of the network do not either.
"""

import os
import re
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from zoo.data import open_source
from zoo.data.decoding import IMAGE_FILES, Unreadable, content, decode
from zoo.data.loader import Loader
from zoo.data.sources import load_rows, undecoded
from zoo.data.transforms import center_crop
from zoo.data.video.files import VIDEO_FILES

VIDEO_ENDINGS = (*VIDEO_FILES, ".gif")
Numbered = tuple[Tensor, Tensor]  # (numbers [B] int64, images [B, 3, H, W] uint8)
Place = str | os.PathLike | Iterable[Tensor]  # a path, or the batches of a running sampler


class ImageSet(Protocol):
    """Images numbered from 0."""

    name: str

    @property
    def count(self) -> int | None:
        """Number of images; None for a running sampler, whose number is unknown."""

    def batches(self, size: int, rank: int, world: int) -> Iterator[Numbered]:
        """Yield the batches rank, rank + world, rank + 2 world, ... of `size` images each."""


def open_image_set(where: Place, image_size: int | None = None, image_key: str = "image", workers: int = 0) -> ImageSet:
    """Open a set of images.

    where: a folder, an .npz file in the layout of ADM, a .parquet file or pattern, "digits" (the validation images of
    scikit-learn's digits), or an iterable of uint8 batches [B, 3, H, W].  image_size: side in pixels to which images of
    folders and parquet files are cropped and resized, as ADM does; None keeps their size.  image_key: image column of
    parquet files.  workers: DataLoader workers. Raises ValueError for missing images, videos, and an .npz file of
    another layout.
    """
    if not isinstance(where, str | os.PathLike):
        return LiveImages(where)
    path = str(where)
    if path.lower().endswith(VIDEO_ENDINGS):
        raise ValueError(f"{path} is a video, but images are scored here: a folder, an .npz or a .parquet file")
    if os.path.isdir(path):
        return ImageFiles(path, image_size, workers)
    if path == "digits":
        return DigitImages(image_size, workers)
    if path.endswith(".npz"):
        return NpzImages(path)
    if path.endswith(".parquet"):
        return ParquetImages(path, image_size, image_key, workers)
    raise ValueError(f"cannot read images from {path!r}: expected an existing folder, an .npz or a .parquet file")


def refuse_mixed_sizes(name: str, *sizes: Sequence[int]) -> None:
    """Raise ValueError for a set of images with several sizes (H, W)."""
    if len(sizes) > 1:
        one, other = (f"{width} x {height}" for height, width in sizes[:2])
        raise ValueError(f"{name} holds images of several sizes ({one} and {other} pixels); give one with image_size")


class _Decoded(Dataset):
    """Base class of sets whose images DataLoader workers decode one by one."""

    def __init__(self, name: str, count: int, image_size: int | None, workers: int) -> None:
        self.name, self.count, self.image_size, self.workers = name, count, image_size, workers

    def __getitem__(self, number: int) -> Numbered:
        try:
            image = decode(self.raw(number))
        except Unreadable as error:
            raise ValueError(f"{self.image_name(number)} cannot be read: {error}") from error
        return self._numbered(number, image)

    def _numbered(self, number: int, image: Image.Image) -> Numbered:
        if self.image_size:
            image = center_crop(image, self.image_size)
        return torch.tensor(number), torch.from_numpy(np.array(image)).permute(2, 0, 1)

    def raw(self, number: int) -> bytes | str:
        """Return the bytes or the path of one image."""
        raise NotImplementedError

    def image_name(self, number: int) -> str:
        """Return the name of one image in error messages."""
        return f"image {number} of {self.name}"

    def batches(self, size: int, rank: int, world: int) -> Iterator[Numbered]:
        parts = [list(range(i, min(i + size, self.count))) for i in range(0, self.count, size)]
        yield from Loader(self, parts[rank::world], self.workers, self._stack)

    def _stack(self, items: list[Numbered]) -> Numbered:
        refuse_mixed_sizes(self.name, *sorted({tuple(image.shape[1:]) for _, image in items}))
        return torch.stack([number for number, _ in items]), torch.stack([image for _, image in items])


class ImageFiles(_Decoded):
    """All image files below a folder, in the order of their paths."""

    def __init__(self, root: str, image_size: int | None, workers: int) -> None:
        found = sorted(p for p in Path(root).rglob("*") if p.is_file())
        self.files = [p for p in found if p.suffix.lower() in IMAGE_FILES]
        if not self.files and any(p.suffix.lower() in VIDEO_ENDINGS for p in found):
            raise ValueError(f"{root} holds videos, but images are scored here")
        if not self.files:
            raise ValueError(f"the folder {root} holds no images ({', '.join(IMAGE_FILES)})")
        super().__init__(root, len(self.files), image_size, workers)

    def raw(self, number: int) -> bytes | str:
        return self.files[number].read_bytes()

    def image_name(self, number: int) -> str:
        return str(self.files[number])


class DigitImages(_Decoded):
    """The validation images of scikit-learn's digits."""

    def __init__(self, image_size: int | None, workers: int) -> None:
        self.source = open_source("digits", "", train=False)
        super().__init__("digits", len(self.source), image_size, workers)

    def __getitem__(self, number: int) -> Numbered:
        return self._numbered(number, self.source.read(number)[0])


class ParquetImages(_Decoded):
    """The image column of parquet files."""

    def __init__(self, where: str, image_size: int | None, image_key: str, workers: int) -> None:
        rows = undecoded(load_rows("parquet", where, True), where, image_key)
        self.rows, self.image_key = rows.select_columns([image_key]), image_key
        super().__init__(where, len(self.rows), image_size, workers)

    def raw(self, number: int) -> bytes | str:
        return content(self.rows[number][self.image_key])


class NpzImages:
    """The array `arr_0`, uint8 [N, H, W, 3], of an .npz file. It is read batch by batch, so that it may be larger than
    memory."""

    def __init__(self, file: str) -> None:
        self.name, self.file = file, file
        with self._open() as (_, shape, dtype):
            if len(shape) == 5:
                raise ValueError(f"arr_0 of {file} holds videos, {list(shape)}; images are uint8 [N, H, W, 3]")
            if dtype != np.uint8 or len(shape) != 4 or shape[3] != 3:
                raise ValueError(f"arr_0 of {file} must be uint8 [N, H, W, 3], got {dtype} {list(shape)}")
            self.count, *self.size = shape

    @contextmanager
    def _open(self) -> Iterator[tuple[IO[bytes], tuple[int, ...], np.dtype]]:
        """Context with (stream after the header, shape, dtype) of arr_0."""
        try:
            archive = zipfile.ZipFile(self.file)
        except (OSError, zipfile.BadZipFile) as error:
            raise ValueError(f"{self.file} is not a readable .npz file: {error}") from error
        with archive:
            if "arr_0.npy" not in archive.namelist():
                names = ", ".join(n.removesuffix(".npy") for n in archive.namelist())
                raise ValueError(f"{self.file} holds no images: expected the array arr_0, found {names}")
            stream = archive.open("arr_0.npy")
            version = np.lib.format.read_magic(stream)
            read = np.lib.format.read_array_header_1_0 if version[0] == 1 else np.lib.format.read_array_header_2_0
            shape, fortran, dtype = read(stream)
            if fortran:
                raise ValueError(f"arr_0 of {self.file} is in Fortran order; images are read row by row")
            yield stream, shape, dtype

    def batches(self, size: int, rank: int, world: int) -> Iterator[Numbered]:
        row = int(np.prod(self.size))
        with self._open() as (stream, _, _):
            for i, start in enumerate(range(0, self.count, size)):
                n = min(size, self.count - start)
                if i % world != rank:
                    stream.seek(n * row, 1)
                    continue
                content = stream.read(n * row)
                if len(content) < n * row:
                    raise ValueError(f"{self.file} is truncated: it ends in image {start + len(content) // row}")
                images = torch.frombuffer(bytearray(content), dtype=torch.uint8).reshape(n, *self.size)
                yield torch.arange(start, start + n), images.permute(0, 3, 1, 2)


class LiveImages:
    """The images of a running sampler: an iterable of the uint8 batches [B, 3, H, W] of this process."""

    name = "live sampler"
    count: int | None = None

    def __init__(self, batches: Iterable[Tensor]) -> None:
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
