"""Encoders of images, videos and prompts: VAEs, and the text and image encoders of pipelines."""

from collections.abc import Sequence

import numpy as np
import torch
from diffusers import ModelMixin
from PIL import Image
from torch import Tensor

from zoo.models.diffusers.families import FAMILIES, family_of_pipeline, video_vae
from zoo.models.diffusers.family import Scaling

IMAGE_LATENTS = "image_latents"  # additional input channels of an image-to-video model
IMAGE_TOKENS = "encoder_hidden_states_image"  # tokens of an image encoder (Wan 2.1), before the text tokens
TEXT_TOKENS = 512  # number of text tokens required by models with image tokens


def load_vae(where: str) -> ModelMixin:
    """Load a VAE, frozen and in float32, from a folder or hub repository that holds the VAE or a pipeline with one.
    Raises ValueError if there is no VAE."""
    import diffusers

    reason = ""
    for more in ({}, {"subfolder": "vae"}):
        try:
            name = diffusers.AutoencoderKL.load_config(where, **more)["_class_name"]
        except OSError as error:
            reason = str(error).splitlines()[0]
            continue
        if name.startswith("Autoencoder"):
            vae = getattr(diffusers, name).from_pretrained(where, **more, dtype=torch.float32)
            return vae.eval().requires_grad_(False)
        reason = f"it holds a {name}"
    raise ValueError(f"there is no VAE {where!r}: {reason}")


def scaling_of(vae: ModelMixin) -> tuple[Scaling, Scaling]:
    """Return (scaling, shift) of a VAE: the input of the transformer is (z - shift) * scaling for latents z."""
    if of_videos := video_vae(vae):
        return of_videos.scaling(vae)
    return float(vae.config.scaling_factor), float(getattr(vae.config, "shift_factor", None) or 0.0)


def scaled(z: Tensor, scaling: Scaling, shift: Scaling) -> Tensor:
    """Scale latents z [B, C, ...]: (z - shift) * scaling, with numbers or one value per channel."""
    return (z - _channels(shift, z)) * _channels(scaling, z)


def unscaled(x: Tensor, scaling: Scaling, shift: Scaling) -> Tensor:
    """Invert `scaled` for x [B, C, ...]: x / scaling + shift."""
    return x / _channels(scaling, x) + _channels(shift, x)


def _channels(value: Scaling, z: Tensor) -> Tensor:
    return torch.as_tensor(value, device=z.device, dtype=z.dtype).view(-1, *[1] * (z.ndim - 2))


def latent_shape(vae: ModelMixin, pixels: tuple[int, ...], name: str) -> list[int]:
    """Compute the shape of the latents of a sample.

    pixels: size of an image (H, W), which gives [C, h, w], or of a clip (T, H, W), which gives [C, t, h, w].
    name: name of the VAE in error messages. Raises ValueError for a size that the compression factors of the VAE do not
    divide, and for a VAE of images if the data are videos or vice versa.
    """
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


def video_factors(vae: ModelMixin) -> tuple[int, int]:
    """Compression factors (in time, in space) of a video VAE, whose first latent frame encodes only the first frame."""
    found = video_vae(vae)
    assert found is not None
    return found.factors(vae)


def _check_sides(sides: Sequence[int], step: int, name: str) -> None:
    for key, side in zip(("img_size", "width"), sides, strict=True):
        if side % step:
            raise ValueError(f"images.{key}={side} is not divisible by {step}, the step of the VAE {name}")


