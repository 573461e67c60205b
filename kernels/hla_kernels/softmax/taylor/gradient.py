"""Explicit backward of Taylor attention; blocks and order of products as in `torch_form`.

g_t is the gradient of o_t, z_t the denominator, g'_t = g_t / z_t, and u_t = -g'_t.(o_t - vbar) the gradient of z_t.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...hla.layout import live_heads, to_heads, to_tokens
from .torch_form import (
    Heads,
    blocks,
    features,
    pair,
    pairs,
    read_state,
    read_tokens,
    rows,
    scores,
    summed,
    through_state,
    to_layout,
    with_ones,
)


def gradient(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, coefficients: Tensor, q2: Tensor | None, k2: Tensor | None,
    mask: Tensor | None, normalize: bool, q_scale: float,
) -> list[Tensor | None]:  # fmt: skip
    """Return the gradients of q, k, v, coefficients, q2 and k2 from the gradient of o, recomputing all
    intermediates."""
    x = to_layout(q, k, v, q2, k2, mask, q_scale)
    dy = live_heads(to_heads(grad, k.shape[2], x.q.dtype), mask)
    c1, c2 = pair(coefficients, k.shape[2], x.q.dtype)
    by_state = through_state(x)
    d_q, d_c, (d_k, d_v, d_k2), d_q2 = (_by_state if by_state else _by_tokens)(x, dy, c1, c2, normalize)
    d_v = _centred(d_v, x, mask) + dy.sum((2, 3), keepdim=True) / x.n  # vbar is a term of o
    grads: list[Tensor | None] = [
        to_tokens(d_q * q_scale, q.dtype),
        to_tokens(_centred(d_k, x, mask), k.dtype),
        to_tokens(live_heads(d_v, mask), v.dtype),
        d_c.flatten(0, 1).to(coefficients.dtype),
    ]
    if q2 is None or k2 is None or d_q2 is None or d_k2 is None:
        return [*grads, None, None]
    return [*grads, to_tokens(d_q2 * q_scale, q2.dtype), to_tokens(_centred(d_k2, x, mask), k2.dtype)]


Keys = tuple[Tensor, Tensor, Tensor | None]  # gradients of centred keys, values and narrow keys
Found = tuple[Tensor, Tensor, Keys, Tensor | None]  # gradients of q, coefficients [Hk, G, 2], Keys and q2


def _centred(t: Tensor, x: Heads, mask: Tensor | None) -> Tensor:
    """Return the gradient of tokens from the gradient of the centred tokens."""
    return live_heads(t - t.sum(-2, keepdim=True) / x.n, mask)


def _by_state(x: Heads, dy: Tensor, c1: Tensor, c2: Tensor, normalize: bool) -> Found:
    d, moment = x.q.shape[-1], summed(x)
    values, ones = moment[..., :-1], moment[..., d:, -1:]
    d_values, d_ones, d_c = torch.zeros_like(values), torch.zeros_like(ones), _no_coefficients(c1)
    d_q, d_q2 = [], []
    for i, j in blocks(x):
        q, q2 = x.q[..., i:j, :], rows(x.q2, i, j)
        f, g = features(q, q2), dy[..., i:j, :]
        u = None
        if normalize:
            o = read_state(q, q2, c1, c2, moment, normalize)
            g = g / (1 + c2 * (f[..., d:] @ ones))
            u = -(g * o).sum(-1, keepdim=True)
            d_ones = d_ones + _shared((f[..., d:]).mT @ (c2 * u), ones)
        weighted = g @ values.mT
        first, second = weighted[..., :d], weighted[..., d:]
        second = second if u is None else second + u @ ones.mT
        d_c = d_c + torch.stack([_sum(f[..., :d] * first), _sum(f[..., d:] * second)], -1)
        d_values = d_values + _shared(torch.cat([c1 * f[..., :d], c2 * f[..., d:]], -1).mT @ g, values)
        own, narrow = _through_features(q, q2, torch.cat([c1 * first, c2 * second], -1))
        d_q.append(own)
        d_q2.append(narrow)
    d_moment = torch.cat([d_values, torch.cat([torch.zeros_like(d_values[..., :d, :1]), d_ones], -2)], -1) / x.n
    keys: list[tuple] = []
    for i, j in blocks(x):
        k, k2, v = x.k[..., i:j, :], rows(x.k2, i, j), x.v[..., i:j, :]
        own, narrow = _through_features(k, k2, with_ones(v) @ d_moment.mT)
        keys.append((own, features(k, k2) @ d_moment[..., :-1], narrow))
    d_k, d_v, d_k2 = (_joined(parts) for parts in zip(*keys, strict=True))
    assert d_k is not None and d_v is not None
    return torch.cat(d_q, -2), d_c, (d_k, d_v, d_k2), _joined(d_q2)


def _by_tokens(x: Heads, dy: Tensor, c1: Tensor, c2: Tensor, normalize: bool) -> Found:
    d_k, d_v, d_c = torch.zeros_like(x.k), torch.zeros_like(x.v), _no_coefficients(c1)
    d_k2 = None if x.k2 is None else torch.zeros_like(x.k2)
    d_q, d_q2 = [], []
    for i, j in blocks(x):
        q, q2 = x.q[..., i:j, :], rows(x.q2, i, j)
        s, square = scores(q, q2, x)
        g = dy[..., i:j, :] / x.n
        d_first = d_second = g @ x.v.mT
        if normalize:
            o = read_tokens(q, q2, c1, c2, x, normalize)
            g = g / (1 + c2 * (square.sum(-1, keepdim=True) / x.n))
            d_first = g @ x.v.mT
            d_second = d_first - (g * o).sum(-1, keepdim=True)
        d_c = d_c + torch.stack([_sum(s * d_first), _sum(square * d_second)], -1)
        d_v = d_v + _shared((c1 * s + c2 * square).mT @ g, x.v)
        d_s = c1 * d_first
        if q2 is None or x.k2 is None or d_k2 is None:
            d_s = d_s + c2 * d_second * s
        else:
            d_r = c2 * d_second * (q2 @ x.k2.mT)
            d_q2.append(d_r @ x.k2)
            d_k2 = d_k2 + _shared(d_r.mT @ q2, x.k2)
        d_q.append(d_s @ x.k)
        d_k = d_k + _shared(d_s.mT @ q, x.k)
    return torch.cat(d_q, -2), d_c, (d_k, d_v, d_k2), _joined(d_q2)


def _through_features(x: Tensor, narrow: Tensor | None, grad: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of x and of `narrow` (None if x is used for both) from the gradient of F(x)."""
    d = x.shape[-1]
    y = x if narrow is None else narrow
    a, b, weight = pairs(y)
    g = grad[..., d:] * weight
    r = y.shape[-1]
    matrix = g.new_zeros((*g.shape[:-1], r * r)).index_copy(-1, a * r + b, g).unflatten(-1, (r, r))
    squares = ((matrix + matrix.mT) @ y[..., None])[..., 0]  # a product, since index_add is not deterministic on a GPU
    return (grad[..., :d] + squares, None) if narrow is None else (grad[..., :d], squares)


def _shared(t: Tensor, like: Tensor) -> Tensor:
    """Sum over the query heads that share a key head."""
    return t if like.shape[2] == t.shape[2] else t.sum(2, keepdim=True)


def _sum(t: Tensor) -> Tensor:
    """Sum over batch, tokens and channels: [B, Hk, G, N, .] -> [Hk, G]."""
    return t.sum((0, 3, 4))


def _no_coefficients(c: Tensor) -> Tensor:
    return c.new_zeros((*c.shape[:2], 2))


def _joined(parts: list | tuple) -> Tensor | None:
    return None if not parts or parts[0] is None else torch.cat(list(parts), -2)
