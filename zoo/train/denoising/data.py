"""Training and validation samples of a diffusion run: images, video clips or cached latents."""

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from diffusers import ModelMixin
from torch import Tensor

from zoo.config import Tree
from zoo.data import Batch, BatchPlan, Images, InputSpec, check_unreadable, open_images, open_sources
from zoo.data.decoding import Unreadable
from zoo.data.latents import Latents
from zoo.data.latents.encoders import IMAGE_LATENTS, IMAGE_TOKENS
from zoo.data.latents.reading import LABELS, DiffusionBatch
from zoo.data.latents.settings import VIDEOS
from zoo.data.settings import AugmentSettings, DataSettings
from zoo.data.video.clips import Clips, ClipShape, NumberedClips
from zoo.data.video.digits import MovingDigits
from zoo.diffusion.samplers import to_uint8
from zoo.progress import progress
from zoo.train.denoising.settings import DiffusionDataSettings


class Samples(Protocol):
    """Training and validation samples.

    shape: shape of a sample, [C, H, W], or [C, T, H, W] for clips.  extra_channels: number of additional input channels
    (of an image-to-video model).  image_tokens: whether the samples have tokens of an image encoder.  classes: class
    names, empty for prompts.  unconditional: inputs of the unconditional model by argument name.  metadata: content of
    input.json, for later runs and samplers.  n_train, n_val: numbers of samples.
    """

    shape: tuple[int, ...]
    extra_channels: int
    image_tokens: bool
    classes: list[str]
    unconditional: dict[str, Tensor]
    metadata: Tree
    n_train: int
    n_val: int

    def train(self, plan: BatchPlan, first: int, last: int) -> Iterator[DiffusionBatch]:
        """Yield the micro-batches of this process in the steps [first, last)."""

    def evaluation(self, batch_size: int, rank: int, world: int) -> Iterator[DiffusionBatch]:
        """Yield every validation sample of this process once, in order."""

    def to_images(self, x: Tensor) -> Tensor:
        """Convert samples [B, *shape] to uint8 images [B, 3, height, width] or clips [B, 3, frames, height, width]."""


def open_samples(
    data: DiffusionDataSettings, seed: int, device: torch.device, most_clips: int | None = None
) -> Samples:
    """Open the samples of a run.

    most_clips: maximum number of clips of videos, both for training and for validation. Raises ValueError for data that
    are missing or do not fit the settings.
    """
    if data.source == "latents":
        return LatentSamples(data, seed, device)
    if data.source in VIDEOS:
        return ClipSamples(data, seed, device, most_clips)
    return PixelSamples(data, seed, device)


class PixelSamples:
    """Labelled images with pixels in [-1, 1]."""

    extra_channels, image_tokens = 0, False

    def __init__(self, data: DiffusionDataSettings, seed: int, device: torch.device) -> None:
        if data.img_size is None:
            raise ValueError("data.img_size is empty: set it to the side of the images in pixels")
        labelled = {k: getattr(data, k) for k in ("source", "train", "val", "image_key", "label_key", "cache")}
        half = [0.5, 0.5, 0.5]
        settings = DataSettings(**labelled, workers=data.workers, mean=half, std=half, crop_pct=1.0)
        size = data.img_size
        spec = InputSpec((size, size), (0.5,) * 3, (0.5,) * 3, 1.0)
        augment = AugmentSettings(crop="none", hflip=data.hflip)
        train, val = open_sources(settings)
        self.shape: tuple[int, ...] = (3, size, size)
        self.classes = list(train.classes)
        self.unconditional = {LABELS: torch.tensor(len(self.classes), device=device)}
        self.metadata = {"space": "pixels", "image_size": size, "classes": self.classes}
        self.n_train, self.n_val = len(train), len(val)
        self.train_images: Images = open_images(train, spec, settings, augment, seed, device)
        self.val_images: Images = open_images(val, spec, settings, augment, seed, device)

    def train(self, plan: BatchPlan, first: int, last: int) -> Iterator[DiffusionBatch]:
        return map(_clean, self.train_images.train(plan, first, last))

    def evaluation(self, batch_size: int, rank: int, world: int) -> Iterator[DiffusionBatch]:
        return map(_clean, self.val_images.evaluation(batch_size, rank, world))

    def to_images(self, x: Tensor) -> Tensor:
        return to_uint8(x)


def _clean(batch: Batch) -> DiffusionBatch:
    return DiffusionBatch(batch.images, {LABELS: batch.labels}, batch.index, batch.unreadable())


