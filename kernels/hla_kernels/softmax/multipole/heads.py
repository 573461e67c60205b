"""Mean keys of blocks."""

from __future__ import annotations

from torch import Tensor

from ..heads import Heads
from .layout import Field, membership


def sizes(x: Heads, field: Field) -> tuple[Tensor, Tensor]:
    """Return (membership of each token in the blocks [.., N, M], number of real tokens per block [.., M, 1])."""
    weight = membership(field.layout, x.k)
    if x.live is not None:
        weight = weight * x.live.narrow(-2, field.prefix, field.n_grid)
    return weight, weight.sum(-2)[..., None]


def anchors_of(x: Heads, field: Field) -> Tensor:
    """Return the mean key of each block, [B, H, M, D]; 0 for blocks without a real token."""
    weight, n = sizes(x, field)
    return (weight.mT @ x.k.narrow(-2, field.prefix, field.n_grid)) / n.clamp(min=1)
