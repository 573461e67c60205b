"""Softmax attention with torch's scaled_dot_product_attention."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ..sequences import Sequences, real


def sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, sequences: Sequences) -> Tensor:
    """Return o = softmax(s q k') v per sequence; tensors [B, N, H, D]; torch's kernel supports fewer key heads. Padded
    tokens are neither read nor written."""
    n, grouped = q.shape[1], True if q.shape[2] != k.shape[2] else False  # noqa: SIM210 (a bool, even for symbolic sizes)
    rows, mask = sequences.padded(q, k, v)
    q, k, v = (real(x, mask).transpose(1, 2) for x in rows)
    seen = None if mask is None else (mask | ~mask.any(1, keepdim=True))[:, None, None]  # avoids an empty softmax
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=causal, scale=scale, enable_gqa=grouped)
    return sequences.packed(real(y.transpose(1, 2), mask), n).contiguous()
