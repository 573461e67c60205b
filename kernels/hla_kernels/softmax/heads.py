"""Head layout of tokens, and the scale of softmax weights."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..options import compute_dtype
from ..sequences import real

SMALLEST = 0.3  # minimum of denominator / largest exponential, which is >= 0.5, or 0 if no token is real


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
