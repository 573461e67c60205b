"""The torch form of multipole attention: by tokens with N x N weights, or by blocks, linear in N.

Tensors are in head layout, [B, H, N, D]. Everything is plain differentiable torch code in float32 at least, for a
compiler to fuse.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...options import compute_dtype
from ...sequences import real
from .call import MultipoleCall
from .layout import Field, membership, near

FEWER = 4  # a product by blocks costs as much as so many of a large matrix


class Heads(NamedTuple):
    """Tokens in head layout (queries scaled, padded ones zero), and which of them are real, [B, 1, 1, N] or None."""

    q: Tensor
    k: Tensor
    v: Tensor
    live: Tensor | None


def evaluate(call: MultipoleCall) -> Tensor:
    """o [B, N, H, Dv] in the dtype of q."""
    x = to_layout(call)
    o = by_tokens(x, call.field, call.degree)
    return real(o.transpose(1, 2), call.mask).to(call.q.dtype).contiguous()


def to_layout(call: MultipoleCall) -> Heads:
    """Tokens [B, N, H, D] as `Heads`; keys and values are repeated for the heads that share them."""
    dtype, group = compute_dtype(call.q.dtype), call.q.shape[2] // call.k.shape[2]
    q, k, v = (real(t, call.mask).to(dtype).transpose(1, 2) for t in call[:3])
    if group > 1:
        k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
    return Heads(q * call.q_scale, k, v, None if call.mask is None else call.mask[:, None, None])


def by_tokens(x: Heads, field: Field, degree: int) -> Tensor:
    """o [B, H, N, Dv] from the weights of all pairs."""
    anchors = anchor_keys(x.k, x.live, field)
    exact = near(field.layout.grid, field.radius, x.q.device)
    exact = F.pad(exact, (field.prefix, field.suffix, field.prefix, field.suffix), value=True)
    a, r = x.q @ anchors.mT, x.q @ (x.k - anchors).mT
    power = torch.where(exact, a + r, a)
    if x.live is not None:
        power = power.masked_fill(~x.live, float("-inf"))
    w = (power - largest(power)).exp()
    if degree:
        w = w * (1 + r.masked_fill(exact, 0))
    return (w @ x.v) / w.sum(-1, keepdim=True)


def anchor_keys(k: Tensor, live: Tensor | None, field: Field) -> Tensor:
    """The mean key of each token's block, [B, H, N, D]; a token that is not on the grid is a block of its own."""
    before, inner, after = k.split([field.prefix, field.n_grid, field.suffix], -2)
    member = membership(field.layout, k)
    weight = member
    if live is not None:
        weight = member * live.narrow(-1, field.prefix, field.n_grid).mT
    mean = (weight.mT @ inner) / weight.sum(-2).clamp(min=1)[..., None]
    return torch.cat([before, member @ mean, after], -2)


def largest(power: Tensor) -> Tensor:
    """The largest exponent of each row, 0 where no token is real."""
    top = power.detach().amax(-1, keepdim=True)
    return top.where(top.isfinite(), 0)
