"""Grids of samples while a run goes on: fixed noise and conditions, a scheduler of diffusers."""

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from diffusers import LTXVideoTransformer3DModel, PixArtTransformer2DModel
from PIL import Image
from torch import Tensor

from zoo.data.latents.encoders import IMAGE_LATENTS
from zoo.data.latents.reading import LABELS
from zoo.eval.generation.samplers import denoise, guide, seeded
from zoo.eval.generation.videos import class_tokens, reads_class_tokens
from zoo.files import replacing


def fixed_noise(n: int, shape: tuple[int, ...], seed: int) -> Tensor:
    """Noise [n, *shape]; that of number i depends on seed and i only."""
    return torch.stack([torch.randn(shape, generator=generator) for generator in seeded(seed, range(n))])


class Manner(NamedTuple):
    """How a kind of denoisers is called: arguments beside input, time and conditions, a factor on the time, whether a
    class is given as a token, and whether input and output are tokens [B, T H W, C]."""

    extra: dict[str, Any]
    time_factor: float
    class_tokens: int = 0
    packed: bool = False


def manner_of(model: Any, shape: tuple[int, ...], about: dict[str, Any]) -> Manner:
    """How `model`, not wrapped, is called on samples of this shape; about: what is noted of the data."""
    extra: dict[str, Any] = {}
    packed = isinstance(model, LTXVideoTransformer3DModel)
    if packed:
        extra = _places(shape, about)
    elif isinstance(model, PixArtTransformer2DModel):
        extra = {"added_cond_kwargs": {"resolution": None, "aspect_ratio": None}}
    tokens = model.config.text_dim if reads_class_tokens(model) else 0
    return Manner(extra, getattr(model.config, "timestep_scale", 1.0), tokens, packed)


def _places(shape: tuple[int, ...], about: dict[str, Any]) -> dict[str, Any]:
    """What LTX-Video is told of the tokens of [C, T, H, W]: their numbers, and how many seconds and pixels apart they
    lie."""
    _, frames, height, width = shape
    of_clip = about["image_size"]
    seconds = (of_clip[0] - 1) / max(frames - 1, 1) / about["fps"]
    scale = (seconds, of_clip[1] / height, of_clip[2] / width)
    return {"num_frames": frames, "height": height, "width": width, "rope_interpolation_scale": scale}


def predict(model: Any, x: Tensor, timestep: Tensor, condition: dict[str, Tensor], manner: Manner) -> Tensor:
    """The output of a denoiser of any kind, [B, outputs C, ...]."""
    if manner.time_factor != 1.0:
        timestep = timestep * manner.time_factor
    condition = dict(condition)
    if manner.class_tokens and LABELS in condition:
        condition["encoder_hidden_states"] = class_tokens(condition.pop(LABELS), manner.class_tokens)
    if IMAGE_LATENTS in condition:
        x = torch.cat([x, condition.pop(IMAGE_LATENTS).to(x)], dim=1)
    tokens = x.flatten(2).mT if manner.packed else x
    out = model(hidden_states=tokens, timestep=timestep, **condition, **manner.extra, return_dict=False)[0]
    return out.mT.unflatten(2, x.shape[2:]) if manner.packed else out


@torch.no_grad()
def sample(
    model: Any,
    manner: Manner,
    scheduler: Any,
    noise: Tensor,
    condition: dict[str, Tensor],
    null: dict[str, Tensor],
    steps: int,
    guidance: float,
) -> Tensor:
    """Samples [B, C, ...] from noise of that shape: `steps` steps with guidance u + s (c - u) on all channels.
    Conditions that have no null (a first frame) are kept in u."""
    n = len(noise)
    without = condition | {k: v.expand(n, *v.shape) for k, v in null.items()}
    both = {k: torch.cat([condition[k], without[k].to(condition[k])]) for k in condition}

    def guided(x: Tensor, t: Tensor) -> Tensor:
        if guidance == 1.0:
            return predict(model, x, t.expand(n), condition, manner)[:, : x.shape[1]].float()
        c, u = predict(model, torch.cat([x, x]), t.expand(2 * n), both, manner)[:, : x.shape[1]].float().chunk(2)
        return guide(c, u, guidance, x.shape[1])

    return denoise(scheduler, noise, steps, guided)


def save_grid(images: Tensor, file: Path) -> np.ndarray:
    """uint8 images [n, 3, H, W] as a PNG, as square as possible; returned as [rows H, columns W, 3]."""
    n, _, height, width = images.shape
    columns = math.ceil(math.sqrt(n))
    rows = math.ceil(n / columns)
    grid = np.full((rows * height, columns * width, 3), 255, np.uint8)
    for i, image in enumerate(images.permute(0, 2, 3, 1).cpu().numpy()):
        row, column = divmod(i, columns)
        grid[row * height : (row + 1) * height, column * width : (column + 1) * width] = image
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as temporary:
        Image.fromarray(grid).save(temporary, format="PNG")
    return grid
