"""Extraction of latents: encoding of images, clips and captions into shards.

An interrupted extraction resumes after the last complete shard.
"""

from pathlib import Path

import torch
from diffusers import ModelMixin
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms.functional import to_tensor

from zoo.data.batch import check_unreadable
from zoo.data.decoding import Unreadable, content, decode
from zoo.data.latents.encoders import (
    IMAGE_LATENTS,
    Prompts,
    encode_first_frames,
    encode_images,
    latent_shape,
    load_vae,
    scaling_of,
)
from zoo.data.latents.manifest import Manifest, Writer
from zoo.data.latents.settings import VIDEOS, EncodeSettings, ExtractSettings, ImageSettings
from zoo.data.loader import Loader
from zoo.data.sources import load_rows, open_source, undecoded
from zoo.data.transforms import center_crop
from zoo.data.video.clips import Clips, ClipShape
from zoo.data.video.digits import MovingDigits
from zoo.progress import progress

# (number, image [3, H, W] or clip [3, T, H, W] in [-1, 1], class number or caption)
Item = tuple[int, Tensor, int | str]


class ImageSamples(Dataset):
    """Data set of images, resized and centre-cropped, with class numbers or captions.

    An unreadable image is None. fps: 0, since images have no frame rate.  pixels: (height, width).
    """

    fps = 0.0

    def __init__(self, settings: ImageSettings) -> None:
        self.settings, keys = settings, (settings.image_key, settings.label_key)
        self.classes: list[str] = []
        self.pixels: tuple[int, ...] = (settings.img_size, settings.img_size)
        if settings.text_key:
            rows = load_rows(settings.source, settings.where, True)
            self.rows = undecoded(rows, settings.where, settings.image_key, settings.text_key)
        else:
            train = settings.where != "val"
            self.source = open_source(settings.source, settings.where, train, *keys)
            self.classes = list(self.source.classes)

    def __len__(self) -> int:
        return len(self.rows if self.settings.text_key else self.source)

    def __getitem__(self, number: int) -> Item | None:
        try:
            image, about = self._read(number)
        except Unreadable:
            return None
        return number, to_tensor(center_crop(image, self.settings.img_size)) * 2 - 1, about

    def _read(self, number: int) -> tuple[Image.Image, int | str]:
        if not self.settings.text_key:
            return self.source.read(number)
        row = self.rows[number]
        return decode(content(row[self.settings.image_key])), str(row[self.settings.text_key])


class VideoSamples(Dataset):
    """Data set of clips with class numbers or captions; an unreadable clip is None.

    seed: seed of random crops.  fps: frame rate of the clips.  pixels: (frames, height, width).
    """

    def __init__(self, settings: ImageSettings, seed: int) -> None:
        self.pixels: tuple[int, ...] = (settings.frames, settings.img_size, settings.width or settings.img_size)
        shape = ClipShape(*self.pixels, settings.stride, settings.step, settings.fps)
        self.clips: Clips | MovingDigits
        if settings.source == "videos":
            self.clips = Clips(settings.where, shape, settings.text_key, seed if settings.crop == "random" else None)
        else:
            self.clips = MovingDigits(settings.where != "val", shape, settings.clips)
        self.classes, self.fps = list(self.clips.classes), self.clips.fps

    def __len__(self) -> int:
        return len(self.clips)

    def __getitem__(self, number: int) -> Item | None:
        try:
            clip, about = self.clips.read(number)
        except Unreadable:
            return None
        return number, clip.float() / 127.5 - 1, about


