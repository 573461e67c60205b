"""Clips of equal shape, cut from a folder of videos."""

import csv
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.data.decoding import Unreadable
from zoo.data.video.files import VIDEO_FILES, read_frames, video_info

CAPTIONS = "metadata.csv"  # table with a column file_name, as in Hugging Face video folders


class ClipShape(NamedTuple):
    """Shape of clips, and how they are cut from a video file.

    frames: frames per clip.  height, width: size in pixels.  stride: keep every n-th frame of the file.
    step: frames of the file from the start of one clip to the start of the next (0: clips do not overlap).
    fps: frame rate at which frames of the file are counted (0: the rate of the file).
    """

    frames: int
    height: int
    width: int
    stride: int = 1
    step: int = 0
    fps: float = 0.0

    @property
    def span(self) -> int:
        """Number of frames of the file from the first to the last frame of a clip."""
        return (self.frames - 1) * self.stride + 1


class NumberedClips(Protocol):
    """Clips numbered from 0.

    classes: class names, empty for captions.  fps: frame rate of the clips.
    """

    classes: list[str]
    fps: float

    def __len__(self) -> int: ...

    def read(self, number: int) -> tuple[Tensor, int | str]:
        """Return the clip, uint8 [3, T, H, W], and its class number or caption. Raises Unreadable."""


class Clips:
    """All clips of the videos below a folder, in the order of their paths.

    text_key: column of metadata.csv with the captions; if empty, the class of a video is its folder.
    crop_seed: seed of random crops, drawn per clip; None for centre crops.

    A video that is shorter than a clip is skipped. Raises ValueError if there is no clip, and for a video without a
    caption.
    """

    def __init__(self, root: str, shape: ClipShape, text_key: str = "", crop_seed: int | None = None) -> None:
        self.shape, self.crop_seed = shape, crop_seed
        folder = Path(root)
        files = sorted(p for p in folder.rglob("*") if p.suffix.lower() in VIDEO_FILES)
        if not files:
            raise ValueError(
                f"there are no videos ({', '.join(VIDEO_FILES)}) in {root or 'the folder: none was given'}"
            )
        self.captions = _captions(folder, files, text_key) if text_key else {}
        names = sorted({file.parent.relative_to(folder).as_posix() for file in files})
        self.classes = [] if text_key else [folder.name if name == "." else name for name in names]
        self.number = {folder / name: i for i, name in enumerate(names)}
        self.starts: list[tuple[Path, int]] = []
        rates = []
        for file in files:
            try:
                found = video_info(file)
            except Unreadable:
                self.starts.append((file, 0))  # one clip, to be counted as unreadable
                continue
            rate = shape.fps or found.fps
            rates.append(rate)
            frames = int(found.frames * rate / found.fps + 1e-6)  # rounding may leave it just below a whole number
            self.starts += [(file, i) for i in range(0, frames - shape.span + 1, shape.step or shape.span)]
        if not self.starts:
            raise ValueError(f"every video in {root} is shorter than a clip, {shape.span} frames")
        self.fps = (sorted(rates)[len(rates) // 2] if rates else 0) / shape.stride or 8.0

    def __len__(self) -> int:
        return len(self.starts)

    def read(self, number: int) -> tuple[Tensor, int | str]:
        file, start = self.starts[number]
        shape = self.shape
        frames = read_frames(file, range(start, start + shape.span, shape.stride), shape.fps)
        about: int | str = self.captions[file] if self.captions else self.number[file.parent]
        draws = None if self.crop_seed is None else np.random.default_rng((self.crop_seed, number))
        return cover(frames, shape.height, shape.width, draws), about


def cover(frames: np.ndarray, height: int, width: int, draws: np.random.Generator | None = None) -> Tensor:
    """Resize uint8 frames [T, h, w, 3] (bicubic, antialiased) until they cover height x width, and crop them to
    [3, T, H, W]. All frames get the same crop: the centre, or with `draws` a random one."""
    x = torch.from_numpy(frames).permute(0, 3, 1, 2)
    scale = max(height / x.shape[2], width / x.shape[3])
    size = max(height, round(x.shape[2] * scale)), max(width, round(x.shape[3] * scale))
    if size != tuple(x.shape[2:]):
        x = F.interpolate(x.float(), size, mode="bicubic", antialias=True).round().clamp(0, 255).to(torch.uint8)
    room = size[0] - height, size[1] - width
    top, left = (n // 2 if draws is None else int(draws.integers(n + 1)) for n in room)
    return x[:, :, top : top + height, left : left + width].transpose(0, 1).contiguous()


def _captions(folder: Path, files: list[Path], key: str) -> dict[Path, str]:
    table = folder / CAPTIONS
    if not table.is_file():
        raise ValueError(f"images.text_key={key} needs {table} with the columns file_name and {key}")
    with table.open(newline="", encoding="utf-8-sig") as opened:  # spreadsheets write a byte order mark first
        rows = list(csv.DictReader(opened))
    columns = list(rows[0]) if rows else []
    for name in ("file_name", key):
        if name not in columns:
            raise ValueError(f"{table} has no column {name!r}; its columns are {', '.join(columns)}")
    found = {folder / row["file_name"]: row[key] for row in rows}
    missing = [file for file in files if not found.get(file)]
    if missing:
        raise ValueError(f"{table} has no {key} for {missing[0].relative_to(folder)}")
    return found