@torch.no_grad()
def encode_images(vae: ModelMixin, images: Tensor, numbers: list[int], posterior: str, seed: int) -> Tensor:
    """Encode images [B, 3, H, W] or clips [B, 3, T, H, W] in [-1, 1] to scaled latents [B, C, ...].

    numbers: numbers of the images.  posterior: "mean", or "sample" for one draw, which depends only on the posterior,
    `seed` and the number of the image.
    """
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
def encode_first_frames(vae: ModelMixin, clips: Tensor) -> Tensor:
    """Encode the additional input channels [B, 4 + C, t, h, w] of Wan's image-to-video models.

    The first four channels mark which of the four frames of each latent frame are given: only the first frame of the
    clip is. The other C channels are the scaled latents of the clip with all frames but the first grey (0).
    """
    given = torch.zeros_like(clips)
    given[:, :, 0] = clips[:, :, 0]
    z = scaled(vae.encode(given).latent_dist.mean, *scaling_of(vae))
    mask = torch.zeros_like(z[:, :1]).repeat(1, video_factors(vae)[0], 1, 1, 1)
    mask[:, :, 0] = 1  # the first latent frame encodes only the first frame
    return torch.cat([mask, z], dim=1)


@torch.no_grad()
def decode_latents(vae: ModelMixin, x: Tensor, scaling: Scaling, shift: Scaling) -> Tensor:
    """Decode scaled latents [B, C, ...] to pixels in about [-1, 1], one sample at a time, since videos are large.
    Decoders with a timestep input (LTX-Video from 0.9.1) get 0, the default of their pipeline."""
    timed = vae.config.get("timestep_conditioning", False)
    parts = unscaled(x.float(), scaling, shift).to(vae.dtype).split(1)
    return torch.cat([vae.decode(z, *[z.new_zeros(1)] * timed).sample for z in parts])


def _generator(seed: int, number: int) -> torch.Generator:
    return torch.Generator().manual_seed((seed << 40) + number)


class Prompts:
    """The text encoders of a pipeline, called with prompts; they return arguments of the transformer.

    where: folder or hub name of the pipeline.  max_length: number of tokens per prompt.  truncate: whether to truncate
    longer prompts.  reads_first_frame: whether it is an image-to-video pipeline. Raises ValueError for an unsupported
    pipeline and for a `max_length` that its tokenizer does not allow.
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
            # not DiffusionPipeline, which in diffusers 0.42 loads Wan's transformers although they are given as None
            self.pipe = getattr(diffusers, kind).from_pretrained(where, **unused)
        except OSError as error:
            raise ValueError(f"there is no pipeline {where!r}: {str(error).splitlines()[0]}") from error
        if self.reads_first_frame and self.pipe.config.get("expand_timesteps"):
            raise ValueError(
                f"{where} gives the first frame its own timestep, which is not supported in training; allowed: "
                "image-to-video models with additional input channels (Wan 2.1, Wan 2.2 A14B)"
            )
        self.max_length, self.truncate = max_length, truncate
        # SD3: check only T5, since its CLIP encoders truncate prompts at their own maximum length by design
        self.tokenizer = getattr(self.pipe, "tokenizer_3", None) or self.pipe.tokenizer
        limit = self.tokenizer.model_max_length
        if max_length > limit:
            raise ValueError(
                f"encode.max_length is {max_length}, but the text encoder of {where} allows {limit} tokens"
            )
        if self.encodes_images and max_length != TEXT_TOKENS:
            raise ValueError(
                f"{where} reads the tokens of an image before {TEXT_TOKENS} of text, no more and no fewer: set "
                f"encode.max_length={TEXT_TOKENS}, got {max_length}"
            )
        self.pipe.to(device)

    @torch.no_grad()
    def __call__(self, prompts: list[str]) -> dict[str, Tensor]:
        """Encode prompts to tensors [B, ...] by argument name. Raises ValueError for a prompt that is too long."""
        self._check(prompts)
        return self.encode(self.pipe, prompts, do_classifier_free_guidance=False, max_sequence_length=self.max_length)

    @property
    def encodes_images(self) -> bool:
        """Whether the pipeline has an image encoder for the first frame (Wan 2.1 image-to-video)."""
        return self.reads_first_frame and self.pipe.image_encoder is not None

    @torch.no_grad()
    def first_frames(self, clips: Tensor) -> dict[str, Tensor]:
        """Encode the first frames of clips [B, 3, T, H, W] in [-1, 1] to image tokens, by argument name; empty without
        an image encoder."""
        if not self.encodes_images:
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
