"""Encoders of images and prompts: VAEs, and the text encoders of pipelines."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from zoo.models.diffusers.families import FAMILIES, family_of_pipeline, video_vae
from zoo.models.diffusers.family import Scaling

IMAGE_LATENTS = "image_latents"  # what a model from image to video reads beside the noise, channel by channel
IMAGE_TOKENS = "encoder_hidden_states_image"  # and, with an image encoder (Wan 2.1), before the tokens of text
TEXT_TOKENS = 512  # how many of text such a model takes for granted


def load_vae(where: str) -> Any:
    """The VAE at a folder or hub name, or of a pipeline there, frozen, in float32. Raises ValueError if there is
    none."""
    import diffusers

    reason = ""
    for more in ({}, {"subfolder": "vae"}):
        try:
            name = diffusers.AutoencoderKL.load_config(where, **more)["_class_name"]
        except OSError as error:
            reason = str(error).splitlines()[0]
            continue
        if name.startswith("Autoencoder"):
            vae = getattr(diffusers, name).from_pretrained(where, **more, torch_dtype=torch.float32)
            return vae.eval().requires_grad_(False)
        reason = f"it holds a {name}"
    raise ValueError(f"there is no VAE {where!r}: {reason}")


def scaling_of(vae: Any) -> tuple[Scaling, Scaling]:
    """(scaling, shift) of a VAE: the transformer reads (z - shift) * scaling."""
    if of_videos := video_vae(vae):
        return of_videos.scaling(vae)
    return float(vae.config.scaling_factor), float(getattr(vae.config, "shift_factor", None) or 0.0)


def scaled(z: Tensor, scaling: Scaling, shift: Scaling) -> Tensor:
    """(z - shift) * scaling of latents z [B, C, ...]."""
    return (z - _channels(shift, z)) * _channels(scaling, z)


def unscaled(x: Tensor, scaling: Scaling, shift: Scaling) -> Tensor:
    """What `scaled` made x of."""
    return x / _channels(scaling, x) + _channels(shift, x)


def _channels(value: Scaling, z: Tensor) -> Tensor:
    return torch.as_tensor(value, device=z.device, dtype=z.dtype).view(-1, *[1] * (z.ndim - 2))


def latent_shape(vae: Any, pixels: tuple[int, ...], name: str) -> list[int]:
    """[C, h, w] of the latent of an image (H, W), [C, t, h, w] of a clip (T, H, W). Raises ValueError for sizes that
    the VAE called `name` does not divide."""
    config = vae.config
    if len(pixels) == 3:
        if not video_vae(vae):
            allowed = ", ".join(f.vae.name for f in FAMILIES if f.vae)
            raise ValueError(f"{name} is no VAE of videos that is known here ({allowed}), but the data are videos")
        in_time, in_space = video_factors(vae)
        frames, *sides = pixels
        if (frames - 1) % in_time:
            raise ValueError(f"images.frames must be {in_time} n + 1 for the VAE {name}, got {frames}")
        _check_sides(sides, in_space, name)
        return [
            config.get("z_dim") or config.latent_channels,
            (frames - 1) // in_time + 1,
            *(side // in_space for side in sides),
        ]
    if video_vae(vae):
        raise ValueError(f"{name} is a VAE of videos, but the data are images")
    step = 2 ** (len(config.block_out_channels) - 1) if hasattr(config, "block_out_channels") else None
    step = step or int(vae.spatial_compression_ratio)
    _check_sides(pixels, step, name)
    return [config.latent_channels, *(side // step for side in pixels)]


def video_factors(vae: Any) -> tuple[int, int]:
    """Frames and pixels per side of one latent of a VAE of videos, whose first latent is the first frame alone."""
    found = video_vae(vae)
    assert found is not None
    return found.factors(vae)


def _check_sides(sides: Sequence[int], step: int, name: str) -> None:
    for key, side in zip(("img_size", "width"), sides, strict=True):
        if side % step:
            raise ValueError(f"images.{key}={side} is not divisible by {step}, the step of the VAE {name}")


@torch.no_grad()
def encode_images(vae: Any, images: Tensor, numbers: list[int], posterior: str, seed: int) -> Tensor:
    """Images [B, 3, H, W] or clips [B, 3, T, H, W] in [-1, 1] -> scaled latents [B, C, ...]; a draw depends on seed and
    number only."""
    found = vae.encode(images)
    if hasattr(found, "latent_dist"):
        mean, deviation = found.latent_dist.mean, found.latent_dist.std
        z = mean
        if posterior == "sample":
            draws = [torch.randn(mean.shape[1:], generator=_generator(seed, number)) for number in numbers]
            z = mean + deviation * torch.stack(draws).to(mean)
    else:  # a deterministic autoencoder
        z = found.latent
    return scaled(z, *scaling_of(vae))


@torch.no_grad()
def encode_first_frames(vae: Any, clips: Tensor) -> Tensor:
    """What Wan from image to video reads beside the noise, [B, 4 + C, t, h, w]: which of the four frames of a latent
    are given (only the first of all), and the latents of the clip with every other frame grey (0)."""
    given = torch.zeros_like(clips)
    given[:, :, 0] = clips[:, :, 0]
    z = scaled(vae.encode(given).latent_dist.mean, *scaling_of(vae))
    mask = torch.zeros_like(z[:, :1]).repeat(1, video_factors(vae)[0], 1, 1, 1)
    mask[:, :, 0] = 1  # the first latent is the first frame alone
    return torch.cat([mask, z], dim=1)


@torch.no_grad()
def decode_latents(vae: Any, x: Tensor, scaling: Scaling, shift: Scaling) -> Tensor:
    """What `encode_images` made x of, one by one, since videos are large. A decoder that is told how noisy the latents
    are (LTX-Video 0.9.1 on) is told that they are not, as its pipeline does unless asked."""
    told = vae.config.get("timestep_conditioning", False)
    parts = unscaled(x.float(), scaling, shift).split(1)
    return torch.cat([vae.decode(z, *[z.new_zeros(1)] * told).sample for z in parts])


def _generator(seed: int, number: int) -> torch.Generator:
    return torch.Generator().manual_seed((seed << 40) + number)


class Prompts:
    """The text encoders of a pipeline: prompts -> the arguments of its transformer.

    reads_first_frame: whether the pipeline makes videos from an image. Raises ValueError for a pipeline that is not
    known here, and for a length that its tokenizers do not allow.
    """

    def __init__(self, where: str, max_length: int, truncate: bool, device: str) -> None:
        import diffusers

        try:
            parts = diffusers.DiffusionPipeline.load_config(where)
            kind = parts["_class_name"]
            family = family_of_pipeline(kind)
            if family is None or family.encode is None:
                allowed = [name for f in FAMILIES if f.encode for name in f.pipelines]
                raise ValueError(f"{where} is a {kind}; prompts are encoded by one of {', '.join(allowed)}")
            self.encode, self.reads_first_frame = family.encode, kind == family.first_frame
            unused = {name: None for name in parts if name.startswith(("transformer", "vae"))}
            # by its own class: DiffusionPipeline of diffusers 0.42 would load Wan's transformers nevertheless
            self.pipe = getattr(diffusers, kind).from_pretrained(where, **unused)
        except OSError as error:
            raise ValueError(f"there is no pipeline {where!r}: {str(error).splitlines()[0]}") from error
        if self.reads_first_frame and self.pipe.config.get("expand_timesteps"):
            raise ValueError(
                f"{where} gives the first frame a time of its own, which training here does not; allowed: models from "
                "image to video that read it in channels beside the noise (Wan 2.1, Wan 2.2 A14B)"
            )
        self.max_length, self.truncate = max_length, truncate
        # SD3 reads prompts with CLIP too, which cuts them at its own length by design
        self.tokenizer = getattr(self.pipe, "tokenizer_3", None) or self.pipe.tokenizer
        limit = self.tokenizer.model_max_length
        if max_length > limit:
            raise ValueError(
                f"encode.max_length is {max_length}, but the text encoder of {where} allows {limit} tokens"
            )
        if self.sees and max_length != TEXT_TOKENS:
            raise ValueError(
                f"{where} reads the tokens of an image before {TEXT_TOKENS} of text, no more and no fewer: set "
                f"encode.max_length={TEXT_TOKENS}, got {max_length}"
            )
        self.pipe.to(device)

    @torch.no_grad()
    def __call__(self, prompts: list[str]) -> dict[str, Tensor]:
        """Name of the argument -> [B, ...]. Raises ValueError for a prompt that is too long."""
        self._check(prompts)
        options: dict[str, Any] = {"do_classifier_free_guidance": False, "max_sequence_length": self.max_length}
        return self.encode(self.pipe, prompts, **options)

    @property
    def sees(self) -> bool:
        """Whether the first frame is also read by an image encoder."""
        return self.reads_first_frame and self.pipe.image_encoder is not None

    @torch.no_grad()
    def first_frames(self, clips: Tensor) -> dict[str, Tensor]:
        """What the transformer reads of the first frames of clips [B, 3, T, H, W] beside their latents: the image
        encoder's tokens, where the pipeline has one (Wan 2.1)."""
        if not self.sees:
            return {}
        images = ((clips[:, :, 0] + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).cpu()
        found = self.pipe.encode_image([Image.fromarray(np.asarray(image)) for image in images])
        return {IMAGE_TOKENS: found}

    def _check(self, prompts: list[str]) -> None:
        if self.truncate:
            return
        for prompt in prompts:
            n = len(self.tokenizer(prompt).input_ids)
            if n > self.max_length:
                raise ValueError(
                    f"the prompt {prompt[:40]!r} is {n} tokens long, more than encode.max_length={self.max_length}: "
                    "shorten it or set encode.truncate=true"
                )
