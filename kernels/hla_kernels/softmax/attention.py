"""Softmax attention: reference with N x N weights, and scaled_dot_product_attention of torch.

Helpers of its approximations: head layout of tokens, and scale of weights."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..options import compute_dtype
from ..sequences import Sequences, query_heads, real

SMALLEST = 0.3  # minimum of denominator / largest exponential, which is >= 0.5, or 0 if no token is real


def reference(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, mask: Tensor | None = None) -> Tensor:
    """Return o_t = sum_j softmax_j(s q_t.k_j) v_j, s = D^-1/2 by default. q [B, N, H, D] -> [B, N, H, Dv]. The sum
    runs over tokens inside `mask` [B, N]; outputs of other tokens are 0."""
    q, k, v = query_heads(q, k, v, mask)
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


class Heads(NamedTuple):
    """q (scaled), k, v [B, H, N, D], with zeros for padded tokens; mask of real tokens, [B, 1, N, 1] or None."""

    q: Tensor
    k: Tensor
    v: Tensor
    live: Tensor | None


def to_layout(q: Tensor, k: Tensor, v: Tensor, q_scale: float, mask: Tensor | None) -> Heads:
    """Convert tokens [B, N, H, D] to `Heads`; keys and values are repeated for the query heads that share them."""
    dtype, group = compute_dtype(q.dtype), q.shape[2] // k.shape[2]
    q, k, v = (real(t, mask).to(dtype).transpose(1, 2) for t in (q, k, v))
    if group > 1:
        k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
    return Heads(q * q_scale, k, v, None if mask is None else mask[:, None, :, None])


def largest(*powers: Tensor) -> Tensor:
    """Return the largest exponent of each row, 0 if no token is real; without gradient, since it cancels."""
    top = torch.cat([p.detach().amax(-1, keepdim=True) for p in powers], -1).amax(-1, keepdim=True)
    return top.where(top.isfinite(), 0)
