"""Head layout: tokens [B, N, H, D] to heads [B, Hk, G, N, D] and back, one copy each way.

Query head h = i * G + g reads key head i. Keys and values have a group axis of 1 and broadcast, so everything that
depends on keys alone is computed once per key head.
"""

from __future__ import annotations

import torch
from torch import Tensor


def to_heads(x: Tensor, n_key_heads: int, dtype: torch.dtype) -> Tensor:
    """Return x [B, N, Hk * G, D] as [B, Hk, G, N, D], contiguous, in `dtype`, with one pass over memory."""
    view = x.unflatten(2, (n_key_heads, x.shape[2] // n_key_heads)).permute(0, 2, 3, 1, 4)
    return torch.empty(view.shape, dtype=dtype, device=x.device).copy_(view)


def to_tokens(y: Tensor, dtype: torch.dtype) -> Tensor:
    """Return y [B, Hk, G, N, D] as [B, N, Hk * G, D], contiguous, in `dtype`."""
    view = y.permute(0, 3, 1, 2, 4)
    return torch.empty(view.shape, dtype=dtype, device=y.device).copy_(view).flatten(2, 3)


def live_heads(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return x [B, Hk, G, N, .] with zeros at tokens outside `mask` [B, N]."""
    return x if mask is None else x.where(mask[:, None, None, :, None], 0)
