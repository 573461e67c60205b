"""Multipole attention from the weights of all pairs of tokens: three N x N products."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..heads import SMALLEST, Heads, largest
from .heads import anchors_of
from .layout import Field, membership, near


def by_tokens(x: Heads, field: Field, degree: int) -> Tensor:
    """Return o [B, H, N, Dv]. Every token outside the grid is a separate block, which is exact."""
    before, _, after = x.k.split([field.prefix, field.n_grid, field.suffix], -2)
    anchors = torch.cat([before, membership(field.layout, x.k) @ anchors_of(x, field), after], -2)
    exact = near(field.layout.grid, field.radius, x.q.device)
    exact = F.pad(exact, (field.prefix, field.suffix, field.prefix, field.suffix), value=True)
    a, r = x.q @ anchors.mT, x.q @ (x.k - anchors).mT
    power = torch.where(exact, a + r, a)
    if x.live is not None:
        power = power.masked_fill(~x.live.mT, float("-inf"))
    w = (power - largest(power)).exp()
    if degree:
        r = r.masked_fill(exact, 0)
        w = w * (1 + r if degree == 1 else 1 + r + r.square() / 2)
    return (w @ x.v) / w.sum(-1, keepdim=True).clamp(min=SMALLEST)


def multiplications(field: Field, d: int, dv: int) -> int:
    """Return the multiplications per head and token."""
    return (field.n_grid + field.n_outer) * (2 * d + dv)
