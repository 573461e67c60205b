"""Torch form of Taylor attention: blocks of tokens, in the cheaper of two product orders.

Tensors are in the head layout of `hla.layout`: q [B, Hk, G, N, D], k [B, Hk, 1, N, D]. Working memory is one moment (by
state) and one block of tokens, with at most `BLOCK` numbers or `SMALLEST` tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...hla.layout import live_heads, to_heads, to_tokens
from ...options import compute_dtype
from ...sequences import counts

BLOCK = 2**25  # numbers in one block of features or weights
SMALLEST = 16  # minimum number of tokens per block


class Heads(NamedTuple):
    """Tokens in head layout: scaled queries, centred keys and values, the narrow pair of the degree-2 term or None, the
    mean value [B, Hk, 1, 1, Dv] and the number of tokens."""

    q: Tensor
    k: Tensor
    v: Tensor
    q2: Tensor | None
    k2: Tensor | None
    mean: Tensor
    n: float | Tensor


def by_state(n: int, d: int, r: int, dv: int) -> bool:
    """Whether the order by state has fewer multiplications than the order by tokens."""
    return multiplications(n, d, r, dv, True) < multiplications(n, d, r, dv, False)


def multiplications(n: int, d: int, r: int, dv: int, state: bool) -> int:
    """Return the multiplications per token and head; r: width of the degree-2 pair, 0 without a narrow pair."""
    if state:
        pairs = (r or d) * ((r or d) + 1) // 2
        return (d + pairs) * (2 * dv + 1) + pairs  # moment with a column of ones, read-out, denominator
    return n * (d + r + dv)


def evaluate(
    tokens: Sequence[Tensor], coefficients: Tensor, mask: Tensor | None, normalize: bool, q_scale: float
) -> Tensor:
    """Return o [B, N, H, Dv] in the dtype of q from q, k, v (q2, k2); shapes as in `reference`."""
    x = to_layout(tokens, mask, q_scale)
    c1, c2 = pair(coefficients, tokens[1].shape[2], x.q.dtype)
    moment = summed(x) if through_state(x) else None
    parts = []
    for i, j in blocks(x):
        block = x.q[..., i:j, :], rows(x.q2, i, j), c1, c2
        parts.append(read_tokens(*block, x, normalize) if moment is None else read_state(*block, moment, normalize))
    o = live_heads(torch.cat(parts, -2) + x.mean, mask)
    return to_tokens(o, tokens[0].dtype)


def to_layout(tokens: Sequence[Tensor], mask: Tensor | None, q_scale: float) -> Heads:
    """Convert tokens q, k, v (q2, k2) [B, N, H, D] to `Heads`; padded tokens are zero."""
    q, k, v, *narrow = tokens
    dtype, n_key_heads = compute_dtype(q.dtype), k.shape[2]
    n = q.shape[1] if mask is None else counts(mask, dtype)

    def heads(t: Tensor) -> Tensor:
        return live_heads(to_heads(t, n_key_heads, dtype), mask)

    def centred(t: Tensor) -> tuple[Tensor, Tensor]:
        rows = heads(t)
        mean = rows.sum(-2, keepdim=True) / n
        return live_heads(rows - mean, mask), mean

    values, mean = centred(v)
    q2, k2 = (heads(narrow[0]) * q_scale, centred(narrow[1])[0]) if narrow else (None, None)
    return Heads(heads(q) * q_scale, centred(k)[0], values, q2, k2, mean, n)


def pair(c: Tensor, n_key_heads: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Split coefficients [H, 2] into c1 and c2, each [Hk, G, 1, 1]."""
    c = c.to(dtype).unflatten(0, (n_key_heads, -1))
    return c[:, :, :1, None], c[:, :, 1:, None]


def through_state(x: Heads) -> bool:
    """Whether this call runs by state."""
    r = 0 if x.q2 is None else x.q2.shape[-1]
    return by_state(x.q.shape[-2], x.q.shape[-1], r, x.v.shape[-1])


def blocks(x: Heads) -> Iterator[tuple[int, int]]:
    """Yield (first, last + 1) of the tokens of each block; (0, 0) without tokens."""
    n = x.q.shape[-2]
    d = (x.q if x.q2 is None else x.q2).shape[-1]
    width = x.q.shape[-1] + d * (d + 1) // 2 if through_state(x) else n
    size = max(SMALLEST, BLOCK // max(1, width * x.q.shape[:3].numel()))
    for i in range(0, max(n, 1), size):
        yield i, min(i + size, n)


def rows(t: Tensor | None, i: int, j: int) -> Tensor | None:
    """Return the tokens [i, j) of t, or None if t is None."""
    return None if t is None else t[..., i:j, :]


def features(x: Tensor, narrow: Tensor | None) -> Tensor:
    """Return F(x) = [x, x_a x_b for a < b, x_a^2 / sqrt 2], the products from `narrow` if given, such that
    F(q)[D:].F(k)[D:] = (q.k)^2 / 2."""
    y = x if narrow is None else narrow
    a, b, weight = pairs(y)
    return torch.cat([x, y[..., a] * (y[..., b] * weight)], -1)


def pairs(y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the channels a <= b of each degree-2 feature, and its weight."""
    a, b = torch.triu_indices(y.shape[-1], y.shape[-1], device=y.device).unbind(0)
    return a, b, torch.where(a == b, 0.5, 1.0).to(y.dtype).sqrt()


def moment_of(k: Tensor, v: Tensor, k2: Tensor | None) -> Tensor:
    """Return Sum_j F(k_j) [nu_j, 1] of a block of tokens, [B, Hk, 1, W, Dv + 1]."""
    return features(k, k2).mT @ torch.cat([v, torch.ones_like(v[..., :1])], -1)


def summed(x: Heads) -> Tensor:
    """Return mean_j F(k_j) [nu_j, 1], [B, Hk, 1, W, Dv + 1]. Padded keys are zero, and so are their features."""
    total = None
    for i, j in blocks(x):
        part = moment_of(x.k[..., i:j, :], x.v[..., i:j, :], rows(x.k2, i, j))
        total = part if total is None else total + part
    assert total is not None
    return total / x.n


def read_state(q: Tensor, q2: Tensor | None, c1: Tensor, c2: Tensor, moment: Tensor, normalize: bool) -> Tensor:
    """Return o - vbar of a block of queries from the moment; c1, c2 [Hk, G, 1, 1]."""
    d, f = q.shape[-1], features(q, q2)
    o = torch.cat([c1 * f[..., :d], c2 * f[..., d:]], -1) @ moment[..., :-1]
    # centred keys sum to zero only up to rounding, so their sum is left out of the denominator
    return o / (1 + c2 * (f[..., d:] @ moment[..., d:, -1:])) if normalize else o


def read_tokens(q: Tensor, q2: Tensor | None, c1: Tensor, c2: Tensor, x: Heads, normalize: bool) -> Tensor:
    """Return o - vbar of a block of queries from all tokens."""
    s, square = scores(q, q2, x)
    o = ((c1 * s + c2 * square) @ x.v) / x.n
    return o / (1 + c2 * (square.sum(-1, keepdim=True) / x.n)) if normalize else o


def scores(q: Tensor, q2: Tensor | None, x: Heads) -> tuple[Tensor, Tensor]:
    """Return s and r^2 / 2 of a block of queries, [B, Hk, G, queries, N]."""
    s = q @ x.k.mT
    return s, (s if q2 is None or x.k2 is None else q2 @ x.k2.mT).square() / 2
