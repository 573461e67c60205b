"""Multipole attention from the weights of all pairs of tokens, for some queries at a time.

Working memory: at most `PAIRS` weights, or one query per head; with gradients, weights are recomputed in the
backward pass.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..heads import SMALLEST, Heads, largest
from .layout import Field, anchors_of, membership, near

PAIRS = 2**26  # weights in memory at a time


def by_tokens(x: Heads, field: Field, degree: int) -> Tensor:
    """Return o [B, H, N, Dv]. Every token outside the grid is a separate block, which is exact."""
    before, _, after = x.k.split([field.prefix, field.n_grid, field.suffix], -2)
    anchors = torch.cat([before, membership(field.layout, x.k) @ anchors_of(x, field), after], -2)
    b, h, n, _ = x.q.shape
    step = max(1, PAIRS // max(1, b * h * n))
    if step >= n:
        return read(x, anchors, 0, field, degree)
    parts = (x._replace(q=x.q[:, :, i : i + step]) for i in range(0, n, step))
    return torch.cat(
        [checkpoint(read, part, anchors, i * step, field, degree, use_reentrant=False) for i, part in enumerate(parts)],
        2,
    )


def read(x: Heads, anchors: Tensor, first: int, field: Field, degree: int) -> Tensor:
    """Return o of the queries x.q, which are the tokens from `first` on."""
    exact = is_exact(field, first, x.q)
    a, r = x.q @ anchors.mT, x.q @ (x.k - anchors).mT
    power = torch.where(exact, a + r, a)
    if x.live is not None:
        power = power.masked_fill(~x.live.mT, float("-inf"))
    w = (power - largest(power)).exp()
    if degree:
        r = r.masked_fill(exact, 0)
        w = w * (1 + r if degree == 1 else 1 + r + r.square() / 2)
    return (w @ x.v) / w.sum(-1, keepdim=True).clamp(min=SMALLEST)


def is_exact(field: Field, first: int, q: Tensor) -> Tensor:
    """Return which tokens [I, N] are exact to the tokens from `first` on: near ones, or one of both is off the grid."""
    tokens = torch.arange(field.n_grid + field.n_outer, device=q.device) - field.prefix
    outer = (tokens < 0) | (tokens >= field.n_grid)
    rows = slice(first, first + q.shape[-2])
    return outer[rows, None] | outer | near(field.layout.grid, field.radius, tokens[rows], tokens)


def multiplications(field: Field, d: int, dv: int) -> int:
    """Return the multiplications per head and token."""
    return (field.n_grid + field.n_outer) * (2 * d + dv)
