"""Small images and extractors for the tests of the scores."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from zoo.eval.fid.extractors import ModuleExtractor

DIM = 6


def noise_images(n: int, seed: int, size: int = 8, spread: int = 60) -> Tensor:
    """uint8 [n, 3, size, size] around grey."""
    rng = np.random.default_rng(seed)
    shade = rng.integers(-spread, spread, (n, 3, 1, 1))
    return torch.from_numpy((128 + shade + rng.integers(-60, 60, (n, 3, size, size))).clip(0, 255).astype(np.uint8))


def save_npz(images: Tensor, file: Path) -> str:
    """Write images in the layout of ADM."""
    np.savez(file, arr_0=images.permute(0, 2, 3, 1).numpy())
    return str(file)


class SmallNetwork(nn.Module):
    """[B, 3, H, W] -> (features [B, 6], logits [B, 4]) in float64, so that nothing depends on the size of a batch."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(3 * 16, DIM, generator=generator) / 4)
        self.head = nn.Parameter(torch.randn(DIM, 4, generator=generator))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        small = nn.functional.adaptive_avg_pool2d(x.double(), 4).flatten(1)
        found = torch.tanh(small @ self.weight.double()) + 3
        return found, found @ self.head.double()


def small_extractor(seed: int = 0, name: str = "small") -> ModuleExtractor:
    """An extractor of 6 features."""
    return ModuleExtractor(SmallNetwork(seed), name)
