"""Encoders of images and prompts: VAEs, and the text encoders of pipelines."""

from typing import Any

import torch
from torch import Tensor


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


def scaling_of(vae: Any) -> tuple[float, float]:
    """(scaling, shift) of a VAE: the transformer reads (z - shift) * scaling."""
    return float(vae.config.scaling_factor), float(getattr(vae.config, "shift_factor", None) or 0.0)


@torch.no_grad()
def encode_images(vae: Any, images: Tensor, numbers: list[int], posterior: str, seed: int) -> Tensor:
    """Images [B, 3, H, W] in [-1, 1] -> scaled latents [B, C, h, w]; a draw depends on seed and number only."""
    found = vae.encode(images)
    if hasattr(found, "latent_dist"):
        mean, deviation = found.latent_dist.mean, found.latent_dist.std
        z = mean
        if posterior == "sample":
            draws = [torch.randn(mean.shape[1:], generator=_generator(seed, number)) for number in numbers]
            z = mean + deviation * torch.stack(draws).to(mean)
    else:  # a deterministic autoencoder
        z = found.latent
    scaling, shift = scaling_of(vae)
    return (z - shift) * scaling


def _generator(seed: int, number: int) -> torch.Generator:
    return torch.Generator().manual_seed((seed << 40) + number)


class Prompts:
    """The text encoders of a pipeline: prompts -> the arguments of its transformer.

    Raises ValueError for a pipeline of another kind, and for a length that its tokenizers do not allow.
    """

    def __init__(self, where: str, max_length: int, truncate: bool, device: str) -> None:
        from diffusers import DiffusionPipeline

        try:
            self.pipe = DiffusionPipeline.from_pretrained(where, transformer=None, vae=None)
        except OSError as error:
            raise ValueError(f"there is no pipeline {where!r}: {str(error).splitlines()[0]}") from error
        self.kind = type(self.pipe).__name__
        allowed = ("PixArtAlphaPipeline", "PixArtSigmaPipeline", "SanaPipeline", "StableDiffusion3Pipeline")
        if self.kind not in allowed:
            raise ValueError(f"{where} is a {self.kind}; prompts are encoded by one of {', '.join(allowed)}")
        self.max_length, self.truncate = max_length, truncate
        # SD3 reads prompts with CLIP too, which cuts them at its own length by design
        self.tokenizer = getattr(self.pipe, "tokenizer_3", None) or self.pipe.tokenizer
        limit = self.tokenizer.model_max_length
        if max_length > limit:
            raise ValueError(
                f"encode.max_length is {max_length}, but the text encoder of {where} allows {limit} tokens"
            )
        self.pipe.to(device)

    @torch.no_grad()
    def __call__(self, prompts: list[str]) -> dict[str, Tensor]:
        """Name of the argument -> [B, ...]. Raises ValueError for a prompt that is too long."""
        self._check(prompts)
        options: dict[str, Any] = {"do_classifier_free_guidance": False, "max_sequence_length": self.max_length}
        if self.kind == "StableDiffusion3Pipeline":
            found = self.pipe.encode_prompt(prompts, None, None, **options)
            return {"encoder_hidden_states": found[0], "pooled_projections": found[2]}
        found = self.pipe.encode_prompt(prompts, **options)
        return {"encoder_hidden_states": found[0], "encoder_attention_mask": found[1]}

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
