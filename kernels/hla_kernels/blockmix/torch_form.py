"""The torch form: tokens gathered block by block, one moment a block, one product that mixes them, one read-out.

All tensors are in head layout [B, Hk, G, N, .] (G query heads share a key head), blocks are [B, Hk, G, M, W, .] with
zeros where a block is narrower than the widest, W. Plain differentiable torch code, on any device.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..features import feature
from ..hla.layout import live_heads, to_heads, to_tokens
from ..options import compute_dtype
from ..sequences import counts
from .layout import Layout, block_slots
from .options import BlockOptions


def evaluate(
    q: Tensor, k: Tensor, v: Tensor, mixing: Tensor, options: BlockOptions, mask: Tensor | None = None,
    rotary: tuple[Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """q [B, N, H, D], k [B, N, Hk, D], v [B, N, Hk, Dv], mixing [M, M] or [H, M, M] -> o [B, N, H, Dv]; see `blockmix`.

    Tokens outside `mask` [B, N] enter no moment and get zeros.
    """
    n_key_heads, dtype = k.shape[2], compute_dtype(q.dtype)
    qh, kh, vh = (live_heads(to_heads(x, n_key_heads, dtype), mask) for x in (q, k, v))
    qh, kh = (live_heads(feature(x, options.feature_map), mask) for x in (qh, kh))
    m = mixing_heads(mixing, n_key_heads, dtype)
    s = scale_of(options, q.shape[1], mask, qh)
    if not options.normalize or rotary is None:
        if rotary is not None:
            qh, kh = (rotate(x, *rotary, options.rotary_half) for x in (qh, kh))
        ones = [torch.ones_like(vh[..., :1])] if options.normalize else []
        y = weigh(qh, kh, torch.cat([vh, *ones], -1), m, s, options)
        y, total = (y[..., :-1], y[..., -1:]) if options.normalize else (y, None)
    else:
        total = weigh(qh, kh, torch.ones_like(vh[..., :1]), m, s, options)
        qh, kh = (rotate(x, *rotary, options.rotary_half) for x in (qh, kh))
        y = weigh(qh, kh, vh, m, s, options)
    if total is not None:
        if mask is not None:
            total = total.where(mask[:, None, None, :, None], 1)  # or 0 / 0 with eps = 0
        y = y / (total + options.eps)
    return to_tokens(live_heads(y, mask), q.dtype)


def mixing_heads(mixing: Tensor, n_key_heads: int, dtype: torch.dtype) -> Tensor:
    """[M, M] or [Hk * G, M, M] -> [1 or Hk, 1 or G, M, M]."""
    mixing = mixing.to(dtype)
    return mixing[None, None] if mixing.dim() == 2 else mixing.unflatten(0, (n_key_heads, -1))


def scale_of(options: BlockOptions, n: int, mask: Tensor | None, like: Tensor) -> float | Tensor:
    """s of a moment, times q_scale: given, or M / N (the real tokens of each sequence, [B, 1, 1, 1, 1, 1]), or 1
    when causal."""
    if options.scale is not None:
        return options.scale * options.q_scale
    if options.causal:
        return options.q_scale
    return options.q_scale * options.layout.n_blocks / (n if mask is None else counts(mask, like.dtype)[..., None])


def rotate(x: Tensor, cos: Tensor, sin: Tensor, half: bool) -> Tensor:
    """x [B, Hk, G, N, F], each D channels turned by the angles of cos, sin [N, D / 2] or [N, Hk * G, D / 2].

    Pairs are channels (2i, 2i + 1), or with `half` channels (i, i + D / 2).
    """
    cos, sin = (_table(t, x) for t in (cos, sin))
    parts = x.unflatten(-1, (-1, 2 * cos.shape[-1]))
    if half:
        a, b = parts.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    a, b = parts.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-3)


def _table(t: Tensor, x: Tensor) -> Tensor:
    """[N, D / 2] or [N, H, D / 2] -> [1, 1, N, 1, D / 2] or [Hk, G, N, 1, D / 2]."""
    heads = (t if t.dim() == 3 else t[:, None]).to(x.dtype).transpose(0, 1)
    return heads.unflatten(0, (1, 1) if len(heads) == 1 else (x.shape[1], -1))[..., None, :]


def weigh(q: Tensor, k: Tensor, v: Tensor, m: Tensor, s: float | Tensor, options: BlockOptions) -> Tensor:
    """W v [B, Hk, G, N, E] of features q, k and values v, without the ratio."""
    if options.causal:
        return _causal(q, k, v, m, s, options)
    tokens, places = block_slots(options.layout, q.device)
    qb, kb, vb = (gather(x, tokens) for x in (q, k, v))
    if options.order == "la":
        operator = mix(kb.mT @ vb * s, m)
    elif options.order == "ahla":
        operator = mix(kb.mT @ qb * s, m) @ mix(kb.mT @ vb * s, m)
    else:
        operator = mix(kb.mT @ kb * s, m) @ mix(qb.mT @ vb * s, m)
    return (qb @ operator).flatten(-3, -2)[..., places, :]


def gather(x: Tensor, tokens: Tensor) -> Tensor:
    """[.., N, F] -> blocks [.., M, W, F] of the tokens [M, W], zeros where there is none (index N and beyond)."""
    n = x.shape[-2]
    return F.pad(x, (0, 0, 0, 1))[..., tokens.clamp(max=n), :]


def mix(moments: Tensor, m: Tensor) -> Tensor:
    """Sum_b m_ib moments_b: [B, Hk, 1 or G, M, F, E] and [1 or Hk, 1 or G, M, M] -> [B, Hk, 1 or G, M, F, E]."""
    return (m @ moments.flatten(-2)).unflatten(-1, moments.shape[-2:])


def _causal(q: Tensor, k: Tensor, v: Tensor, m: Tensor, s: float | Tensor, options: BlockOptions) -> Tensor:
    """o_t = s q_t' Sum_{b < i} m_ib P_b + s m_ii Sum_{j <= t, j in block i} (q_t.k_j) v_j."""
    tokens, places = block_slots(options.layout, q.device)
    n = q.shape[-2]
    used = used_blocks(options.layout, n)
    tokens, m = tokens[:used], m[..., :used, :used]
    qb, kb, vb = (gather(x, tokens) for x in (q * s, k, v))
    before = qb @ mix(kb.mT @ vb, m.tril(-1))
    own = m.diagonal(dim1=-2, dim2=-1)[..., None, None]
    y = before + own * ((qb @ kb.mT).tril() @ vb)
    return y.flatten(-3, -2)[..., places[:n], :]


def used_blocks(layout: Layout, n: int) -> int:
    """How many blocks the first n tokens of contiguous blocks touch."""
    starts = [0] * (layout.prefix > 0) + [layout.prefix + s * (layout.n_tokens - layout.prefix) // layout.grid[0]
                                          for s in layout.starts(0)[:-1]]  # fmt: skip
    return sum(start < n for start in starts)
