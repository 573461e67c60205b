"""Second-order Taylor attention: means, then the degree-2 moment, are added over the ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..options import compute_dtype, plain_precision
from ..sequences import to_heads, to_tokens
from ..softmax.taylor.call import TaylorCall, prepare
from ..softmax.taylor.torch_form import Heads, blocks, moment_of, pair, read_state, rows
from .collectives import add_ranks, add_together, one_token


def expand(
    q: Tensor, k: Tensor, v: Tensor, group: Any, *, coefficients: Tensor,
    narrow: tuple[Tensor, Tensor] | None = None, **options: Any,
) -> Tensor:  # fmt: skip
    """Return o [B, N, H, Dv] of this rank's tokens (`hla_kernels.taylor2`), always through the moment. Features of a
    block of tokens are computed again in the backward pass."""
    one, two, three = one_token(q, k, v)
    pair_of_one = None if narrow is None else one_token(*narrow)
    call = prepare(one, two, three, coefficients, narrow=pair_of_one, **options)
    tokens = (q, k, v) if narrow is None else (q, k, v, *narrow)
    with plain_precision(q):
        x = _centred([t.to(call.q.dtype) for t in tokens], call, group)
        c = pair(coefficients, k.shape[2], x.v.dtype)
        cut = list(blocks(x))
        own = [_again(moment_of, rows(x.k, i, j), x.v[..., i:j, :]) for i, j in cut]
        moment = add_ranks(torch.stack(own).sum(0), group) / x.n
        parts = [_again(read_state, rows(x.q, i, j), *c, moment, call.normalize) for i, j in cut]
        return to_tokens(torch.cat(parts, -2) + x.mean, call.q.dtype)


def _centred(tokens: list[Tensor], call: TaylorCall, group: Any) -> Heads:
    """Return the tokens in head layout, keys and values without their means over all ranks."""
    q, k, v, *narrow = (to_heads(t, tokens[1].shape[2], compute_dtype(t.dtype)) for t in tokens)
    keys = [k, v, *narrow[1:]]
    *sums, count = add_together([*(t.sum(-2, keepdim=True) for t in keys), q.new_full((1,), q.shape[-2])], group)
    n = count[0]
    k, v, *k2 = (t - total / n for t, total in zip(keys, sums, strict=True))
    return Heads([t * call.q_scale for t in (q, *narrow[:1])], [k, *k2], v, sums[1] / n, n)


def _again(function: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """Run `function` and recompute it in the backward pass."""
    return checkpoint(function, *inputs, use_reentrant=False)
