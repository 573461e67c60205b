"""Triton form of multipole attention by tokens: the N x N weights exist a tile at a time, as in flash attention.

A tile costs two products for its scores, q.A with the mean keys of blocks and q.C with what keys have more, and one for
its values. Reading order: kernels, launch. Triton is imported by the first call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..call import MultipoleCall
from ..heads import anchors_of, to_layout
from ..layout import membership
from .launch import multipole_op

WIDTHS = (16, 32, 64, 128)


def why_not(call: MultipoleCall) -> str | None:
    """The reason why there is no Triton form of this call, or None."""
    q, v = call.q, call.v
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"the Triton form of multipole is for bfloat16 and float16, not {q.dtype}"
    if call.mask is not None:
        return "the Triton form of multipole has no key_padding_mask"
    if q.shape[3] != v.shape[3] or q.shape[3] not in WIDTHS:
        return f"the Triton form of multipole needs heads of {WIDTHS} channels, got {q.shape[3]} and {v.shape[3]}"
    if len(call.field.layout.grid) > 3:
        return "the Triton form of multipole is for grids of up to three axes"
    return None


def evaluate(call: MultipoleCall) -> Tensor:
    """o [B, N, H, D]; scores are around the rounded mean keys, where the expansion is as good."""
    q, k, v, field, degree, scale, _ = call
    group = q.shape[2] // k.shape[2]
    if group > 1:
        k, v = (t.repeat_interleave(group, dim=2) for t in (k, v))
    anchors = membership(field.layout, k.float()) @ anchors_of(to_layout(call._replace(k=k, v=v)), field)
    first, last = field.prefix, field.prefix + field.n_grid
    a = torch.cat([k[:, :first], anchors.transpose(1, 2).to(k.dtype), k[:, last:]], 1)
    return multipole_op(q, a, k - a, v, places(call), field.radius, degree, scale)[0]


def places(call: MultipoleCall) -> Tensor:
    """[3, N] int32: the place of each token along the axes of the grid, -1 for tokens that are not on it."""
    field = call.field
    index = torch.arange(call.q.shape[1], device=call.q.device) - field.prefix
    found, inside = [], (index >= 0) & (index < field.n_grid)
    for length in reversed(field.layout.grid):
        found.append(torch.where(inside, index % length, -1))
        index = index // length
    found += [torch.zeros_like(index)] * (3 - len(found))
    return torch.stack(found).int()
