"""Samples while a run goes on, of fixed noise and conditions, as grids, contact sheets and videos."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from zoo.diffusion.call import Manner, predict
from zoo.diffusion.samplers import denoise, guide, seeded
from zoo.files import replacing

COLUMNS, ROWS = 8, 16  # most frames a clip, and clips, on a contact sheet


def fixed_noise(n: int, shape: tuple[int, ...], seed: int) -> Tensor:
    """Noise [n, *shape]; that of number i depends on seed and i only."""
    return torch.stack([torch.randn(shape, generator=generator) for generator in seeded(seed, range(n))])


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


def contact_sheet(clips: Tensor) -> np.ndarray:
    """uint8 clips [n, 3, T, H, W] as one picture [n H, k W, 3]: a clip a line, its first, last and frames between."""
    frames = clips.shape[2]
    chosen = torch.linspace(0, frames - 1, min(COLUMNS, frames)).round().long()
    picture = clips[:, :, chosen].permute(0, 3, 2, 4, 1)  # [n, H, k, W, 3]
    return picture.flatten(2, 3).flatten(0, 1).cpu().numpy()


def save_sheet(clips: Tensor, file: Path) -> np.ndarray:
    """Write the contact sheet of uint8 clips [n, 3, T, H, W] as PNG; returns it."""
    sheet = contact_sheet(clips)
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as temporary:
        Image.fromarray(sheet).save(temporary, format="PNG")
    return sheet


def grid_video(clips: Tensor) -> np.ndarray:
    """uint8 clips [n, 3, T, H, W] beside and below each other: frames [T, rows H, columns W, 3]."""
    n = len(clips)
    columns = int(np.ceil(np.sqrt(n)))
    rows = -(-n // columns)
    full = F.pad(clips, (0,) * 8 + (0, rows * columns - n), value=255)
    grid = full.unflatten(0, (rows, columns)).permute(3, 0, 4, 1, 5, 2)  # [T, rows, H, columns, W, 3]
    return grid.flatten(3, 4).flatten(1, 2).cpu().numpy()
