"""Multipole attention, linear in the number of tokens: one moment and the near tokens per block.

The far field is computed for all blocks, including near ones. For near tokens the difference between the exact and the
expanded weight is added, exp(s) - exp(a) (1 + r) >= 0. Queries of a block share the keys around it. Working memory: the
tokens around every block, and at most `BLOCK` numbers for a group of query blocks (or the memory of one block); with
gradients, intermediates are recomputed in the backward pass.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..heads import SMALLEST, Heads, attend, largest
from ..taylor.torch_form import features
from .layout import Field, Slots, anchors_of, sizes, slots

BLOCK = 2**25  # numbers in memory for one group of query blocks


class Far(NamedTuple):
    """Blocks of the grid, then one block per token outside it, M + P in all.

    anchors [B, H, M + P, D]: mean keys; sums [B, H, M + P, Dv]: sums of values; n [.., M + P, 1]: number of real
    tokens; moments [B, H, M, F, Dv + 1]: sums of f(k - mean k) [v, 1]', f the features of the degree (without the
    column of ones for degree 1, for which it sums to zero).
    """

    anchors: Tensor
    sums: Tensor
    n: Tensor
    moments: Tensor


class Near(NamedTuple):
    """Near field per block: queries [B, H, M, W, D]; the keys around it, the mean keys of their blocks and the values,
    [B, H, M, V, .]; and which of them are near to each query, [.., M, W, V]."""

    q: Tensor
    k: Tensor
    anchors: Tensor
    v: Tensor
    near: Tensor


def by_blocks(x: Heads, field: Field, degree: int) -> Tensor:
    """Return o [B, H, N, Dv]."""
    table = slots(field.layout, field.radius, x.q.device)
    far, near = fields(x, field, table, degree)
    m, width = table.tokens.shape
    numbers = x.q.shape[0] * x.q.shape[1] * width * (m * width_of(x.q.shape[-1], degree) + 3 * table.halo.shape[1])
    step = m if torch.compiler.is_compiling() else max(1, BLOCK // max(1, numbers))  # it plans its memory
    parts = []
    for i in range(0, m, step):
        some = Near._make(t.narrow(-3, i, min(step, m - i)) for t in near)
        if step < m:
            parts.append(checkpoint(read, some, far, degree, use_reentrant=False))
        else:
            parts.append(read(some, far, degree))
    o = torch.cat(parts, 2).flatten(2, 3).index_select(-2, table.places)
    if not field.n_outer:
        return o
    first, last = attend(outer(x.q, field), x).split([field.prefix, field.suffix], -2)
    return torch.cat([first, o, last], -2)


def fields(x: Heads, field: Field, table: Slots, degree: int) -> tuple[Far, Near]:
    """Return the far and the near field that queries read."""
    q, k, v = (t.narrow(-2, field.prefix, field.n_grid) for t in x[:3])
    anchors = anchors_of(x, field)
    weight, n = sizes(x, field)
    near, alone = table.near, x.k.new_ones(field.n_outer, 1)
    full = (table.tokens < field.n_grid)[..., None]
    if x.live is not None:
        live = x.live.narrow(-2, field.prefix, field.n_grid)
        near, full = near & rows(live, table.halo).mT, rows(live, table.tokens)
        alone = outer(x.live, field).to(x.k.dtype)
    values = rows(v, table.tokens)
    sums = torch.cat([values.sum(-2), outer(x.v, field)], -2)
    if degree == 2:
        values = torch.cat([values, full.to(values.dtype).expand(*values.shape[:-1], 1)], -1)
    moments = terms(rows(k, table.tokens) - anchors[..., None, :], degree).mT @ values
    far = Far(torch.cat([anchors, outer(x.k, field)], -2), sums, torch.cat([n, alone], -2), moments)
    around, centres, theirs = (rows(t, table.halo) for t in (k, weight @ anchors, v))
    return far, Near(rows(q, table.tokens), around, centres, theirs, near)


def terms(x: Tensor, degree: int) -> Tensor:
    """Return f(x) such that f(q).f(r) are the terms of exp(q.r) of degree 1 to `degree`; empty for degree 0."""
    return features([x]) if degree == 2 else x[..., : degree * x.shape[-1]]


def width_of(d: int, degree: int) -> int:
    """Return the number of features of `terms`."""
    return d + d * (d + 1) // 2 if degree == 2 else degree * d


def rows(x: Tensor, index: Tensor) -> Tensor:
    """Gather the rows [.., I, J, D] of x [.., N, D] by an index [I, J]; index N gives zeros.

    A token is near to several blocks; on a GPU, the backward of indexing adds their gradients in a fixed order, unlike
    the backward of `index_select`."""
    return F.pad(x, (0, 0, 0, 1))[..., index, :]


def outer(x: Tensor, field: Field) -> Tensor:
    """Return the tokens before and after the grid, [.., P, D]."""
    first, _, last = x.split([field.prefix, field.n_grid, field.suffix], -2)
    return torch.cat([first, last], -2)


def read(tokens: Near, far: Far, degree: int) -> Tensor:
    """Return o [B, H, C, W, Dv] of the queries in some blocks."""
    q, k, anchors, v, near = tokens
    blocks, sums, n, moments = far
    flat = q.flatten(2, 3)
    power = (flat @ blocks.mT).masked_fill((n == 0).mT, float("-inf"))
    expanded, rest = (q @ anchors.mT).masked_fill(~near, float("-inf")), q @ (k - anchors).mT
    top = largest(power, (expanded + rest).flatten(2, 3))
    p, high = (power - top).exp(), top.unflatten(2, q.shape[2:4])
    polynomial = (1.0, 1 + rest, 1 + rest + rest.square() / 2)[degree]
    more = (expanded + rest - high).exp() - (expanded - high).exp() * polynomial
    o, z = p @ sums + (more @ v).flatten(2, 3), p @ n + more.sum(-1, keepdim=True).flatten(2, 3)
    if degree:
        f = (p[..., : moments.shape[2], None] * terms(flat, degree)[..., None, :]).flatten(-2) @ moments.flatten(2, 3)
        o = o + f[..., : v.shape[-1]]
        z = z + f[..., v.shape[-1] :].sum(-1, keepdim=True)  # empty for degree 1: these terms sum to zero
    z = z.clamp(min=SMALLEST)
    return (o / z).unflatten(2, q.shape[2:4])


def multiplications(field: Field, d: int, dv: int, degree: int) -> int:
    """Return the multiplications per head and token of the grid."""
    m, near = field.layout.n_blocks + field.n_outer, 1
    for length, blocks in zip(field.layout.grid, field.layout.blocks, strict=True):
        near *= min(length, -(-length // blocks) + 2 * field.radius)
    far = width_of(d, degree) * field.layout.n_blocks * (dv + (degree == 2))
    return m * (d + dv) + far + near * (2 * d + dv)
