"""Softmax attention: reference with N x N weights, and scaled_dot_product_attention of torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..sequences import Sequences, real


def reference(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, mask: Tensor | None = None) -> Tensor:
    """Return o_t = sum_j softmax_j(s q_t.k_j) v_j, s = D^-1/2 by default. q [B, N, H, D] -> [B, N, H, Dv]. The sum
    runs over tokens inside `mask` [B, N]; outputs of other tokens are 0."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (real(x, mask) for x in (q, k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = (q @ k.mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    if mask is not None:  # outputs of samples without real tokens are 0
        hidden = ~mask & mask.any(1, keepdim=True)
        scores = scores.masked_fill(hidden[:, None, None, :], float("-inf"))
    return real((scores.softmax(-1) @ v).transpose(1, 2), mask).contiguous()


def sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, sequences: Sequences) -> Tensor:
    """Return o = softmax(s q k') v per sequence; tensors [B, N, H, D]; torch's kernel supports fewer key heads. Padded
    tokens are neither read nor written."""
    n, grouped = q.shape[1], True if q.shape[2] != k.shape[2] else False  # noqa: SIM210 (a bool, even for symbolic sizes)
    rows, mask = sequences.padded(q, k, v)
    q, k, v = (real(x, mask).transpose(1, 2) for x in rows)
    seen = None if mask is None else (mask | ~mask.any(1, keepdim=True))[:, None, None]  # avoids an empty softmax
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=causal, scale=scale, enable_gqa=grouped)
    return sequences.packed(real(y.transpose(1, 2), mask), n).contiguous()
