"""Encoders of images and prompts: VAEs and text encoders of pipelines."""

from typing import Any

import torch


def load_vae(where: str) -> Any:
    """The VAE at a folder or hub name, or of a pipeline there, frozen, in float32. Raises ValueError if there is
    none."""
    import diffusers

    for subfolder in ("", "vae"):
        more = {"subfolder": subfolder} if subfolder else {}
        try:
            config = diffusers.AutoencoderKL.load_config(where, **more)
        except OSError as error:
            reason = str(error).splitlines()[0]
            continue
        cls = getattr(diffusers, config["_class_name"])
        vae = cls.from_pretrained(where, **more, torch_dtype=torch.float32)
        return vae.eval().requires_grad_(False)
    raise ValueError(f"there is no VAE {where}: {reason}")
