"""The samples of a diffusion run: pixels or cached latents, with labels or prompts, and how they become pictures."""

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from zoo.data import BatchPlan, Images, InputSpec, open_images, open_sources
from zoo.data.latents import Latents
from zoo.data.latents.encoders import IMAGE_LATENTS, IMAGE_TOKENS
from zoo.data.latents.reading import LABELS, Clean
from zoo.data.latents.settings import VIDEOS
from zoo.data.settings import AugmentSettings, DataSettings
from zoo.diffusion.samplers import to_uint8
from zoo.train.denoising.clips import ClipSamples
from zoo.train.denoising.settings import DiffusionDataSettings


class Samples(Protocol):
    """Training and validation samples.

    shape: [C, H, W], of clips [C, T, H, W].  beside: channels that the model reads beside those (of a first frame).
    sees: whether it reads tokens of an image encoder too.  classes: their names, empty for prompts.  null: the
    condition that stands for none.  about: what a later run or a sampler has to know of them.
    """

    shape: tuple[int, ...]
    beside: int
    sees: bool
    classes: list[str]
    null: dict[str, Tensor]
    about: dict[str, Any]
    n_train: int
    n_val: int

    def train(self, plan: BatchPlan, first: int, last: int) -> Iterator[Clean]:
        """The parts of the steps [first, last) for this process."""

    def evaluation(self, batch_size: int, rank: int, world: int) -> Iterator[Clean]:
        """Every validation sample of this process once."""

    def pictures(self, x: Tensor) -> Tensor:
        """Samples [B, *shape] as uint8 images [B, 3, height, width] or clips [B, 3, frames, height, width]."""


def open_samples(
    data: DiffusionDataSettings, seed: int, device: torch.device, most_clips: int | None = None
) -> Samples:
    """The samples that the settings describe, of videos at most `most_clips` each for training and validation. Raises
    ValueError for what is missing or does not fit."""
    if data.source == "latents":
        return LatentSamples(data, seed, device)
    if data.source in VIDEOS:
        return ClipSamples(data, seed, device, most_clips)
    return PixelSamples(data, seed, device)


class PixelSamples:
    """Images in [-1, 1]."""

    beside, sees = 0, False

    def __init__(self, data: DiffusionDataSettings, seed: int, device: torch.device) -> None:
        if data.img_size is None:
            raise ValueError("data.img_size is empty: say how many pixels wide the images shall be")
        labelled = {k: getattr(data, k) for k in ("source", "train", "val", "image_key", "label_key", "cache")}
        half = [0.5, 0.5, 0.5]
        settings = DataSettings(**labelled, workers=data.workers, mean=half, std=half, crop_pct=1.0)
        size = data.img_size
        spec = InputSpec((size, size), (0.5,) * 3, (0.5,) * 3, 1.0)
        augment = AugmentSettings(crop="none", hflip=data.hflip)
        train, val = open_sources(settings)
        self.shape: tuple[int, ...] = (3, size, size)
        self.classes = list(train.classes)
        self.null = {LABELS: torch.tensor(len(self.classes), device=device)}
        self.about = {"space": "pixels", "image_size": size, "classes": self.classes}
        self.n_train, self.n_val = len(train), len(val)
        self.train_images: Images = open_images(train, spec, settings, augment, seed, device)
        self.val_images: Images = open_images(val, spec, settings, augment, seed, device)

    def train(self, plan: BatchPlan, first: int, last: int) -> Iterator[Clean]:
        return map(_clean, self.train_images.train(plan, first, last))

    def evaluation(self, batch_size: int, rank: int, world: int) -> Iterator[Clean]:
        return map(_clean, self.val_images.evaluation(batch_size, rank, world))

    def pictures(self, x: Tensor) -> Tensor:
        return to_uint8(x)


def _clean(batch: Any) -> Clean:
    return Clean(batch.images, {LABELS: batch.labels}, batch.index, batch.unreadable())


class LatentSamples:
    """Cached latents; the VAE is loaded when the first picture is wanted."""

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
        self.shape, self.classes, self.null = tuple(manifest.shape), manifest.classes, self.train_set.null
        keys = ("vae", "scaling", "shift", "image_size", "fps", "classes", "text", "max_length")
        self.about = {"space": "latents", **{k: getattr(manifest, k) for k in keys}}
        self.n_train, self.n_val = len(self.train_set), len(self.val_set)
        self.beside, self.sees = self.train_set.channels(IMAGE_LATENTS), IMAGE_TOKENS in self.train_set.names
        self.vae: Any = None

    def train(self, plan: BatchPlan, first: int, last: int) -> Iterator[Clean]:
        return self.train_set.train(plan, first, last)

    def evaluation(self, batch_size: int, rank: int, world: int) -> Iterator[Clean]:
        return self.val_set.evaluation(batch_size, rank, world)

    def pictures(self, x: Tensor) -> Tensor:
        from zoo.data.latents.encoders import decode_latents, load_vae

        if self.vae is None:
            self.vae = load_vae(self.manifest.vae).to(self.device)
        return to_uint8(decode_latents(self.vae, x, self.manifest.scaling, self.manifest.shift))