class LatentSamples:
    """Cached latents. The VAE is loaded when latents are decoded for the first time.

    Raises ValueError for a given size, for incomplete latents or another VAE than `data.vae`, and if training and
    validation latents were made with different settings.
    """

    def __init__(self, data: DiffusionDataSettings, seed: int, device: torch.device) -> None:
        if data.img_size is not None:
            raise ValueError("data.img_size is for images; the size of latents is in their manifest")
        self.train_set = Latents(data.train, data.vae, data.hflip, seed, device)
        manifest = self.train_set.manifest
        self.val_set = Latents(data.val, manifest.vae, 0.0, seed, device)
        theirs = self.val_set.manifest
        for key in ("shape", "scaling", "shift", "classes", "text", "max_length"):
            if getattr(theirs, key) != getattr(manifest, key):
                raise ValueError(f"the latents {data.val} and {data.train} were made with another {key}")
        self.manifest, self.device = manifest, device
        self.shape, self.classes, self.unconditional = tuple(manifest.shape), manifest.classes, self.train_set.null
        keys = ("vae", "scaling", "shift", "image_size", "fps", "classes", "text", "max_length")
        self.metadata = {"space": "latents", **{k: getattr(manifest, k) for k in keys}}
        self.n_train, self.n_val = len(self.train_set), len(self.val_set)
        self.extra_channels = self.train_set.channels(IMAGE_LATENTS)
        self.image_tokens = IMAGE_TOKENS in self.train_set.names
        self.vae: ModelMixin | None = None

    def train(self, plan: BatchPlan, first: int, last: int) -> Iterator[DiffusionBatch]:
        return self.train_set.train(plan, first, last)

    def evaluation(self, batch_size: int, rank: int, world: int) -> Iterator[DiffusionBatch]:
        return self.val_set.evaluation(batch_size, rank, world)

    def to_images(self, x: Tensor) -> Tensor:
        from zoo.data.latents.encoders import decode_latents, load_vae

        if self.vae is None:
            self.vae = load_vae(self.manifest.vae).to(self.device)
        return to_uint8(decode_latents(self.vae, x, self.manifest.scaling, self.manifest.shift))


class ClipSamples:
    """Labelled video clips with pixels in [-1, 1], decoded once and kept as uint8 in memory (3 T H W bytes per clip).

    Raises ValueError for a missing size, no clips, different classes in training and validation, and if more than 1 %
    of the clips cannot be read.
    """

    def __init__(self, data: DiffusionDataSettings, seed: int, device: torch.device, most: int | None = None) -> None:
        if data.img_size is None:
            raise ValueError("data.img_size is empty: set it to the height of the videos in pixels")
        shape = ClipShape(data.frames, data.img_size, data.width or data.img_size, data.stride, data.step, data.fps)
        train, val = (_open(data, shape, which) for which in ("train", "val"))
        if train.classes != val.classes and len(train.classes) > 1:
            raise ValueError(f"the videos {data.val} have other classes than {data.train}")
        self.extra_channels, self.image_tokens = 0, False
        self.hflip, self.seed, self.device = data.hflip, seed, device
        self.shape: tuple[int, ...] = (3, *shape[:3])
        self.classes = list(train.classes)
        self.unconditional = {LABELS: torch.tensor(len(self.classes), device=device)}
        sizes = {"image_size": list(shape[:3]), "fps": train.fps}
        self.metadata: Tree = {"space": "pixels", **sizes, "classes": self.classes}
        self.train_clips, self.train_labels = _decoded(train, "training clips", most)
        self.val_clips, self.val_labels = _decoded(val, "validation clips", most)
        self.n_train, self.n_val = len(self.train_clips) if most is None else len(train), len(self.val_clips)

    def train(self, plan: BatchPlan, first: int, last: int) -> Iterator[DiffusionBatch]:
        for numbers, mirrored in plan.mirrored(first, last, self.seed, self.hflip):
            numbers = numbers % len(self.train_clips)  # a dry run decodes only the first clips
            batch = self._batch(self.train_clips, self.train_labels, numbers)
            flip = torch.from_numpy(mirrored).to(self.device).view(-1, 1, 1, 1, 1)
            yield batch._replace(x0=torch.where(flip, batch.x0.flip(-1), batch.x0))

    def evaluation(self, batch_size: int, rank: int, world: int) -> Iterator[DiffusionBatch]:
        numbers = np.arange(rank, self.n_val, world)
        for start in range(0, len(numbers), batch_size):
            yield self._batch(self.val_clips, self.val_labels, numbers[start : start + batch_size])

    def _batch(self, clips: Tensor, labels: Tensor, numbers: np.ndarray) -> DiffusionBatch:
        index = torch.from_numpy(numbers)
        x0 = clips[index].to(self.device).float() / 127.5 - 1
        return DiffusionBatch(x0, {LABELS: labels[index].to(self.device)}, index, [])

    def to_images(self, x: Tensor) -> Tensor:
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
    """Decode the first `most` clips: uint8 [n, 3, T, H, W] and class numbers [n] of the readable ones."""
    found, numbers = [], range(len(clips))[:most]
    for number in progress(numbers, f"decoding {what}"):
        try:
            found.append(clips.read(number))
        except Unreadable as error:
            print(f"skipped clip {number}: {error}", flush=True)
    check_unreadable(len(numbers) - len(found), len(numbers))
    return torch.stack([clip for clip, _ in found]), torch.tensor([label for _, label in found])
