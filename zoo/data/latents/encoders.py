"""Encoders of images, videos and prompts: VAEs, and the text encoders of pipelines."""

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
TEXT_TOKENS = 512  # fixed number of text tokens of models with image tokens


def load_vae(where: str) -> ModelMixin:
    """Load the VAE in a folder or hub repository, or of a pipeline there, frozen, in float32. Raises ValueError if
    there is none."""
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


def scaling_of(vae: ModelMixin) -> tuple[Scaling, Scaling]:
    """(scaling, shift) of a VAE: the transformer reads (z - shift) * scaling."""
    if of_videos := video_vae(vae):
        return of_videos.scaling(vae)
    return float(vae.config.scaling_factor), float(getattr(vae.config, "shift_factor", None) or 0.0)


def scaled(z: Tensor, scaling: Scaling, shift: Scaling) -> Tensor:
    """(z - shift) * scaling of latents z [B, C, ...]."""
    return (z - _channels(shift, z)) * _channels(scaling, z)


def unscaled(x: Tensor, scaling: Scaling, shift: Scaling) -> Tensor:
    """The inverse of `scaled`: x / scaling + shift of x [B, C, ...]."""
    return x / _channels(scaling, x) + _channels(shift, x)


def _channels(value: Scaling, z: Tensor) -> Tensor:
    return torch.as_tensor(value, device=z.device, dtype=z.dtype).view(-1, *[1] * (z.ndim - 2))


def latent_shape(vae: ModelMixin, pixels: tuple[int, ...], name: str) -> list[int]:
    """Latent shape of an image (H, W): [C, h, w], or of a clip (T, H, W): [C, t, h, w]. Raises ValueError for sizes not
    divisible by the factors of the VAE; name: of the VAE, for messages."""
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
    """(frames, pixels per side) per latent of a video VAE. The first latent is the first frame alone."""
    found = video_vae(vae)
    assert found is not None
    return found.factors(vae)


def _check_sides(sides: Sequence[int], step: int, name: str) -> None:
    for key, side in zip(("img_size", "width"), sides, strict=True):
        if side % step:
            raise ValueError(f"images.{key}={side} is not divisible by {step}, the step of the VAE {name}")


@torch.no_grad()
def encode_images(vae: ModelMixin, images: Tensor, numbers: list[int], posterior: str, seed: int) -> Tensor:
    """Encode images [B, 3, H, W] or clips [B, 3, T, H, W] in [-1, 1] to scaled latents [B, C, ...]. Samples of the
    posterior depend only on seed and number."""
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
    """Additional input channels of Wan image-to-video, [B, 4 + C, t, h, w]: a mask of the given frames among the four
    of each latent (only the first frame is given), and the latents of the clip with all other frames grey (0)."""
    given = torch.zeros_like(clips)
    given[:, :, 0] = clips[:, :, 0]
    z = scaled(vae.encode(given).latent_dist.mean, *scaling_of(vae))
    mask = torch.zeros_like(z[:, :1]).repeat(1, video_factors(vae)[0], 1, 1, 1)
    mask[:, :, 0] = 1  # the first latent is the first frame alone
    return torch.cat([mask, z], dim=1)


@torch.no_grad()
def decode_latents(vae: ModelMixin, x: Tensor, scaling: Scaling, shift: Scaling) -> Tensor:
    """Decode scaled latents, one by one, since videos are large. Decoders conditioned on a timestep (from LTX-Video
    0.9.1 on) get 0, the default of their pipeline."""
    timed = vae.config.get("timestep_conditioning", False)
    parts = unscaled(x.float(), scaling, shift).split(1)
    return torch.cat([vae.decode(z, *[z.new_zeros(1)] * timed).sample for z in parts])


def _generator(seed: int, number: int) -> torch.Generator:
    return torch.Generator().manual_seed((seed << 40) + number)


class Prompts:
    """The text encoders of a pipeline: prompts -> arguments of its transformer.

    reads_first_frame: whether it is an image-to-video pipeline. Raises ValueError for an unsupported pipeline and for a
    `max_length` that its tokenizer does not allow.
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
            # its own class: DiffusionPipeline of diffusers 0.42 would load Wan's transformers anyway
            self.pipe = getattr(diffusers, kind).from_pretrained(where, **unused)
        except OSError as error:
            raise ValueError(f"there is no pipeline {where!r}: {str(error).splitlines()[0]}") from error
        if self.reads_first_frame and self.pipe.config.get("expand_timesteps"):
            raise ValueError(
                f"{where} gives the first frame its own timestep, which is not supported in training; allowed: "
                "image-to-video models with additional input channels (Wan 2.1, Wan 2.2 A14B)"
            )
        self.max_length, self.truncate = max_length, truncate
        # SD3's CLIP encoders truncate prompts at their own length by design
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
        """Encode prompts: name of the argument -> [B, ...]. Raises ValueError for a prompt that is too long."""
        self._check(prompts)
        return self.encode(self.pipe, prompts, do_classifier_free_guidance=False, max_sequence_length=self.max_length)

    @property
    def sees(self) -> bool:
        """Whether an image encoder also reads the first frame."""
        return self.reads_first_frame and self.pipe.image_encoder is not None

    @torch.no_grad()
    def first_frames(self, clips: Tensor) -> dict[str, Tensor]:
        """Image encoder tokens of the first frames of clips [B, 3, T, H, W]; empty without an image encoder."""
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
