"""Writers of samples: an .npz file in ADM's layout, or a folder of PNG or mp4 files. All can be resumed."""

import json
import os
import shutil
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from zoo.config import Tree
from zoo.data.video.files import read_video, write_video
from zoo.diffusion.preview import ROWS, save_sheet
from zoo.eval.fid.images import NpzImages
from zoo.io import write_csv, write_json

SHEET = "contact-sheet.png"


class Output:
    """Base class of writers of numbered images, in any order and from any number of processes.

    The metadata in PATH.json is written first. When more images are added later, their metadata must be the same.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.metadata_file = Path(f"{path.rstrip('/')}.json")

    def check(self, metadata: Tree) -> None:
        """Raise ValueError if existing images have other metadata than `metadata`."""
        if not self.metadata_file.is_file():
            if self.path.exists() or any(True for _ in self.numbers()):
                raise ValueError(
                    f"{self.path} exists, but no {self.metadata_file.name} says how it was made: choose another out"
                )
            return
        old, new = json.loads(self.metadata_file.read_text())["sampling"], json.loads(json.dumps(metadata["sampling"]))
        changed = sorted(k for k in old.keys() | new.keys() if old.get(k) != new.get(k))
        if changed:
            raise ValueError(f"{self.path} holds images made in another way; they differ in {', '.join(changed)}")

    def start(self, metadata: Tree) -> None:
        """Create the output and write the metadata."""
        write_json(metadata, self.metadata_file)

    def missing(self, count: int) -> list[int]:
        """Return the numbers below `count` of missing images. Raises ValueError if there are images with larger
        numbers."""
        there = set(self.numbers())
        more = max(there, default=-1) + 1
        if more > count:
            raise ValueError(f"{self.path} already holds images up to number {more}: ask for at least as many")
        return [i for i in range(count) if i not in there]

    def numbers(self) -> Iterator[int]:
        """Yield the numbers of the existing images."""
        raise NotImplementedError

    def write(self, numbers: Sequence[int], images: Tensor) -> None:
        """Write images, uint8 [B, 3, H, W], or videos, uint8 [B, 3, T, H, W], atomically."""
        raise NotImplementedError

    def finish(self, labels: list[int] | list[str], column: str) -> None:
        """Complete the output with the labels or prompts of all images. column: "label" or "text"."""
        raise NotImplementedError


class PngFolder(Output):
    """Folder of PNG files, 000000.png and so on, with metadata.csv (columns file_name, and label or text). The
    `datasets` library can load it."""

    ending = ".png"

    def numbers(self) -> Iterator[int]:
        return (int(file.stem) for file in self.path.glob(f"*{self.ending}") if file.stem.isdecimal())

    def start(self, metadata: Tree) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        super().start(metadata)

    def write(self, numbers: Sequence[int], images: Tensor) -> None:
        for number, image in zip(numbers, images, strict=True):
            file = self.path / f"{number:06d}.png"
            temporary = file.with_suffix(".tmp")
            Image.fromarray(image.permute(1, 2, 0).numpy()).save(temporary, format="PNG")
            os.replace(temporary, file)

    def finish(self, labels: list[int] | list[str], column: str) -> None:
        rows = [(f"{i:06d}{self.ending}", label) for i, label in enumerate(labels)]
        write_csv(("file_name", column), rows, self.path / "metadata.csv")


class NpzFile(Output):
    """An .npz file in ADM's layout: images arr_0, uint8 [N, H, W, 3], and for class-conditional models labels arr_1,
    int64 [N]. Until `finish`, images are kept in several files in the folder PATH.parts."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.parts = Path(f"{path}.parts")

    def numbers(self) -> Iterator[int]:
        if self.path.is_file():
            yield from range(NpzImages(str(self.path)).count)
        for file in self.parts.glob("*.npz"):
            with np.load(file, allow_pickle=False) as arrays:
                yield from arrays["numbers"].tolist()

    def missing(self, count: int) -> list[int]:
        missing = super().missing(count)
        if missing and self.path.is_file():
            raise ValueError(f"{self.path} is finished and holds fewer than {count} images: choose another out")
        return missing

    def start(self, metadata: Tree) -> None:
        if not self.path.is_file():
            self.parts.mkdir(parents=True, exist_ok=True)
        super().start(metadata)

    def write(self, numbers: Sequence[int], images: Tensor) -> None:
        file = self.parts / f"{numbers[0]:08d}.npz"
        with file.with_suffix(".tmp").open("wb") as opened:
            np.savez(opened, numbers=np.array(numbers), images=images.permute(0, 2, 3, 1).numpy())
        os.replace(file.with_suffix(".tmp"), file)

    def finish(self, labels: list[int] | list[str], column: str) -> None:
        if self.path.is_file():
            return
        temporary = self.path.with_suffix(".tmp")
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
            rows = self._rows()
            first = next(rows)
            with archive.open("arr_0.npy", "w", force_zip64=True) as stream:
                header = {"descr": "|u1", "fortran_order": False, "shape": (len(labels), *first.shape)}
                np.lib.format.write_array_header_1_0(stream, header)
                stream.write(first.tobytes())
                for _, row in zip(labels[1:], rows, strict=False):
                    stream.write(row.tobytes())
            if column == "label":
                with archive.open("arr_1.npy", "w") as stream:
                    np.lib.format.write_array(stream, np.array(labels, dtype=np.int64))
        os.replace(temporary, self.path)
        shutil.rmtree(self.parts)

    def _rows(self) -> Iterator[np.ndarray]:
        """Yield the images in order, with one part file in memory at a time."""
        place: dict[int, Path] = {}
        for file in self.parts.glob("*.npz"):
            with np.load(file, allow_pickle=False) as arrays:
                place |= dict.fromkeys(arrays["numbers"].tolist(), file)
        opened, images = None, {}
        for number in sorted(place):
            if place[number] != opened:
                opened = place[number]
                with np.load(opened, allow_pickle=False) as arrays:
                    images = dict(zip(arrays["numbers"].tolist(), arrays["images"], strict=True))
            yield images[number]


def open_output(path: str) -> Output:
    """Create the writer of an .npz file or of a folder of PNG files. Raises ValueError for other extensions."""
    if path.endswith(".npz"):
        return NpzFile(path)
    if not path or Path(path.rstrip("/")).suffix:
        raise ValueError(f"out must be an .npz file or a folder for PNG files, got {path!r}")
    return PngFolder(path)


class Mp4Folder(PngFolder):
    """Folder of mp4 files, 000000.mp4 and so on, with metadata.csv and a contact sheet of the first clips. Raises
    ValueError for an .npz file."""

    ending = ".mp4"

    def __init__(self, path: str, fps: float) -> None:
        if path.endswith(".npz"):
            raise ValueError(f"videos go into a folder of mp4 files, got out={path!r}")
        super().__init__(path)
        self.fps = fps

    def write(self, numbers: Sequence[int], images: Tensor) -> None:
        for number, clip in zip(numbers, images, strict=True):
            write_video(clip.permute(1, 2, 3, 0).numpy(), self.path / f"{number:06d}{self.ending}", self.fps)

    def finish(self, labels: list[int] | list[str], column: str) -> None:
        super().finish(labels, column)
        first = sorted(self.path.glob(f"*{self.ending}"))[:ROWS]
        clips = [torch.from_numpy(read_video(file)).permute(3, 0, 1, 2) for file in first]
        save_sheet(torch.stack(clips), self.path / SHEET)
