"""Backward of Taylor attention: one block of tokens at a time, whose intermediates are computed again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from ...dispatch.operator import vjp
from ...sequences import live_heads, to_heads, to_tokens
from .torch_form import blocks, moment_of, pair, read_state, read_tokens, rows, summed, through_state, to_layout


def gradient(
    grad: Tensor, tokens: Sequence[Tensor], coefficients: Tensor, mask: Tensor | None, normalize: bool, q_scale: float
) -> list[Tensor]:
    """Return the gradients of q, k, v (q2, k2) and of the coefficients from the gradient of o."""
    x = to_layout(tokens, mask, q_scale)
    n_key_heads, by_state = tokens[1].shape[2], through_state(x)
    dy = live_heads(to_heads(grad, n_key_heads, x.v.dtype), mask)
    read: Callable = functools.partial(read_state, normalize=normalize)
    if not by_state:
        read = functools.partial(read_tokens, n=x.n, normalize=normalize)
    shared = (*pair(coefficients, n_key_heads, x.v.dtype), *((summed(x),) if by_state else (x.k, x.v)))
    found = [_through(read, dy[..., i:j, :], rows(x.q, i, j), *shared) for i, j in blocks(x)]
    d_q = tree_map(_joined, *(of_block[0] for of_block in found))
    d_c1, d_c2, *d_keys = tree_map(_added, *(of_block[1:] for of_block in found))  # of what all queries share
    if by_state:
        cut = [(rows(x.k, i, j), x.v[..., i:j, :]) for i, j in blocks(x)]
        d_keys = tree_map(_joined, *(_through(moment_of, d_keys[0] / x.n, *block) for block in cut))
    d_k, d_v = d_keys

    def centred(t: Tensor, more: Tensor | float = 0.0) -> Tensor:
        """Return the gradient of tokens from the gradients of the centred tokens and (`more`) of their mean."""
        return live_heads(t - (t.sum(-2, keepdim=True) - more) / x.n, mask)

    narrow = [t for q, k in zip(d_q[1:], d_k[1:], strict=True) for t in (q * q_scale, centred(k))]
    grads = (d_q[0] * q_scale, centred(d_k[0]), centred(d_v, dy.sum((2, 3), keepdim=True)), *narrow)
    d_c = torch.cat([t.flatten(0, 1).flatten(1) for t in (d_c1, d_c2)], 1)
    return [*(to_tokens(g, t.dtype) for g, t in zip(grads, tokens, strict=True)), d_c.to(coefficients.dtype)]


def _joined(*blocks: Tensor) -> Tensor:
    return torch.cat(blocks, -2)


def _added(*blocks: Tensor) -> Tensor:
    return functools.reduce(torch.add, blocks)


def _through(function: Callable, grad: Tensor, *inputs: Any) -> tuple:
    """Return the gradients of the inputs from the gradient of function(*inputs)."""
    tensors, spec = tree_flatten(inputs)
    grads = vjp(lambda *x: function(*tree_unflatten(x, spec)), *tensors)[1](grad)
    return tree_unflatten(grads, spec)
