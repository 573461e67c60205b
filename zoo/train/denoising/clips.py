"""The samples of a run on the pixels of videos: every clip is decoded once and kept as uint8 in memory."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zoo.data import BatchPlan
from zoo.data.batch import check_unreadable
from zoo.data.decoding import Unreadable
from zoo.data.latents.reading import LABELS, Clean
from zoo.data.progress import progress
from zoo.data.video.clips import Clips, ClipShape, NumberedClips
from zoo.data.video.digits import MovingDigits
from zoo.diffusion.samplers import to_uint8
from zoo.train.denoising.settings import DiffusionDataSettings


class ClipSamples:
    """Clips in [-1, 1], [C, T, H, W], with the class of each; see `zoo.train.denoising.data.Samples`.

    3 T H W bytes a clip stay in memory: for large videos extract latents. Raises ValueError for a missing size, no
    clips, other classes in training than in validation, and when over 1 % of the clips cannot be read.
    """

    def __init__(self, data: DiffusionDataSettings, seed: int, device: torch.device, most: int | None = None) -> None:
        if data.img_size is None:
            raise ValueError("data.img_size is empty: say how many pixels high the videos shall be")
        shape = ClipShape(data.frames, data.img_size, data.width or data.img_size, data.stride, data.step, data.fps)
        train, val = (_open(data, shape, which) for which in ("train", "val"))
        if train.classes != val.classes and len(train.classes) > 1:
            raise ValueError(f"the videos {data.val} have other classes than {data.train}")
        self.beside, self.sees = 0, False
        self.hflip, self.seed, self.device = data.hflip, seed, device
        self.shape: tuple[int, ...] = (3, *shape[:3])
        self.classes = list(train.classes)
        self.null = {LABELS: torch.tensor(len(self.classes), device=device)}
        sizes = {"image_size": list(shape[:3]), "fps": train.fps}
        self.about: dict[str, Any] = {"space": "pixels", **sizes, "classes": self.classes}
        self.train_clips, self.train_labels = _decoded(train, "training clips", most)
        self.val_clips, self.val_labels = _decoded(val, "validation clips", most)
        self.n_train, self.n_val = len(self.train_clips), len(self.val_clips)

    def train(self, plan: BatchPlan, first: int, last: int) -> Iterator[Clean]:
        for numbers, mirrored in plan.mirrored(first, last, self.seed, self.hflip):
            batch = self._batch(self.train_clips, self.train_labels, numbers)
            flip = torch.from_numpy(mirrored).to(self.device).view(-1, 1, 1, 1, 1)
            yield batch._replace(x0=torch.where(flip, batch.x0.flip(-1), batch.x0))

    def evaluation(self, batch_size: int, rank: int, world: int) -> Iterator[Clean]:
        numbers = np.arange(rank, self.n_val, world)
        for start in range(0, len(numbers), batch_size):
            yield self._batch(self.val_clips, self.val_labels, numbers[start : start + batch_size])

    def _batch(self, clips: Tensor, labels: Tensor, numbers: np.ndarray) -> Clean:
        index = torch.from_numpy(numbers)
        x0 = clips[index].to(self.device).float() / 127.5 - 1
        return Clean(x0, {LABELS: labels[index].to(self.device)}, index, [])

    def pictures(self, x: Tensor) -> Tensor:
        return to_uint8(x)


def _open(data: DiffusionDataSettings, shape: ClipShape, which: str) -> NumberedClips:
    train = which == "train"
    if data.source == "moving_digits":
        return MovingDigits(train, shape, data.clips if train else max(1, data.clips // 5))
    where = data.train if train else data.val
    if not where or not Path(where).is_dir():
        raise ValueError(f"data.{which} must be a folder of videos, got {where!r}")
    return Clips(where, shape)


def _decoded(clips: NumberedClips, what: str, most: int | None) -> tuple[Tensor, Tensor]:
    """uint8 [n, 3, T, H, W] and class numbers [n] of the clips, the first `most`, that can be read."""
    found, numbers = [], range(len(clips))[:most]
    for number in progress(numbers, f"decoding {what}"):
        try:
            found.append(clips.read(number))
        except Unreadable as error:
            print(f"skipped clip {number}: {error}", flush=True)
    check_unreadable(len(numbers) - len(found), len(numbers))
    return torch.stack([clip for clip, _ in found]), torch.tensor([label for _, label in found])
