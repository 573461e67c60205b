"""Tokens in head layout, and the mean keys of blocks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...options import compute_dtype
from ...sequences import real
from .call import MultipoleCall
from .layout import Field, membership

SMALLEST = 0.3  # of a divisor over its largest exponential: it is at least 0.5, but 0 where no token is real


class Heads(NamedTuple):
    """q (scaled), k, v [B, H, N, D], padded tokens zero, and which of them are real, [B, 1, N, 1] or None."""

    q: Tensor
    k: Tensor
    v: Tensor
    live: Tensor | None


def to_layout(call: MultipoleCall) -> Heads:
    """Tokens [B, N, H, D] as `Heads`; keys and values are repeated for the heads that share them."""
    dtype, group = compute_dtype(call.q.dtype), call.q.shape[2] // call.k.shape[2]
    q, k, v = (real(t, call.mask).to(dtype).transpose(1, 2) for t in call[:3])
    if group > 1:
        k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
    return Heads(q * call.q_scale, k, v, None if call.mask is None else call.mask[:, None, :, None])


def sizes(x: Heads, field: Field) -> tuple[Tensor, Tensor]:
    """(weight of each token in the blocks [.., N, M], number of real tokens of each block [.., M, 1])."""
    weight = membership(field.layout, x.k)
    if x.live is not None:
        weight = weight * x.live.narrow(-2, field.prefix, field.n_grid)
    return weight, weight.sum(-2)[..., None]


def anchors_of(x: Heads, field: Field) -> Tensor:
    """The mean key of each block, [B, H, M, D]; 0 where no token is real."""
    weight, n = sizes(x, field)
    return (weight.mT @ x.k.narrow(-2, field.prefix, field.n_grid)) / n.clamp(min=1)


def largest(*powers: Tensor) -> Tensor:
    """The largest exponent of each row, 0 where no token is real; without a gradient, since it cancels."""
    top = torch.cat([p.detach().amax(-1, keepdim=True) for p in powers], -1).amax(-1, keepdim=True)
    return top.where(top.isfinite(), 0)
