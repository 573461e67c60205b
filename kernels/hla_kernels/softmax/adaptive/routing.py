"""Selection of the exact key tiles per query tile: the highest scores, of equal ones the first. No gradient.

With b_tb = q_t.mean_b + q_t^2.variance_b / 2 and p_tb the softmax over tiles b of b_tb + log n_b, the scores are:

    error   sum of p_tb (q_t^2.variance_b) over the queries of a tile: mass of b times variance of its scores
    mass    sum of p_tb over the queries of a tile
    mean    q_t.mean_b of the mean query, as in published sparse attention (PISA, SLA, VSA)
    near    minus the squared distance between the centres of the tiles

For "error" and "mass", q_t is the mean of `PART` neighbouring queries (consecutive in `layout.tokens_of`), which has a
quarter of the cost and selects tiles as well as all queries do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...dispatch.operator import to_onnx
from .layout import Field, distances
from .pooling import Pooled, powers

PART = 4  # queries


def scores(q: Tensor, live: Tensor, x: Pooled, select: str) -> Tensor:
    """Return the scores [B, H, C, T] for any `select` but "near". q [B, H, C, W, D] is zero outside `live`,
    [B or 1, 1, C, W, 1]."""
    part = q.shape[-2] if select == "mean" else min(PART, q.shape[-2])
    each = live.unflatten(-2, (-1, part)).sum(-2)
    q = q.unflatten(-2, (-1, part)).sum(-2) / each.clamp(min=1)
    if select == "mean":
        return powers(q, x, variance=False).squeeze(-2)
    n = x.n[:, :, None, None]
    p = (powers(q, x, variance=True) + n.log()).softmax(-1).where(n > 0, 0) * each
    if select == "error":
        p = p * (q.square() @ x.variance.mT.unsqueeze(2))
    return p.sum(-2)


def highest(found: Tensor, n: Tensor, k: int) -> Tensor:
    """Return the k tiles with the highest scores [B, H, C, T] in ascending order, int64 [B, H, C, k]; tiles without a
    token are selected last."""
    found = found.masked_fill(n[:, :, None] == 0, float("-inf"))
    if to_onnx():  # ONNX has no stable sort; of equal numbers, its TopK returns the first
        return found.topk(k).indices.sort(-1).values
    return found.argsort(dim=-1, descending=True, stable=True)[..., :k].sort(-1).values


def nearest(field: Field, k: int, device: torch.device) -> Tensor:
    """Return the k nearest tiles of each query tile, [U, k]; independent of padding."""
    return distances(field, device).argsort(dim=-1, stable=True)[:, :k].sort(-1).values
