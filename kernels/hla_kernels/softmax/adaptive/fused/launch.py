"""Kernel launches and buffers of a call."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ....dispatch.recording import launch
from ..layout import Field
from .backward import for_keys, for_queries, for_tiles
from .choose import choose, invert, mean_scores, summed_scores
from .forward import output
from .plan import PROGRAMS, ROWS, Plan, Tables, near_scores, tables
from .pool import outer_sum, pool, square

LOG2 = math.log(2)


class Saved(NamedTuple):
    """Tensors saved for the backward; an empty tensor stands for None.

    Rounding error of o; log2 of the denominator, and normalized weight of the first-order term [B, H, N]; mean, half
    variance and value of key tiles [B, Hk, T, D]; H' / number of tiles [B, Hk, D, D]; selected key tiles, as int8
    [B H or 1, U, T] and as a list int32 [.., k].
    """

    rest: Tensor
    lse: Tensor
    far: Tensor
    mean: Tensor
    half: Tensor
    value: Tensor
    moment: Tensor
    chosen: Tensor
    list: Tensor


class Call:
    """Arguments shared by the launches of a call."""

    def __init__(
        self, field: Field, exact: int, select: str, far: str, scale: float, q: Tensor, k: Tensor, mask: Tensor | None
    ):
        self.b, _, self.h, d = q.shape
        self.hk, self.exact, self.select, self.scale, self.mask = k.shape[2], exact, select, scale, mask
        self.variance, self.first = far != "mean", far == "first"
        self.plan, self.field, self.device = Plan(field, d), field, q.device
        self.sizes = (*self.plan.sizes, exact)
        self.groups = self.h // self.hk
        self.numbers = (scale / LOG2, scale)
        self.wide = {"D": d, "DP": self.plan.width}

    @property
    def n_tiles(self) -> tuple[int, int]:
        """Number of query tiles and of key tiles, including tiles of tokens outside the grid."""
        _, u, t, qo, ko, _ = self.sizes
        return u + qo, t + ko

    def outputs(self, q: Tensor) -> Saved:
        """Allocate the tensors saved for the backward."""
        b, h, hk, (n, u, t, _, _, k), d = self.b, self.h, self.hk, self.sizes, q.shape[3]
        rows = 1 if self.select == "near" else b * h
        half = (b, hk, t, d) if self.variance or self.select != "near" else (0,)
        empty = q.new_empty
        rest = torch.empty_like(q, memory_format=torch.contiguous_format)
        lse, far = (empty((b, h, n), dtype=torch.float32) for _ in range(2))
        return Saved(
            rest, lse, far, empty((b, hk, t, d)), empty(half), empty((b, hk, t, d)),
            empty((b, hk, d, d) if self.first else (0,)), empty((rows, u, t), dtype=torch.int8),
            empty((rows, u, k), dtype=torch.int32),
        )  # fmt: skip

    def steps(self, x: Tables, s: Saved) -> tuple[int, ...]:
        """Return the batch strides of the tables and the head strides of the selection."""
        own = [0 if self.mask is None else n for n in (x.queries[0].numel(), x.keys[0].numel(), x.logn.shape[1], 1)]
        per_head = s.chosen.shape[0] > 1 or self.b * self.h == 1
        return (*own, *(t[0].numel() if per_head else 0 for t in (s.chosen, s.list)), int(per_head))


def _strides(*tensors: Tensor) -> tuple[tuple[int, int, int], ...]:
    return tuple((x.stride(0), x.stride(1), x.stride(2)) for x in tensors)


def _some(x: Tensor) -> Tensor | None:
    return x if x.numel() else None


def forward(c: Call, q: Tensor, k: Tensor, v: Tensor, o: Tensor, s: Saved) -> None:
    """Compute o and the tensors saved for the backward."""
    x, p = tables(c.field, c.mask, c.device), c.plan
    at, t = c.steps(x, s), c.sizes[2]
    launch(
        pool, (t, c.b * c.hk),
        k, v, x.keys, s.mean, _some(s.half), s.value, *_strides(k, v), at[1], c.hk, W=c.field.k_tile, **c.wide,
        num_warps=1,
    )  # fmt: skip
    if c.first:
        found = _sums(c, v, k, x.keys, at[1], s.mean, None)
        s.moment.copy_(found / x.tiles.view(-1, 1, 1, 1))
    squared = _squared(c, q)
    _choose(c, q, squared, x, s, at)
    launch(
        output, (c.n_tiles[0], c.b * c.h),
        q, squared, k, v, x.queries, x.keys, s.mean, _some(s.half), s.value, x.logn, _some(s.moment), s.chosen, s.list,
        x.tiles, o, s.rest, s.lse, s.far, *_strides(q, squared, k, v, o), at, c.sizes, c.h, c.groups, *c.numbers,
        VARIANCE=c.variance, BQ=c.field.q_tile, KT=c.field.k_tile, BJ=p.slots, BM=p.far, **c.wide, **p.warps,
    )  # fmt: skip


def _squared(c: Call, q: Tensor) -> Tensor:
    """Return the squared queries, or q if nothing reads them."""
    if not c.variance and c.select not in ("error", "mass"):
        return q
    n, found = q.shape[1], torch.empty_like(q, memory_format=torch.contiguous_format)
    launch(
        square, (-(-n // ROWS), c.b * c.h), q, found, *_strides(q, found), n, c.h, c.scale, BN=ROWS, **c.wide,
        num_warps=4,
    )  # fmt: skip
    return found


def _choose(c: Call, q: Tensor, squared: Tensor, x: Tables, s: Saved, at: tuple[int, ...]) -> None:
    """Select the exact key tiles."""
    (_, u, t, *_), shared = c.sizes, (c.h, c.groups, *c.numbers)
    if c.select == "near":
        found = near_scores(c.field, c.device)
    else:
        found = torch.empty((c.b * c.h, u, t), dtype=torch.float32, device=c.device)
    if c.select == "mean":
        mean = q.new_empty((c.b, c.h, u, q.shape[3]))
        launch(
            pool, (u, c.b * c.h),
            q, None, x.queries, mean, None, None, *_strides(q, q), at[0], c.h, W=c.field.q_tile, **c.wide, num_warps=1,
        )  # fmt: skip
        launch(
            mean_scores, (-(-t // 64), -(-u // 64), c.b * c.h),
            mean, s.mean, s.half, x.logn, found, (at[0], at[2]), (u, t), *shared, BM=64, **c.wide, num_warps=4,
        )  # fmt: skip
    elif c.select != "near":
        launch(
            summed_scores, (u, c.b * c.h),
            q, squared, x.queries, s.mean, s.half, x.logn, found, *_strides(q, squared), (at[0], at[2]), (u, t),
            *shared[:3], ERROR=c.select == "error", BQ=c.field.q_tile, BM=c.plan.far, **c.wide, **c.plan.warps,
        )  # fmt: skip
    room = max(16, 1 << (t - 1).bit_length())
    launch(
        choose, found.shape[0] * u,
        found, s.list, s.chosen, t, c.exact, BT=room, num_warps=max(1, min(8, room // 512)),
    )  # fmt: skip


def _sums(c: Call, x: Tensor, y: Tensor, table: Tensor, at: int, mean: Tensor | None, weight: Tensor | None) -> Tensor:
    """Return the sum of x y' over the tokens of the grid, float32 [B, Hk, D, D]."""
    n, u, t, *_ = c.sizes
    w = c.field.k_tile if mean is not None else c.field.q_tile
    slots = (t if mean is not None else u) * w
    splits = max(1, min(-(-slots // (8 * ROWS)), PROGRAMS // (c.b * c.hk)))
    each = -(-slots // (splits * ROWS)) * ROWS
    groups = x.shape[2] // c.hk
    found = torch.empty((splits, c.b, c.hk, x.shape[3], x.shape[3]), dtype=torch.float32, device=c.device)
    launch(
        outer_sum, (splits, c.b * c.hk),
        x, y, table, mean, weight, found, *_strides(x, y), at, (slots, each, n), c.hk, groups, W=w, BN=ROWS, **c.wide,
        **c.plan.warps,
    )  # fmt: skip
    return found.sum(0)


def backward(
    c: Call, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, s: Saved, dq: Tensor, dk: Tensor, dv: Tensor
) -> None:
    """Compute dq, dk and dv."""
    x, p = tables(c.field, c.mask, c.device), c.plan
    at, (_, u, t, *_) = c.steps(x, s), c.sizes
    delta, more = torch.empty_like(s.lse), torch.empty_like(s.lse)
    squared = _squared(c, q)
    launch(
        for_queries, (c.n_tiles[0], c.b * c.h),
        q, squared, k, v, x.queries, x.keys, s.mean, _some(s.half), s.value, x.logn, _some(s.moment), s.chosen, s.list,
        x.tiles, s.mean.mean(2, dtype=torch.float32), o, s.rest, grad, s.lse, s.far, delta, more, dq,
        *_strides(q, squared, k, v, o, grad, dq), at, c.sizes, c.h, c.groups, *c.numbers, VARIANCE=c.variance,
        BQ=c.field.q_tile, KT=c.field.k_tile, BJ=p.slots, BM=p.far, **c.wide, **p.warps,
    )  # fmt: skip
    pooled = [torch.empty_like(s.mean, dtype=torch.float32) for _ in range(3 if c.variance else 2)]
    dmean, dvalue, dhalf = (*pooled, None)[:3]
    launch(
        for_tiles, (-(-t // p.far), c.b * c.hk),
        q, squared, x.queries, s.mean, _some(s.half), s.value, x.logn, s.chosen, grad, s.lse, delta, more, dmean, dhalf,
        dvalue, *_strides(q, squared, grad), at, c.sizes, c.hk, c.groups, *c.numbers, VARIANCE=c.variance,
        BQ=c.field.q_tile, BM=p.far, **c.wide, **p.warps,
    )  # fmt: skip
    dmoment = None
    if c.first:
        dmoment = (_sums(c, q, grad, x.queries, at[0], None, s.far) * c.scale).to(q.dtype)
    size = p.keys // c.field.k_tile
    groups, heads = -(-t // size), s.chosen.shape[0]
    readers = torch.empty((heads, groups, u), dtype=torch.int32, device=c.device)
    count = torch.empty((heads, groups), dtype=torch.int32, device=c.device)
    launch(invert, (groups, heads), s.chosen, readers, count, u, t, u * t, G=size, BU=128, num_warps=1)
    outer = -(-c.sizes[4] * c.field.k_tile // p.keys)
    launch(
        for_keys, (groups + outer, c.b * c.hk),
        q, k, v, x.queries, x.keys, readers, count, s.mean, s.value, x.logn, dmean, dhalf, dvalue, dmoment,
        grad, s.lse, delta, dk, dv, *_strides(q, k, v, grad, dk, dv), at, c.sizes, c.hk, c.groups, *c.numbers,
        BQ=c.field.q_tile, KT=c.field.k_tile, BK=p.keys, **c.wide, **p.warps,
    )  # fmt: skip
