"""Definitions of product, 2-simplicial and Strassen attention; exact in float64.

q and k are [B, N, H, D], v is [B, N, H, Dv]; keys and values have the heads of the queries. Returns [B, N, H, Dv].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def product_attention(pairs: Sequence[tuple[Tensor, Tensor]], v: Tensor) -> Tensor:
    """Compute o_i = mean_j prod_l (q_li.k_lj) v_j with N x N weights for pairs (q_l, k_l), each of any width.

    One pair is linear attention, two are triple attention (state D x D x Dv), three are quad attention.
    """
    scores = [torch.einsum("bihd,bjhd->bhij", q, k) for q, k in pairs]
    return torch.einsum("bhij,bjhe->bihe", torch.stack(scores).prod(0) / v.shape[1], v)


def simplex2(
    q: Tensor, k1: Tensor, k2: Tensor, v1: Tensor, v2: Tensor, scale: float, allowed: Tensor | None = None
) -> Tensor:
    """Compute 2-simplicial attention with N x N x N weights, arXiv 2507.02754, Eq. 5 to 7.

    allowed: bool, broadcastable to [B, H, N, N, N], True for the pairs (j, k) that token i reads; None for all.
    """
    s = scale * torch.einsum("bihd,bjhd,bkhd->bhijk", q, k1, k2)
    s = s if allowed is None else s.masked_fill(~allowed, -torch.inf)
    return torch.einsum("bhijk,bjhe,bkhe->bihe", s.flatten(-2).softmax(-1).view_as(s), v1, v2)


def strassen_attention(q: Tensor, k1: Tensor, k2: Tensor, v1: Tensor, v2: Tensor, scale: float) -> Tensor:
    """Compute Strassen attention in O(N^3) time and, without gradients, O(N^2) memory, arXiv 2501.19215, section 3.

    The weights of one query at a time, a softmax over pairs (j, k) of scale (q_i.k1_j + k1_j.k2_k + k2_k.q_i).
    """
    q, k1, k2, v1, v2 = (t.transpose(1, 2) for t in (q, k1, k2, v1, v2))  # [B, H, N, D]
    x, y, z = (scale * a @ b.mT for a, b in ((q, k1), (k1, k2), (q, k2)))
    o = torch.empty_like(v1)
    for i in range(o.shape[2]):
        p = (x[:, :, i, :, None] + y + z[:, :, i, None, :]).flatten(-2).softmax(-1).view_as(y)
        o[:, :, i] = (v1 * (p @ v2)).sum(2)
    return o.transpose(1, 2)
