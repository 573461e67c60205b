"""2-simplicial attention over pairs of neighbours on a token grid, a block of rows at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..options import compute_dtype

BLOCK = 2**22  # numbers of a block of windows and weights, per sample


def simplex2_window(
    q: Tensor, k1: Tensor, k2: Tensor, v1: Tensor, v2: Tensor, *, grid: Sequence[int], radius: int, scale: float,
    prefix: int = 0, suffix: int = 0, mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """2-simplicial attention over pairs of neighbours (arXiv 2507.02754, in windows along every axis of a grid).

    q [B, N, H, D], k and v [B, N, Hk, D] -> o [B, N, H, D] in the dtype of q; N = prefix + prod(grid) + suffix.

    A grid token reads the pairs (j, k) of tokens within `radius` along every axis and of the prefix and suffix tokens,
    W tokens in all: 2 N W^2 D multiplications per head. A prefix or suffix token reads the pairs of any token j and a
    prefix or suffix token k. mask: [B, N], True for tokens that are read; other outputs are zero.

    Eager calls keep the inputs and one block of rows, forward and backward: the weights of a block are computed again.
    """
    n, groups = math.prod(grid), q.shape[2] // k1.shape[2]
    tokens = [q, *(t.repeat_interleave(groups, dim=2) for t in (k1, k2, v1, v2))]
    tokens = [t.to(compute_dtype(q.dtype)) for t in tokens]
    live = torch.ones_like(q[:, :, 0, 0], dtype=torch.bool) if mask is None else mask
    outer = [torch.cat([t[:, :prefix], t[:, prefix + n :]], 1) for t in (*tokens, live)]
    sides = [side for side in grid if side > 1] or [1]  # along the others, windows would hold only masked tokens
    inner = [t[:, prefix : prefix + n].unflatten(1, sides) for t in (*tokens, live)]
    o = _by_rows(inner, outer[1:], radius, scale).flatten(1, len(sides))
    if prefix + suffix:
        first, last = _outside([*tokens, live], outer, scale).split([prefix, suffix], 1)
        o = torch.cat([first, o, last], 1)
    return (o if mask is None else o.where(mask[:, :, None, None], 0)).to(q.dtype)


def _by_rows(inner: list[Tensor], outer: list[Tensor], radius: int, scale: float) -> Tensor:
    """Return o of the grid tokens [B, rows, .., H, D], in blocks along the first axis."""
    q, border = inner[0], (radius, radius) * (inner[0].ndim - 3)
    padded = [*(F.pad(t, (0, 0, 0, 0, *border)) for t in inner[1:-1]), F.pad(inner[-1], border)]
    window = (2 * radius + 1) ** (q.ndim - 3) + outer[-1].shape[1]
    rows = max(1, BLOCK // (math.prod(q.shape[2:-1]) * window * (window + 4 * q.shape[-1])))
    if torch.compiler.is_compiling():  # the compiler chooses what to keep
        return _Rows.forward(None, rows, radius, scale, q, *padded, *outer)
    return _Rows.apply(rows, radius, scale, q, *padded, *outer)


class _Rows(torch.autograd.Function):
    """All blocks of rows. The gradient of one block at a time is added to the gradients of its slices."""

    @staticmethod
    def forward(ctx: Any, rows: int, radius: int, scale: float, *tensors: Tensor) -> Tensor:
        if ctx is not None:
            ctx.save_for_backward(*tensors)
            ctx.settings = rows, radius, scale
        n = tensors[0].shape[1]
        return torch.cat([_attend_rows(_slices(tensors, i, rows, radius), radius, scale) for i in range(0, n, rows)], 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, radius, scale = ctx.settings
        tensors = ctx.saved_tensors
        totals = [torch.zeros_like(t) for t in tensors]
        for i in range(0, tensors[0].shape[1], rows):
            leaves = [t.detach().requires_grad_(t.dtype != torch.bool) for t in _slices(tensors, i, rows, radius)]
            with torch.enable_grad():
                o = _attend_rows(leaves, radius, scale)
            found = torch.autograd.grad(o, [t for t in leaves if t.requires_grad], grad[:, i : i + rows])
            places = (t for t in _slices(totals, i, rows, radius) if t.dtype != torch.bool)
            for place, part in zip(places, found, strict=True):
                place += part
        return None, None, None, *(None if t.dtype == torch.bool else t for t in totals)


def _slices(tensors: Sequence[Tensor], start: int, rows: int, radius: int) -> list[Tensor]:
    """Views of rows of the queries, of these rows with their border for keys, values and mask, and the outer tokens."""
    q, *padded = tensors[:6]
    end = start + rows
    return [q[:, start:end], *(t[:, start : end + 2 * radius] for t in padded), *tensors[6:]]


def _attend_rows(tensors: Sequence[Tensor], radius: int, scale: float) -> Tensor:
    """Attend from rows q [B, rows, .., H, D] to keys and values [B, rows + 2 radius, .., H, D] and outer tokens."""
    q, around, outer = tensors[0], tensors[1:6], tensors[6:]
    axes = q.ndim - 3

    def windows(t: Tensor, outside: Tensor) -> Tensor:
        for axis in range(axes):
            t = t.unfold(1 + axis, 2 * radius + 1, 1)
        t, outside = t.flatten(-axes), outside.movedim(1, -1)[(slice(None), *[None] * axes)]
        return torch.cat([t, outside.expand(*t.shape[:-1], -1)], -1)  # [B, rows, .., H, D, W]

    k1, k2, v1, v2, seen = (windows(t, o) for t, o in zip(around, outer, strict=True))
    seen = seen[..., None, :]
    return _attend(q, (k1, v1, seen), (k2, v2, seen), scale)


def _outside(tokens: list[Tensor], outer: list[Tensor], scale: float) -> Tensor:
    """Return o [B, P, H, D] of the P outer tokens; both lists are q, k1, k2, v1, v2 and the mask."""
    k1, v1 = (tokens[i].movedim(1, -1)[:, None] for i in (1, 3))  # [B, 1, H, D, N]
    k2, v2 = (outer[i].movedim(1, -1)[:, None] for i in (2, 4))  # [B, 1, H, D, P]
    seen1, seen2 = (t[5][:, None, None] for t in (tokens, outer))
    return _attend(outer[0], (k1, v1, seen1), (k2, v2, seen2), scale)


def _attend(q: Tensor, first: tuple[Tensor, ...], second: tuple[Tensor, ...], scale: float) -> Tensor:
    """Attend from q [.., D] to the pairs of J and K tokens, with k, v [.., D, J] or [.., D, K] and their masks."""
    (k1, v1, seen1), (k2, v2, seen2) = first, second
    with torch.autocast(q.device.type, enabled=False):
        s = (scale * q[..., None] * k1).mT @ k2
        s = s.masked_fill(~(seen1[..., :, None] & seen2[..., None, :]), torch.finfo(s.dtype).min)
        p = s.flatten(-2).softmax(-1).view_as(s)
        return (v1 * (v2 @ p.mT)).sum(-1)
