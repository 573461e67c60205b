"""Samples during training, from fixed noise and conditions, as grids, contact sheets and videos."""

import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import SchedulerMixin
from PIL import Image
from torch import Tensor, nn

from zoo.diffusion.call import CallSpec, call_denoiser
from zoo.diffusion.samplers import denoise, guide, seeded
from zoo.files import replacing

COLUMNS, ROWS = 8, 16  # maximum numbers of frames per clip and of clips on a contact sheet


def fixed_noise(n: int, shape: tuple[int, ...], seed: int) -> Tensor:
    """Draw noise [n, *shape]. Sample i depends only on `seed` and i."""
    return torch.stack([torch.randn(shape, generator=generator) for generator in seeded(seed, range(n))])


@torch.no_grad()
def sample(
    model: nn.Module,
    spec: CallSpec,
    scheduler: SchedulerMixin,
    noise: Tensor,
    condition: dict[str, Tensor],
    null: dict[str, Tensor],
    steps: int,
    guidance: float,
) -> Tensor:
    """Generate samples from noise [B, C, ...], with classifier-free guidance u + s (c - u) on all channels.

    condition, null: conditions of c and of u, by argument name; u keeps conditions that `null` lacks (a first frame).
    steps: sampling steps.  guidance: s.
    """
    n = len(noise)
    without = condition | {k: v.expand(n, *v.shape) for k, v in null.items()}
    both = {k: torch.cat([condition[k], without[k].to(condition[k])]) for k in condition}

    def guided(x: Tensor, t: Tensor) -> Tensor:
        if guidance == 1.0:
            return call_denoiser(model, x, t.expand(n), condition, spec)[:, : x.shape[1]].float()
        c, u = call_denoiser(model, torch.cat([x, x]), t.expand(2 * n), both, spec)[:, : x.shape[1]].float().chunk(2)
        return guide(c, u, guidance, x.shape[1])

    return denoise(scheduler, noise, steps, guided)


def save_grid(images: Tensor, file: Path) -> np.ndarray:
    """Write uint8 images [n, 3, H, W] as a PNG, as square as possible. Returns the grid [rows H, columns W, 3].

    Images below 64 pixels are enlarged by a whole factor.
    """
    zoom = max(1, 64 // max(images.shape[2:]))
    enlarged = images.repeat_interleave(zoom, 2).repeat_interleave(zoom, 3)
    return _save_image(grid_video(enlarged[:, :, None])[0], file)


def contact_sheet(clips: Tensor) -> np.ndarray:
    """Arrange uint8 clips [n, 3, T, H, W] in one image [n H, k W, 3]: one row per clip, with k frames at equal
    intervals, including the first and the last."""
    frames = clips.shape[2]
    chosen = torch.linspace(0, frames - 1, min(COLUMNS, frames)).round().long()
    picture = clips[:, :, chosen].permute(0, 3, 2, 4, 1)  # [n, H, k, W, 3]
    return picture.flatten(2, 3).flatten(0, 1).cpu().numpy()


def save_sheet(clips: Tensor, file: Path) -> np.ndarray:
    """Write the contact sheet of uint8 clips [n, 3, T, H, W] as a PNG. Returns the sheet."""
    return _save_image(contact_sheet(clips), file)


def _save_image(image: np.ndarray, file: Path) -> np.ndarray:
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as temporary:
        Image.fromarray(image).save(temporary, format="PNG")
    return image


def grid_video(clips: Tensor) -> np.ndarray:
    """Arrange uint8 clips [n, 3, T, H, W] in a grid, as square as possible: frames [T, rows H, columns W, 3]."""
    n = len(clips)
    columns = math.ceil(math.sqrt(n))
    rows = -(-n // columns)
    full = F.pad(clips, (0,) * 8 + (0, rows * columns - n), value=255)
    grid = full.unflatten(0, (rows, columns)).permute(3, 0, 4, 1, 5, 2)  # [T, rows, H, columns, W, 3]
    return grid.flatten(3, 4).flatten(1, 2).cpu().numpy()
