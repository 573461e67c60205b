"""The torch form of second-order Taylor attention: blocks of tokens, in the cheaper of two orders of the products.

Tensors in head layout as in `hla.layout`: q [B, Hk, G, N, D], k [B, Hk, 1, N, D]. Memory beside inputs and outputs is
one moment (by state) and what a block of tokens needs, at most `BLOCK` numbers or those of `SMALLEST` tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ...hla.layout import live_heads, to_heads, to_tokens
from ...options import compute_dtype
from ...sequences import counts

BLOCK = 2**25  # numbers of a block of features or weights
SMALLEST = 16  # tokens of a block


class Heads(NamedTuple):
    """Tokens in head layout: queries (scaled), centred keys and values, the pair of the degree-2 term if it has its
    own, the mean value [B, Hk, 1, 1, Dv] and the number of tokens."""

    q: Tensor
    k: Tensor
    v: Tensor
    q2: Tensor | None
    k2: Tensor | None
    mean: Tensor
    n: float | Tensor


def by_state(n: int, d: int, r: int, dv: int) -> bool:
    """Whether the products go through the moment: it has fewer multiplications than the weights of N tokens."""
    return multiplications(n, d, r, dv, True) < multiplications(n, d, r, dv, False)


def multiplications(n: int, d: int, r: int, dv: int, state: bool) -> int:
    """Multiplications a token and head; r: width of the degree-2 pair, 0 where it is that of q and k."""
    if state:
        pairs = (r or d) * ((r or d) + 1) // 2
        return (d + pairs) * (2 * dv + 1) + pairs  # moment with its column of ones, read-out, divisor
    return n * (d + r + dv)


def evaluate(
    q: Tensor, k: Tensor, v: Tensor, coefficients: Tensor, q2: Tensor | None, k2: Tensor | None, mask: Tensor | None,
    normalize: bool, q_scale: float,
) -> Tensor:  # fmt: skip
    """o [B, N, H, Dv] in the dtype of q; shapes as in `reference`."""
    x = _heads(q, k, v, q2, k2, mask, q_scale)
    c = _coefficients(coefficients, k.shape[2], x.q.dtype)
    read = _reader(x, normalize)
    moment = _moment(x) if _through_state(x) else None
    parts = [read(x.q[..., i:j, :], _rows(x.q2, i, j), c, moment, x.k, x.k2, x.v) for i, j in _blocks(x)]
    o = live_heads(torch.cat(parts, -2) + x.mean, mask)
    return to_tokens(o, q.dtype)


def gradient(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, coefficients: Tensor, q2: Tensor | None, k2: Tensor | None,
    mask: Tensor | None, normalize: bool, q_scale: float,
) -> list[Tensor | None]:  # fmt: skip
    """Gradients of q, k, v, coefficients, q2 and k2 from that of o; everything but the inputs is formed again."""
    x = _heads(q, k, v, q2, k2, mask, q_scale)
    dy = live_heads(to_heads(grad, k.shape[2], x.q.dtype), mask)
    c = _coefficients(coefficients, k.shape[2], x.q.dtype)
    read = _reader(x, normalize)
    moment = _moment(x) if _through_state(x) else None
    tokens = [x.k, x.v] if x.k2 is None else [x.k, x.v, x.k2]
    shared = [moment] if moment is not None else tokens
    d_c, d_shared = torch.zeros_like(c), [torch.zeros_like(t) for t in shared]
    d_q: list[Tensor] = []
    d_q2: list[Tensor] = []
    for i, j in _blocks(x):

        def block(q: Tensor, c: Tensor, *rest: Tensor) -> Tensor:
            narrow, rest = (rest[0], rest[1:]) if x.q2 is not None else (None, rest)
            if moment is not None:
                return read(q, narrow, c, rest[0], x.k, x.k2, x.v)
            return read(q, narrow, c, None, rest[0], rest[2] if len(rest) > 2 else None, rest[1])

        mine = [x.q[..., i:j, :], c, *([] if x.q2 is None else [x.q2[..., i:j, :]]), *shared]
        found = list(torch.func.vjp(block, *mine)[1](dy[..., i:j, :]))
        d_q.append(found[0])
        d_c = d_c + found[1]
        if x.q2 is not None:
            d_q2.append(found.pop(2))
        d_shared = [a + b for a, b in zip(d_shared, found[2:], strict=True)]
    if moment is not None:
        d_shared = _moment_gradient(x, d_shared[0])
    out = [torch.cat(d_q, -2) * q_scale, *(_centred(t, x.n, mask) for t in d_shared)]
    mean = dy.sum((2, 3), keepdim=True) / x.n
    out[2] = live_heads(out[2] + mean, mask)  # vbar enters o itself
    grads: list[Tensor | None] = [to_tokens(t, s.dtype) for t, s in zip(out[:3], (q, k, v), strict=True)]
    grads.append(d_c.flatten(0, 1).to(coefficients.dtype).contiguous())
    if q2 is None or k2 is None:
        return [*grads, None, None]
    return [*grads, to_tokens(torch.cat(d_q2, -2) * q_scale, q2.dtype), to_tokens(out[3], k2.dtype)]


def _heads(
    q: Tensor, k: Tensor, v: Tensor, q2: Tensor | None, k2: Tensor | None, mask: Tensor | None, q_scale: float
) -> Heads:
    dtype, n_key_heads = compute_dtype(q.dtype), k.shape[2]
    n = q.shape[1] if mask is None else counts(mask, dtype)

    def heads(t: Tensor) -> Tensor:
        return live_heads(to_heads(t, n_key_heads, dtype), mask)

    def centred(t: Tensor) -> tuple[Tensor, Tensor]:
        rows = heads(t)
        mean = rows.sum(-2, keepdim=True) / n
        return live_heads(rows - mean, mask), mean

    values, mean = centred(v)
    narrow_q = None if q2 is None else heads(q2) * q_scale
    narrow_k = None if k2 is None else centred(k2)[0]
    return Heads(heads(q) * q_scale, centred(k)[0], values, narrow_q, narrow_k, mean, n)


def _centred(t: Tensor, n: float | Tensor, mask: Tensor | None) -> Tensor:
    """The gradient of tokens from that of the centred tokens."""
    return live_heads(t - t.sum(-2, keepdim=True) / n, mask)


def _coefficients(c: Tensor, n_key_heads: int, dtype: torch.dtype) -> Tensor:
    """[H, 2] -> [Hk, G, 2]."""
    return c.to(dtype).unflatten(0, (n_key_heads, -1))


def _through_state(x: Heads) -> bool:
    r = 0 if x.q2 is None else x.q2.shape[-1]
    return by_state(x.q.shape[-2], x.q.shape[-1], r, x.v.shape[-1])


def _blocks(x: Heads) -> Iterator[tuple[int, int]]:
    """(first, last + 1) of the tokens of each block."""
    n = x.q.shape[-2]
    d = (x.q if x.q2 is None else x.q2).shape[-1]
    width = x.q.shape[-1] + d * (d + 1) // 2 if _through_state(x) else n
    size = max(SMALLEST, BLOCK // max(1, width * x.q.shape[:3].numel()))
    for i in range(0, n, size):
        yield i, min(i + size, n)


def _rows(t: Tensor | None, i: int, j: int) -> Tensor | None:
    return None if t is None else t[..., i:j, :]


def features(x: Tensor, narrow: Tensor | None) -> Tensor:
    """F(x) = [x, x_a x_b for a < b, x_a^2 / sqrt 2], so that F(q)[D:].F(k)[D:] = (q.k)^2 / 2, of `narrow` if given."""
    y = x if narrow is None else narrow
    a, b = torch.triu_indices(y.shape[-1], y.shape[-1], device=x.device).unbind(0)
    weight = torch.where(a == b, 0.5, 1.0).to(x.dtype).sqrt()
    return torch.cat([x, y[..., a] * (y[..., b] * weight)], -1)


def _with_ones(v: Tensor) -> Tensor:
    return torch.cat([v, torch.ones_like(v[..., :1])], -1)


def _moment(x: Heads) -> Tensor:
    """mean_j F(k_j) [nu_j, 1], [B, Hk, 1, W, Dv + 1]. Padded keys are zero, and so are their features."""
    total = None
    for i, j in _blocks(x):
        part = features(x.k[..., i:j, :], _rows(x.k2, i, j)).mT @ _with_ones(x.v[..., i:j, :])
        total = part if total is None else total + part
    assert total is not None
    return total / x.n


def _moment_gradient(x: Heads, grad: Tensor) -> list[Tensor]:
    """Gradients of the centred keys, values (and the narrow keys) from that of the moment."""
    grad = grad / x.n

    def part(k: Tensor, v: Tensor, *k2: Tensor) -> Tensor:
        return features(k, k2[0] if k2 else None).mT @ _with_ones(v)

    tokens = [x.k, x.v] if x.k2 is None else [x.k, x.v, x.k2]
    found = [torch.func.vjp(part, *(t[..., i:j, :] for t in tokens))[1](grad) for i, j in _blocks(x)]
    return [torch.cat(parts, -2) for parts in zip(*found, strict=True)]


def _reader(x: Heads, normalize: bool) -> Callable[..., Tensor]:
    """The function that reads o - vbar of a block of queries from the moment, or from all tokens."""

    def read(
        q: Tensor, q2: Tensor | None, c: Tensor, moment: Tensor | None, k: Tensor, k2: Tensor | None, v: Tensor
    ) -> Tensor:
        c1, c2 = c[:, :, None, None, 0], c[:, :, None, None, 1]  # [Hk, G, 1, 1]
        if moment is None:
            s = q @ k.mT
            square = (s if q2 is None or k2 is None else q2 @ k2.mT).square() / 2
            o = ((c1 * s + c2 * square) @ v) / x.n
            return o / (1 + c2 * (square.sum(-1, keepdim=True) / x.n)) if normalize else o
        d = q.shape[-1]
        f = features(q, q2)
        o = torch.cat([c1 * f[..., :d], c2 * f[..., d:]], -1) @ moment[..., :-1]
        # the centred keys sum to zero, but not exactly: only the squares belong into the divisor
        return o / (1 + c2 * (f[..., d:] @ moment[..., d:, -1:])) if normalize else o

    return read