def extract_latents(settings: ExtractSettings) -> Manifest:
    """Start or resume an extraction. Returns the manifest.

    Raises ValueError for missing options or data, for a folder begun with other settings, and if more than 1 % of the
    images are unreadable.
    """
    encode, images = settings.encode, settings.images
    if not (settings.out and encode.vae and bool(encode.text) == bool(images.text_key)):
        need = "out=FOLDER encode.vae=VAE, and encode.text=PIPELINE with images.text_key=COLUMN or neither"
        raise ValueError(f"an extraction needs {need}")
    device = encode.device or ("cuda" if torch.cuda.is_available() else "cpu")
    samples = VideoSamples(images, encode.seed) if images.source in VIDEOS else ImageSamples(images)
    vae = load_vae(encode.vae).to(device)
    prompts = Prompts(encode.text, encode.max_length, encode.truncate, device) if encode.text else None
    if prompts and prompts.reads_first_frame and encode.flip:
        raise ValueError("encode.flip mirrors clips, but not the first frames that this pipeline starts from")
    writer = Writer(Path(settings.out), _plan(settings, vae, samples))
    first = writer.next_number
    if prompts and first == 0:
        null = prompts([""])
        writer.write_null({k: v[0].to(_dtype(encode, v)).cpu() for k, v in null.items()})
    waiting: list[dict[str, Tensor]] = []
    numbers = list(range(first, len(samples)))
    parts = [numbers[i : i + encode.batch_size] for i in range(0, len(numbers), encode.batch_size)]
    for items in progress(Loader(samples, parts, images.workers, list), "encoding"):
        if batch := [item for item in items if item is not None]:
            waiting.append(_encoded(batch, vae, prompts, encode, device))
        while sum(len(part["index"]) for part in waiting) >= encode.shard:
            waiting = _write(writer, waiting, encode.shard)
    if waiting:
        _write(writer, waiting, encode.shard)
    check_unreadable(len(samples) - sum(writer.done), len(samples))
    return writer.finish()


def _plan(settings: ExtractSettings, vae: ModelMixin, samples: ImageSamples | VideoSamples) -> Manifest:
    encode, images = settings.encode, settings.images
    scaling, shift = scaling_of(vae)
    clips = isinstance(samples, VideoSamples)
    return Manifest(
        vae=encode.vae,
        scaling=scaling,
        shift=shift,
        posterior=encode.posterior,
        shape=latent_shape(vae, samples.pixels, encode.vae),
        dtype=encode.dtype,
        flip=encode.flip,
        image_size=list(samples.pixels) if clips else images.img_size,
        classes=samples.classes,
        text=encode.text,
        max_length=encode.max_length if encode.text else 0,
        images=images.where or images.source,
        keys=[images.image_key, images.text_key or images.label_key],
        seed=encode.seed,
        truncate=encode.truncate,
        fps=samples.fps,
        stride=images.stride if clips else 0,
        step=images.step if clips else 0,
        crop=images.crop,
    )


def _dtype(encode: EncodeSettings, tensor: Tensor) -> torch.dtype:
    """Return the type in which a tensor is stored: encode.dtype for floating point, unchanged for masks and
    integers."""
    return getattr(torch, encode.dtype) if tensor.is_floating_point() else tensor.dtype


def _encoded(
    batch: list[Item], vae: ModelMixin, prompts: Prompts | None, encode: EncodeSettings, device: str
) -> dict[str, Tensor]:
    numbers, images, about = (list(column) for column in zip(*batch, strict=True))
    x = torch.stack(images).to(device)
    out = {"latents": encode_images(vae, x, numbers, encode.posterior, encode.seed)}
    if encode.flip:
        out["flipped"] = encode_images(vae, x.flip(-1), numbers, encode.posterior, encode.seed + 1)
    out |= prompts(about) if prompts else {"class_labels": torch.tensor(about)}
    if prompts and prompts.reads_first_frame:
        out |= {IMAGE_LATENTS: encode_first_frames(vae, x), **prompts.first_frames(x)}
    out = {k: v.to(_dtype(encode, v)).cpu() for k, v in out.items()}
    return {**out, "index": torch.tensor(numbers)}


def _write(writer: Writer, waiting: list[dict[str, Tensor]], size: int) -> list[dict[str, Tensor]]:
    """Write a shard of the first `size` waiting samples. Returns the other samples."""
    whole = {k: torch.cat([part[k] for part in waiting]) for k in waiting[0]}
    writer.write({k: v[:size] for k, v in whole.items()})
    return [{k: v[size:] for k, v in whole.items()}] if len(whole["index"]) > size else []
