"""Torch form of block mixing: tokens sorted by block, moments per block, one mixing product.

All tensors are in head layout [B, Hk, G, N, .] (G query heads share a key head). Blocks are [B, Hk, G, M, W, .], with W
the size of the largest block; narrower blocks are padded with zeros. Plain differentiable torch code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..dispatch.operator import vjp
from ..features import feature
from ..options import compute_dtype
from ..sequences import counts, live_heads, to_heads, to_tokens
from . import causal
from .causal import mix
from .layout import BlockOptions, block_slots


class Prepared(NamedTuple):
    """Call in head layout: phi(q) and phi(k), rotated for the numerator and as they are for the denominator (the same
    without rotation), v, m and s."""

    features: tuple[Tensor, Tensor]
    plain: tuple[Tensor, Tensor]
    v: Tensor
    m: Tensor
    s: float | Tensor


def prepare_heads(
    q: Tensor, k: Tensor, v: Tensor, mixing: Tensor, options: BlockOptions, mask: Tensor | None,
    rotary: tuple[Tensor, Tensor] | None,
) -> Prepared:  # fmt: skip
    """Return the tokens in the dtype of moments, and their features; both are zero outside `mask`."""
    n_key_heads, dtype = k.shape[2], compute_dtype(q.dtype)
    qh, kh, vh = (live_heads(to_heads(x, n_key_heads, dtype), mask) for x in (q, k, v))
    fq, fk = (live_heads(feature(x, options.feature_map), mask) for x in (qh, kh))
    plain = features = fq, fk
    if rotary is not None:
        features = rotate(fq, *rotary, options.rotary_half), rotate(fk, *rotary, options.rotary_half)
    m, s = mixing_heads(mixing, n_key_heads, dtype), scale_of(options, q.shape[1], mask, qh)
    return Prepared(features, plain, vh, m, s)


def evaluate(
    q: Tensor, k: Tensor, v: Tensor, mixing: Tensor, options: BlockOptions, mask: Tensor | None = None,
    rotary: tuple[Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """Return o [B, N, H, Dv] for q [B, N, H, D], k [B, N, Hk, D], v [B, N, Hk, Dv], mixing [M, M] or [H, M, M].

    Tokens outside `mask` [B, N] do not enter moments, and their outputs are 0.
    """
    p = prepare_heads(q, k, v, mixing, options, mask, rotary)
    y, total = numerator(p, mask, options)
    return to_tokens(live_heads(y if total is None else y / total, mask), q.dtype)


def gradient(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mixing: Tensor, options: BlockOptions, mask: Tensor | None,
    rotary: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return (dq, dk, dv, dmixing) of `evaluate`, which is computed again."""

    def forward(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        return evaluate(q, k, v, m, options, mask, rotary)

    return tuple(x.contiguous() for x in vjp(forward, q, k, v, mixing)[1](grad))


def numerator(
    p: Prepared, mask: Tensor | None, options: BlockOptions, by: Callable[..., Tensor] | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return (W v, denominator W 1 + eps or None), [B, Hk, G, N, Dv] and [B, Hk, G, N, 1]; in one pass if both have the
    same weights. by: returns W v; `weigh` by default."""
    by = by or weigh
    if not options.normalize:
        return by(*p.features, p.v, p.m, p.s, options), None
    ones = torch.ones_like(p.v[..., :1])
    if p.features is p.plain:
        y, total = by(*p.plain, torch.cat([p.v, ones], -1), p.m, p.s, options).split((p.v.shape[-1], 1), -1)
    else:
        y, total = by(*p.features, p.v, p.m, p.s, options), by(*p.plain, ones, p.m, p.s, options)
    if mask is not None:
        total = total.where(mask[:, None, None, :, None], 1)  # avoids 0 / 0 with eps = 0
    return y, total + options.eps


def mixing_heads(mixing: Tensor, n_key_heads: int, dtype: torch.dtype) -> Tensor:
    """Reshape mixing [M, M] or [Hk * G, M, M] to [1 or Hk, 1 or G, M, M]."""
    mixing = mixing.to(dtype)
    return mixing[None, None] if mixing.dim() == 2 else mixing.unflatten(0, (n_key_heads, -1))


def scale_of(options: BlockOptions, n: int, mask: Tensor | None, like: Tensor) -> float | Tensor:
    """Return s times q_scale; s is the given scale, or 1 if causal, or M / N, N the real tokens of each sequence
    ([B, 1, 1, 1, 1, 1] with a mask)."""
    if options.scale is not None:
        return options.scale * options.q_scale
    if options.causal:
        return options.q_scale
    return options.q_scale * options.layout.n_blocks / (n if mask is None else counts(mask, like.dtype)[..., None])


def rotate(x: Tensor, cos: Tensor, sin: Tensor, half: bool) -> Tensor:
    """Rotate every D channels of x [B, Hk, G, N, F] by cos, sin [N, D / 2] or [N, Hk * G, D / 2].

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
    """Reshape t [N, D / 2] or [N, H, D / 2] to [1, 1, N, 1, D / 2] or [Hk, G, N, 1, D / 2]."""
    heads = (t if t.dim() == 3 else t[:, None]).to(x.dtype).transpose(0, 1)
    return heads.unflatten(0, (1, 1) if len(heads) == 1 else (x.shape[1], -1))[..., None, :]


def weigh(q: Tensor, k: Tensor, v: Tensor, m: Tensor, s: float | Tensor, options: BlockOptions) -> Tensor:
    """Return W v [B, Hk, G, N, E] for features q, k and values v, without the denominator."""
    blocks, order = Blocks(options, q), options.order
    qb, kb, vb = (blocks.cut(x) for x in (q, k, v))
    if options.causal:
        y, _ = causal.step(qb * s, kb, vb, blocks.mixing(m), order, causal.no_moments(q, k, v, blocks.count, order))
    else:
        y = two_sided_blocks(qb, kb, vb, blocks.mixing(m), s, order)
    return blocks.join(y)


class Blocks:
    """Conversion between tokens and the blocks that contain them."""

    def __init__(self, options: BlockOptions, q: Tensor) -> None:
        tokens, places = block_slots(options.layout, q.device)
        self.n = q.shape[-2]
        self.count = sum(x < self.n for x in options.layout.runs()[:-1]) if options.causal else len(tokens)
        self.tokens, self.places = tokens[: self.count].clamp(max=self.n), places[: self.n]

    def cut(self, x: Tensor) -> Tensor:
        """Sort x [.., N, F] into blocks [.., M, W, F], with zeros in unused slots. Every token has one slot, so nothing
        depends on the order of the sums in the backward of index_select."""
        return F.pad(x, (0, 0, 0, 1)).index_select(-2, self.tokens.flatten()).unflatten(-2, self.tokens.shape)

    def join(self, y: Tensor) -> Tensor:
        """Convert blocks y [.., M, W, F] back to tokens [.., N, F]."""
        return y.flatten(-3, -2).index_select(-2, self.places)

    def mixing(self, m: Tensor) -> Tensor:
        """Return the rows and columns of m for these blocks."""
        return m[..., : self.count, : self.count]


def two_sided_blocks(q: Tensor, k: Tensor, v: Tensor, m: Tensor, s: float | Tensor, order: str) -> Tensor:
    """Return q P~, q R~ P~ or q S~ C~, [.., M, W, E], for blocks [.., M, W, .]."""
    return product(q, [mix(x, m) for x in block_moments(q, k, v, s, order)])


def block_moments(q: Tensor, k: Tensor, v: Tensor, s: float | Tensor, order: str) -> tuple[Tensor, ...]:
    """Return the moments (P,), (R, P) or (S, C) of blocks [.., M, W, .], [.., M, F, F or E] each."""
    if order == "la":
        return (k.mT @ v * s,)
    return (k.mT @ q * s, k.mT @ v * s) if order == "ahla" else (k.mT @ k * s, q.mT @ v * s)


def product(q: Tensor, mixed: Sequence[Tensor]) -> Tensor:
    """Return q times one or two mixed moments of its block."""
    return q @ (mixed[0] if len(mixed) == 1 else mixed[0] @ mixed[1])
