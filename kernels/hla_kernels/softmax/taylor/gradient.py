"""Backward of Taylor attention: one block of tokens at a time, whose intermediates are computed again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...dispatch.operator import transforms
from ...hla.layout import live_heads, to_heads, to_tokens
from .torch_form import blocks, moment_of, pair, read_state, read_tokens, rows, summed, through_state, to_layout


def gradient(
    grad: Tensor, tokens: Sequence[Tensor], coefficients: Tensor, mask: Tensor | None, normalize: bool, q_scale: float
) -> list[Tensor]:
    """Return the gradients of q, k, v (q2, k2) and of the coefficients from the gradient of o."""
    x = to_layout(tokens, mask, q_scale)
    n_key_heads = tokens[1].shape[2]
    dy = live_heads(to_heads(grad, n_key_heads, x.q.dtype), mask)
    by_state = through_state(x)
    # queries and keys in the order of `read`; what all queries share comes last
    shared = (*pair(coefficients, n_key_heads, x.q.dtype), *((summed(x),) if by_state else (x.k, x.v, x.k2)))

    def read(q: Tensor, q2: Tensor | None, c1: Tensor, c2: Tensor, *others: Any) -> Tensor:
        if by_state:
            return read_state(q, q2, c1, c2, others[0], normalize)
        k, v, k2 = others
        return read_tokens(q, q2, c1, c2, x._replace(k=k, v=v, k2=k2), normalize)

    d_q, totals = _each(x, lambda i, j: _through(read, dy[..., i:j, :], x.q[..., i:j, :], rows(x.q2, i, j), *shared), 2)
    d_c = torch.cat([t.flatten(0, 1).flatten(1) for t in totals[:2]], 1)
    d_keys = totals[2:]
    if by_state:
        d_moment = totals[2] / x.n
        d_keys, _ = _each(
            x, lambda i, j: _through(moment_of, d_moment, x.k[..., i:j, :], x.v[..., i:j, :], rows(x.k2, i, j)), 3
        )
    d_k, d_v, d_k2 = d_keys

    def centred(t: Tensor, more: Tensor | float = 0.0) -> Tensor:
        """Return the gradient of tokens from the gradients of the centred tokens and (`more`) of their mean."""
        return live_heads(t - (t.sum(-2, keepdim=True) - more) / x.n, mask)

    queries = [t * q_scale for t in d_q if t is not None]
    keys = [centred(d_k), centred(d_v, dy.sum((2, 3), keepdim=True)), *(centred(t) for t in (d_k2,) if t is not None)]
    grads = (queries[0], *keys[:2], *queries[1:], *keys[2:])
    return [*(to_tokens(g, t.dtype) for g, t in zip(grads, tokens, strict=True)), d_c.to(coefficients.dtype)]


def _each(x: Any, function: Callable, own: int) -> tuple[list, list]:
    """Return the results of function(first, last + 1) of all blocks: the first `own` joined, the others added."""
    parts = [function(i, j) for i, j in blocks(x)]
    columns = list(zip(*parts, strict=True))
    joined = [None if c[0] is None else torch.cat(c, -2) for c in columns[:own]]
    return joined, [None if c[0] is None else sum(c[1:], c[0]) for c in columns[own:]]


def _through(function: Callable, grad: Tensor, *inputs: Tensor | None) -> list[Tensor | None]:
    """Return the gradients of the inputs from the gradient of function(*inputs); None for None."""
    given = [x for x in inputs if x is not None]

    def run(*some: Tensor) -> Tensor:
        left = iter(some)
        return function(*(None if x is None else next(left) for x in inputs))

    with transforms():
        found = iter(torch.func.vjp(run, *given)[1](grad))
    return [None if x is None else next(found) for x in inputs]
