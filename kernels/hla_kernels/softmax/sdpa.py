"""Softmax attention with torch's scaled_dot_product_attention."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ..sequences import Sequences, live_rows, pack, real, rows_of, unpack


def sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, sequences: Sequences) -> Tensor:
    """Return o = softmax(s q k') v per sequence; tensors [B, N, H, D]."""
    mask, cu_seqlens, max_seqlen, _ = sequences
    if cu_seqlens is None:
        return _padded(q, k, v, causal, scale, mask)
    length = rows_of(max_seqlen, q.shape[1])
    q_rows, k_rows, v_rows = (unpack(x, cu_seqlens, length) for x in (q, k, v))
    y = _padded(q_rows, k_rows, v_rows, causal, scale, live_rows(cu_seqlens, length))
    return pack(y, cu_seqlens, q.shape[1])


def _padded(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, mask: Tensor | None) -> Tensor:
    """Return o = softmax(s q k') v, tensors [B, N, H, D]; torch's kernel supports fewer key heads. Tokens outside
    `mask` [B, N] are neither read nor written."""
    grouped = True if q.shape[2] != k.shape[2] else False  # noqa: SIM210 (a bool, even for symbolic sizes)
    q, k, v = (real(x, mask).transpose(1, 2) for x in (q, k, v))
    seen = None if mask is None else (mask | ~mask.any(1, keepdim=True))[:, None, None]  # avoids an empty softmax
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=causal, scale=scale, enable_gqa=grouped)
    return real(y.transpose(1, 2), mask).contiguous()
