"""Torch form of Taylor attention: blocks of tokens, in the cheaper of two product orders.

Tensors are in the head layout of `sequences`: q [B, Hk, G, N, D], k [B, Hk, 1, N, D]. Working memory is one moment (by
state) and one block of tokens, with at most `BLOCK` numbers or `SMALLEST` tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...options import compute_dtype
from ...sequences import counts, live_heads, to_heads, to_tokens

BLOCK = 2**25  # numbers in one block of features or weights
SMALLEST = 16  # minimum number of tokens per block


class Heads(NamedTuple):
    """Tokens in head layout: scaled queries and centred keys, each followed by the narrow ones of the degree-2 term if
    there are any; centred values, the mean value [B, Hk, 1, 1, Dv] and the number of tokens."""

    q: list[Tensor]
    k: list[Tensor]
    v: Tensor
    mean: Tensor
    n: float | Tensor


def by_state(n: int, d: int, r: int, dv: int) -> bool:
    """Whether the order by state has fewer multiplications per token and head than the order by tokens; r: width of
    the degree-2 pair, 0 without a narrow pair."""
    pairs = (r or d) * ((r or d) + 1) // 2
    state = (d + pairs) * (2 * dv + 1) + pairs  # moment with a column of ones, read-out, denominator
    return state < n * (d + r + dv)


def evaluate(
    tokens: Sequence[Tensor], coefficients: Tensor, mask: Tensor | None, normalize: bool, q_scale: float
) -> Tensor:
    """Return o [B, N, H, Dv] in the dtype of q from q, k, v (q2, k2); shapes as in `reference`."""
    x = to_layout(tokens, mask, q_scale)
    c1, c2 = pair(coefficients, tokens[1].shape[2], x.v.dtype)
    moment = summed(x) if through_state(x) else None
    parts = []
    for i, j in blocks(x):
        q = rows(x.q, i, j)
        if moment is None:
            parts.append(read_tokens(q, c1, c2, x.k, x.v, x.n, normalize))
        else:
            parts.append(read_state(q, c1, c2, moment, normalize))
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
    queries, keys = (q, *narrow[:1]), (k, *narrow[1:])
    return Heads([heads(t) * q_scale for t in queries], [centred(t)[0] for t in keys], values, mean, n)


def pair(c: Tensor, n_key_heads: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Split coefficients [H, 2] into c1 and c2, each [Hk, G, 1, 1]."""
    c = c.to(dtype).unflatten(0, (n_key_heads, -1))
    return c[:, :, :1, None], c[:, :, 1:, None]


def through_state(x: Heads) -> bool:
    """Whether this call runs by state."""
    r = x.q[1].shape[-1] if len(x.q) > 1 else 0
    return by_state(x.q[0].shape[-2], x.q[0].shape[-1], r, x.v.shape[-1])


def blocks(x: Heads) -> Iterator[tuple[int, int]]:
    """Yield (first, last + 1) of the tokens of each block; (0, 0) without tokens."""
    n, d = x.q[0].shape[-2], x.q[-1].shape[-1]
    width = x.q[0].shape[-1] + d * (d + 1) // 2 if through_state(x) else n
    size = max(SMALLEST, BLOCK // max(1, width * x.q[0].shape[:3].numel()))
    for i in range(0, max(n, 1), size):
        yield i, min(i + size, n)


def rows(tensors: Sequence[Tensor], i: int, j: int) -> list[Tensor]:
    """Return the tokens [i, j) of each tensor."""
    return [t[..., i:j, :] for t in tensors]


def features(x: Sequence[Tensor]) -> Tensor:
    """Return F(x) = [x, y_a y_b for a < b, y_a^2 / sqrt 2], with y = x or the narrow one behind it, such that
    F(q)[D:].F(k)[D:] = (q.k)^2 / 2."""
    y = x[-1]
    a, b = torch.triu_indices(y.shape[-1], y.shape[-1], device=y.device).unbind(0)
    weight = torch.where(a == b, 0.5, 1.0).to(y.dtype).sqrt()
    return torch.cat([x[0], y[..., a] * (y[..., b] * weight)], -1)


def moment_of(k: Sequence[Tensor], v: Tensor) -> Tensor:
    """Return Sum_j F(k_j) [nu_j, 1] of a block of tokens, [B, Hk, 1, W, Dv + 1]."""
    return features(k).mT @ torch.cat([v, torch.ones_like(v[..., :1])], -1)


def summed(x: Heads) -> Tensor:
    """Return mean_j F(k_j) [nu_j, 1], [B, Hk, 1, W, Dv + 1]. Padded keys are zero, and so are their features."""
    parts = (moment_of(rows(x.k, i, j), x.v[..., i:j, :]) for i, j in blocks(x))
    return functools.reduce(torch.add, parts) / x.n


def read_state(q: Sequence[Tensor], c1: Tensor, c2: Tensor, moment: Tensor, normalize: bool) -> Tensor:
    """Return o - vbar of a block of queries from the moment; c1, c2 [Hk, G, 1, 1]."""
    d, f = q[0].shape[-1], features(q)
    o = torch.cat([c1 * f[..., :d], c2 * f[..., d:]], -1) @ moment[..., :-1]
    # centred keys sum to zero only up to rounding, so their sum is left out of the denominator
    return o / (1 + c2 * (f[..., d:] @ moment[..., d:, -1:])) if normalize else o


def read_tokens(
    q: Sequence[Tensor], c1: Tensor, c2: Tensor, k: Sequence[Tensor], v: Tensor, n: float | Tensor, normalize: bool
) -> Tensor:
    """Return o - vbar of a block of queries from all tokens."""
    s = q[0] @ k[0].mT  # [B, Hk, G, queries, N]
    square = (s if len(q) == 1 else q[1] @ k[1].mT).square() / 2
    o = ((c1 * s + c2 * square) @ v) / n
    return o / (1 + c2 * (square.sum(-1, keepdim=True) / n)) if normalize else o
