"""Which key tiles are exact for each query tile: the highest scores, of equal ones the first. No gradient.

b_tb = q_t.mean_b + q_t^2.variance_b / 2, weights p_tb of the tiles: softmax over b of b_tb + log n_b
error   sum over the queries of a tile of p_tb (q_t^2.variance_b): the mass of b times the variance of its scores
mass    the same sum of p_tb
mean    b of the mean query
near    minus the distance between the centres of the tiles
"""

from __future__ import annotations

import torch
from torch import Tensor

from .layout import Field, distances
from .pooling import Pooled, powers


def scores(q: Tensor, live: Tensor, x: Pooled, select: str) -> Tensor:
    """[B, H, C, T], select other than "near". q [B, H, C, W, D], zeros where not `live`, [B or 1, 1, C, W, 1]."""
    if select == "mean":
        q = q.sum(-2, keepdim=True) / live.sum(-2, keepdim=True).clamp(min=1)
        return powers(q, x).squeeze(-2)
    n = x.n[:, :, None, None]
    p = (powers(q, x) + n.log()).softmax(-1).where(live & (n > 0), 0)
    if select == "error":
        p = p * (q.square() @ x.variance.mT.unsqueeze(2))
    return p.sum(-2)


def highest(found: Tensor, n: Tensor, k: int) -> Tensor:
    """The k tiles of the highest scores [B, H, C, T] in ascending order, int64 [B, H, C, k]; tiles without a token
    last."""
    found = found.masked_fill(n[:, :, None] == 0, float("-inf"))
    return found.argsort(dim=-1, descending=True, stable=True)[..., :k].sort(-1).values


def nearest(field: Field, k: int, device: torch.device) -> Tensor:
    """The same of "near", [U, k]; padding does not change it."""
    return distances(field, device).argsort(dim=-1, stable=True)[:, :k].sort(-1).values
