"""Samplers of videos, conditioned on a class, on text, or on text and a first frame."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline, ModelMixin, SchedulerMixin
from PIL import Image
from torch import Tensor

from zoo.config import Tree
from zoo.data.decoding import IMAGE_FILES, Unreadable, decode
from zoo.data.latents.encoders import decode_latents, load_vae, scaling_of, video_factors
from zoo.data.video.clips import cover
from zoo.diffusion.call import class_tokens
from zoo.diffusion.samplers import (
    ClassSampler,
    TextSampler,
    check_resolution,
    describe_denoiser,
    only_own_noise,
    seeded,
    to_uint8,
)
from zoo.diffusion.streaming import FrameStream
from zoo.models.diffusers.families import known_family
from zoo.models.diffusers.models import patch_of


class ClassVideoSampler(ClassSampler):
    """Sampler of a video transformer with class tokens and without a pipeline, in pixels or in latents of a VAE.

    about: metadata of its training data (input.json): space, image_size [frames, height, width], fps, vae, scaling and
    shift.  frames, size, width: number of frames, and height and width in pixels; None for the values of image_size.
    stream: generate as many frames at a time as the training data has (`zoo.diffusion.streaming`). Other arguments as
    in `ClassSampler`.

    Raises ValueError for a size not divisible by the patch size and for labels that the model does not have.
    """

    def __init__(
        self,
        transformer: ModelMixin,
        scheduler: SchedulerMixin,
        about: Tree,
        *,
        size: int | None = None,
        width: int | None = None,
        frames: int | None = None,
        steps: int = 50,
        guidance: float = 1.0,
        labels: str | list[int] = "random",
        seed: int = 0,
        stream: bool = False,
    ) -> None:
        self.transformer, self.scheduler, self.data, self.stream = transformer, scheduler, about, stream
        self.steps, self.guidance, self.seed, self.choice = steps, guidance, seed, labels
        config = transformer.config
        self.classes, self.channels, self.guided = (
            config[known_family(transformer).classes],
            config.in_channels,
            config.in_channels,
        )
        self.learned, self.fps = False, about["fps"]
        self.check_labels()
        given = (frames, size, width)
        self.pixels = tuple(new or old for new, old in zip(given, about["image_size"], strict=True))
        self.vae = load_vae(about["vae"]).to(transformer.device) if about["space"] == "latents" else None
        time, space = (1, 1) if self.vae is None else video_factors(self.vae)
        check_video(self.pixels, config.patch_size, time, space)
        self.shape = (self.channels, (self.pixels[0] - 1) // time + 1, *(n // space for n in self.pixels[1:]))
        self.chunk = (about["image_size"][0] - 1) // time + 1
        if stream:
            FrameStream(transformer)  # raises

    def _denoise(
        self, x: Tensor, predict: Callable[[Tensor, Tensor], Tensor], generators: list[torch.Generator]
    ) -> Tensor:
        if not self.stream:
            return super()._denoise(x, predict, generators)
        stream = FrameStream(self.transformer)
        return torch.cat(list(stream.denoise(self.scheduler, x, self.steps, self.chunk, predict, generators)), 2)

    def _condition(self, labels: Tensor) -> dict[str, Tensor]:
        return {"encoder_hidden_states": class_tokens(labels, self.classes).to(self.transformer.dtype)}

    def _decode(self, x: Tensor) -> Tensor:
        if self.vae is None:
            return x
        return decode_latents(self.vae, x, self.data["scaling"], self.data["shift"])

    def metadata(self) -> Tree:
        return self.metadata_without_size() | {"size": list(self.pixels), "fps": self.fps}


class VideoSampler(TextSampler):
    """Sampler of a text-to-video or image-to-video pipeline of diffusers.

    Video i has the prompt i % n and the first frame i % m, for n prompts and m first frames.

    images: folder of first frames, for image-to-video pipelines only.  frames, size, width: number of frames, and
    height and width in pixels; None for the defaults of the pipeline. stream: generate as many frames at a time as the
    pipeline does by default, for text-to-video pipelines with one transformer; a scheduler that depends on the length
    gets the length of a chunk. Raises ValueError as `TextSampler`, and for first frames that are missing or that the
    pipeline does not use.
    """

    def __init__(
        self,
        pipeline: DiffusionPipeline,
        prompts: list[str],
        *,
        images: str | None = None,
        size: int | None = None,
        width: int | None = None,
        frames: int | None = None,
        steps: int = 50,
        guidance: float | None = None,
        seed: int = 0,
        stream: bool = False,
    ) -> None:
        super().__init__(pipeline, prompts, steps=steps, guidance=guidance, seed=seed)
        given = {"num_frames": frames, "height": size, "width": width if width or not size else size}
        self.pixels = tuple(n or self.parameters[name].default for name, n in given.items())
        family, rate = known_family(pipeline.transformer), self.parameters.get("frame_rate")
        assert family.units is not None
        self.fps = float(rate.default) if rate else family.fps
        self.patch, self.units = patch_of(pipeline.transformer.config), family.units(pipeline)
        check_video(self.pixels, self.patch, *self.units)
        self.stream, self.chunk = stream, (self.parameters["num_frames"].default - 1) // self.units[0] + 1
        if stream:
            if "image" in self.parameters or getattr(pipeline, "transformer_2", None) is not None:
                raise ValueError("sample.stream is for text-to-video pipelines with one transformer")
            FrameStream(pipeline.transformer)  # raises
        wants = "image" in self.parameters
        if wants != bool(images):
            need = "sample.images=FOLDER, the first frames" if wants else "no sample.images"
            raise ValueError(f"{type(pipeline).__name__} needs {need}")
        self.images = _first_frames(Path(images)) if images else []

    @torch.no_grad()
    def __call__(self, numbers: Sequence[int]) -> Tensor:
        return torch.cat([self._one(number) for number in numbers])  # one by one, since videos are large

    def _one(self, number: int) -> Tensor:
        frames, height, width = self.pixels
        if self.stream:
            return self._streamed(number)
        extra: dict[str, object] = {}
        if self.images:
            picture = _pixels(self.images[number % len(self.images)])
            first = cover(picture[None], height, width)[:, 0].permute(1, 2, 0).numpy()
            extra["image"] = Image.fromarray(first)
        found = self._call(number, seeded(self.seed, [number])[0], num_frames=frames, output_type="np", **extra)
        return to_uint8(torch.from_numpy(np.asarray(found)).permute(0, 4, 1, 2, 3) * 2 - 1)

    def _call(self, number: int, generator: torch.Generator, **options: object) -> Any:
        """Call the pipeline for one video, or for a chunk of it."""
        pipe, (_, height, width) = self.pipeline, self.pixels
        with only_own_noise(type(pipe.scheduler).__name__, pipe.device):
            return pipe(
                prompt=self.prompts[number % len(self.prompts)],
                generator=generator,
                num_inference_steps=self.steps,
                guidance_scale=self.guidance,
                height=height,
                width=width,
                **self.fixed,
                **options,
            ).frames

    def _streamed(self, number: int) -> Tensor:
        """Generate a video chunk by chunk of latent frames and decode it as a whole."""
        pipe, (frames, height, width), (time, space) = self.pipeline, self.pixels, self.units
        transformer, generator = pipe.transformer, seeded(self.seed, [number])[0]
        shape = ((frames - 1) // time + 1, height // space, width // space)
        sizes = (1, transformer.config.in_channels, height, width, frames)
        noise = pipe.prepare_latents(*sizes, torch.float32, pipe.device, generator)
        packed = noise.ndim == 3  # tokens [1, T H W, C] instead of [1, C, T, H, W]
        noise = noise.unflatten(1, shape).movedim(4, 1) if packed else noise
        stream, found = FrameStream(transformer), []
        for start in range(0, shape[0], self.chunk):
            x = noise[:, :, start : start + self.chunk]
            latents = x.flatten(2).mT if packed else x
            with stream.chunk(start // self.patch[0]):
                length = (x.shape[2] - 1) * time + 1
                y = self._call(number, generator, num_frames=length, latents=latents, output_type="latent")
            found.append(y.mT.unflatten(2, x.shape[2:]) if packed else y)
        return to_uint8(decode_latents(pipe.vae, torch.cat(found, 2), *scaling_of(pipe.vae)))

    def metadata(self) -> Tree:
        more = {"size": list(self.pixels), "fps": self.fps, "first_frames": len(self.images)}
        second = getattr(self.pipeline, "transformer_2", None)
        if second is not None:
            more["second"] = describe_denoiser(second, self.pipeline.scheduler)
        return super().metadata() | more


def check_video(pixels: Sequence[int], patch: Sequence[int], time: int, space: int) -> None:
    """Raise ValueError unless a clip can be divided into patches of latents.

    pixels: frames, height, width.  patch: patch size of the latents in each dimension.  time, space: compression
    factors of the VAE.
    """
    frames, *sides = pixels
    if frames < 1 or (frames - 1) % time or ((frames - 1) // time + 1) % patch[0]:
        rule = f"{time} n + 1" if time > 1 else f"a positive multiple of {patch[0]}"
        raise ValueError(f"sample.frames must be {rule}, got {frames}")
    for side, one in zip(sides, patch[1:], strict=True):
        check_resolution(side, one, space)


def _first_frames(folder: Path) -> list[Path]:
    found = sorted(p for p in folder.glob("*") if p.suffix.lower() in IMAGE_FILES)
    if not found:
        raise ValueError(f"there are no images in sample.images={folder}")
    return found


def _pixels(file: Path) -> np.ndarray:
    """Read an image, uint8 [H, W, 3]. Raises ValueError for a file that cannot be read."""
    try:
        return np.array(decode(str(file)))
    except Unreadable as error:
        raise ValueError(f"sample.images: {file} cannot be read: {error}") from error
