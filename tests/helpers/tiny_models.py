"""Small models for the tests: real timm names, few and narrow blocks, a few tokens."""

from unittest import mock

import pytest
import timm
import torch
from torch import Tensor, nn

import zoo  # noqa: F401  registers the names
from zoo.mixers import MIXERS as CLASSES
from zoo.models.timm.registry import REGISTERED_MIXERS

GRIDS = ((3, 4), (5, 2), (2, 2))  # of the samples of a padded batch

NEW_IN_TIMM = "vit_base_patch16_sapiens2"  # the one model with grouped queries
needs_sapiens = pytest.mark.skipif(not timm.is_model(NEW_IN_TIMM), reason=f"this timm has no {NEW_IN_TIMM}")
SIZE = 64
NARROW = {"embed_dim": 32, "num_heads": 2, "depth": 2, "num_classes": 5}
MIXERS = REGISTERED_MIXERS
GRIDLESS = tuple(m for m in MIXERS if not CLASSES[m].defaults.needs_grid)  # those that need no grid of tokens
GRID_OPTIONS = {"depthwise": "v"}


def tiny(name: str, seed: int = 0, **changes) -> nn.Module:
    """The timm model `name`, narrow, with non-trivial one-dimensional parameters; its tokens are a 4 x 4 grid."""
    torch.manual_seed(seed)
    model = timm.create_model(name, **{"img_size": SIZE, **NARROW, **changes})
    stir(model)
    return model


def without_values(name: str, **arguments) -> nn.Module:
    """The timm model `name` at its full size on the meta device. Truncated normals, for which torch runs Python there,
    are not drawn."""
    with mock.patch("timm.layers.weight_init._trunc_normal_"):
        return timm.create_model(name, device="meta", **arguments)


def stir(model: nn.Module) -> None:
    """Random values for what is initialised to constants: biases, norms, layer scales, depthwise filters, gates."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim == 1 or ".mixer." in name:
                p.add_(torch.randn_like(p), alpha=0.1)


def image(batch: int = 2, height: int = SIZE, width: int = SIZE, seed: int = 1) -> Tensor:
    """[B, 3, H, W], unit normal."""
    return torch.randn(batch, 3, height, width, generator=torch.Generator().manual_seed(seed))


def sites(model: nn.Module) -> list:
    """The sites of a model, in order."""
    return [m for m in model.modules() if hasattr(m, "mixer_name")]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the gradients by name."""
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def grids(model) -> set:
    return {site.grid for site in sites(model)}


def padded(grids=GRIDS, length: int = 14, channels: int = 768) -> dict:
    """A batch as timm's NaFlex loader makes it; padding holds large numbers."""
    g = torch.Generator().manual_seed(0)
    patches = torch.randn(len(grids), length, channels, generator=g, dtype=torch.float64)
    coord, valid = torch.zeros(len(grids), length, 2, dtype=torch.long), torch.zeros(len(grids), length).bool()
    for i, (h, w) in enumerate(grids):
        coord[i, : h * w] = torch.stack(torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij"), -1).flatten(
            0, 1
        )
        valid[i, : h * w] = True
    patches[~valid] = 1e3
    return {"patches": patches, "patch_coord": coord, "patch_valid": valid}
