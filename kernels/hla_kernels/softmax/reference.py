"""Softmax attention written out: softmax over the keys of scale * q k'."""

from __future__ import annotations

import torch
from torch import Tensor


def reference(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> Tensor:
    """o_t = sum_j softmax_j(s q_t.k_j) v_j, s = D^-1/2 by default. q [B, N, H, D] -> [B, N, H, Dv]."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = (q @ k.mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(1, 2).contiguous()
