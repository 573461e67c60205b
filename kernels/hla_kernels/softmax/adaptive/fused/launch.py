"""Kernel launches and buffers of a call."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ....dispatch.recording import launch
from ..layout import Field
from ..routing import PART
from .backward import adaptive_for_keys, adaptive_for_queries, adaptive_for_tiles
from .choose import adaptive_choose, adaptive_invert, adaptive_mean_scores, adaptive_summed_scores
from .forward import adaptive_output
from .plan import PROGRAMS, ROWS, Plan, Tables
from .pool import adaptive_outer_sum, adaptive_pool, adaptive_pool_queries, adaptive_sum_rows

LOG2 = math.log(2)


class Saved(NamedTuple):
    """Tensors saved for the backward; an empty tensor stands for None.

    Rounding error of o in 16 bits; log2 of the denominator, and normalized weight of the first-order term [B, H, N];
    mean and value of key tiles [B, Hk, T, D]; H' / number of tiles [B, Hk, D, D]; selected key tiles, as int8 [B H or
    1, U, T] and as a list int32 [.., k + tiles outside the grid].
    """

    rest: Tensor
    lse: Tensor
    far: Tensor
    mean: Tensor
    value: Tensor
    moment: Tensor
    chosen: Tensor
    list: Tensor


class Call:
    """Arguments shared by the launches of a call."""

    def __init__(
        self, field: Field, exact: int, select: str, far: str, scale: float, masked: bool, q: Tensor, k: Tensor
    ):
        self.b, _, self.h, d = q.shape
        self.hk, self.exact, self.select, self.scale, self.masked = k.shape[2], exact, select, scale, masked
        self.first = far == "first"
        self.plan, self.field, self.device = Plan(field, d, q.dtype == torch.float32), field, q.device
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
        b, h, hk, (n, u, t, _, outer, k), d = self.b, self.h, self.hk, self.sizes, q.shape[3]
        rows = 1 if self.select == "near" and not self.masked else b * h
        empty = q.new_empty
        rest = empty(0) if self.plan.single else torch.empty_like(q, memory_format=torch.contiguous_format)
        lse, far = (empty((b, h, n), dtype=torch.float32) for _ in range(2))
        return Saved(
            rest, lse, far, empty((b, hk, t, d)), empty((b, hk, t, d)),
            empty((b, hk, d, d) if self.first else (0,)), empty((rows, u, t), dtype=torch.int8),
            empty((rows, u, k + outer), dtype=torch.int32),
        )  # fmt: skip

    def steps(self, x: Tables, s: Saved) -> tuple[int, ...]:
        """Return the batch strides of the tables and the head strides of the selection."""
        own = [n if self.masked else 0 for n in (x.queries[0].numel(), x.keys[0].numel(), x.logn.shape[1], 1)]
        per_head = int(s.chosen.shape[0] > 1 or self.b * self.h == 1)
        sizes = (s.chosen[0].numel(), s.list[0].numel())
        return (*own, *(per_head * n for n in sizes), per_head)


def _strides(*tensors: Tensor) -> tuple[tuple[int, int, int], ...]:
    return tuple((x.stride(0), x.stride(1), x.stride(2)) for x in tensors)


def _some(x: Tensor) -> Tensor | None:
    return x if x.numel() else None


def forward(c: Call, x: Tables, near: Tensor | None, tokens: Sequence[Tensor], o: Tensor, s: Saved) -> None:
    """Compute o and the tensors saved for the backward. near: scores of "near"."""
    q, k, v = tokens
    p, at = c.plan, c.steps(x, s)
    exact = torch.empty_like(s.mean, dtype=torch.float32) if c.first else None
    half = torch.empty_like(s.mean) if c.select in ("error", "mass") else None
    launch(
        adaptive_pool, (c.sizes[2], c.b * c.hk),
        k, v, x.keys, s.mean, exact, half, s.value, *_strides(k, v), at[1], c.hk, W=c.field.k_tile, **c.wide,
        num_warps=p.pooling,
    )  # fmt: skip
    if exact is not None:
        _sums(c, v, k, x.keys, at[1], exact, None, s.moment, x.tiles, at[3])
    _choose(c, near, q, half, x, s, at)
    launch(
        adaptive_output, (c.n_tiles[0] * p.queries["PARTS"], c.b * c.h),
        q, k, v, x.queries, x.keys, s.mean, s.value, x.logn, _some(s.moment), s.chosen, s.list, x.tiles, o,
        _some(s.rest), s.lse, s.far, *_strides(q, k, v, o), at, c.sizes, c.h, c.groups, *c.numbers, **p.queries,
        KT=c.field.k_tile, **c.wide, **p.output,
    )  # fmt: skip


def _choose(
    c: Call, near: Tensor | None, q: Tensor, half: Tensor | None, x: Tables, s: Saved, at: tuple[int, ...]
) -> None:
    """Select the exact key tiles by nearness or by scores of pooled queries. half: half the variance of key tiles,
    [B, Hk, T, D]."""
    (_, u, t, _, outer, _), shared = c.sizes, (c.h, c.groups, c.numbers[0])
    found = near
    if found is None:
        found = torch.empty((c.b * c.h, u, t), dtype=torch.float32, device=c.device)
        size = c.field.q_tile if half is None else PART
        parts = c.field.q_tile // size
        query = q.new_empty((c.b, c.h, u * parts, q.shape[3]))
        square = None if half is None else torch.empty_like(query)
        launch(
            adaptive_pool_queries, (u, c.b * c.h),
            q, x.queries, query, square, *_strides(q), at[0], (u * c.field.q_tile,), c.h, c.scale, W=size,
            BN=c.field.q_tile, **c.wide, num_warps=4,
        )  # fmt: skip
    if c.select == "mean":
        launch(
            adaptive_mean_scores, (-(-t // 64), -(-u // 64), c.b * c.h),
            query, s.mean, x.logn, found, (at[0], at[2]), (u, t), *shared, BM=64, **c.wide, num_warps=4,
        )  # fmt: skip
    elif half is not None:
        step = x.parts.shape[1] if c.masked else 0
        launch(
            adaptive_summed_scores, (-(-u * parts // c.plan.scores["BQ"]), c.b * c.h),
            query, square, x.parts, s.mean, half, x.logn, found, (step, at[2]), (u, t), *shared,
            ERROR=c.select == "error", PARTS=parts, **c.wide, **c.plan.scores,
        )  # fmt: skip
    room = max(16, 1 << (max(t, outer) - 1).bit_length())
    launch(
        adaptive_choose, s.chosen.shape[0] * u,
        found, s.list, s.chosen, found.shape[0] * u, t, c.exact, outer, BT=room, num_warps=max(1, min(8, room // 512)),
    )  # fmt: skip


def _sums(
    c: Call, x: Tensor, y: Tensor, table: Tensor, at: int, exact: Tensor | None, weight: Tensor | None, out: Tensor,
    tiles: Tensor | None, step: int = 0,
) -> None:  # fmt: skip
    """Compute out [B, Hk, D, D], the sum of x y' over the tokens of the grid, divided by `tiles` (of batch stride
    `step`) or times the scale; other arguments as in `pool.adaptive_outer_sum`."""
    n, u, t, *_ = c.sizes
    tile, slots = c.field.k_tile, t * c.field.k_tile
    if exact is None:
        slots = u * c.field.q_tile
    heads, width = c.b * c.hk, x.shape[3]
    parts = max(1, min(-(-slots // (8 * ROWS)), PROGRAMS // heads))
    each = -(-slots // (parts * ROWS)) * ROWS
    found = torch.empty((parts, heads, width, width), dtype=torch.float32, device=c.device)
    launch(
        adaptive_outer_sum, (parts, heads),
        x, y, table, exact, weight, found, *_strides(x, y), at, (slots, each, n), c.hk, x.shape[2] // c.hk, W=tile,
        BN=ROWS, **c.wide, **c.plan.sums,
    )  # fmt: skip
    rows = (parts, heads * width**2, width**2)
    _sum_rows(c, found, rows, c.scale if tiles is None else 1.0, tiles, step, out)


def _sum_rows(
    c: Call, x: Tensor, rows: tuple[int, int, int], factor: float, tiles: Tensor | None, at: int, out: Tensor
) -> None:
    """Compute out [B, Hk, ..]; rows: number of rows per key head, distance between them, and between heads; other
    arguments as in `pool.adaptive_sum_rows`."""
    heads, width = c.b * c.hk, out[0, 0].numel()
    columns = min(256, 1 << (width - 1).bit_length())
    launch(
        adaptive_sum_rows, (-(-width // columns), heads),
        x, tiles, out, at, *rows, width, c.hk, factor, BN=min(1 << (rows[0] - 1).bit_length(), 4096 // columns),
        BW=columns, num_warps=4,
    )  # fmt: skip


def backward(
    c: Call, x: Tables, grad: Tensor, tokens: Sequence[Tensor], o: Tensor, s: Saved, grads: Sequence[Tensor]
) -> None:
    """Compute the gradients of the tokens q, k, v."""
    (q, k, v), (dq, dk, dv) = tokens, grads
    p, at, (_, u, t, *_), d = c.plan, c.steps(x, s), c.sizes, q.shape[3]
    delta, more = torch.empty_like(s.lse), torch.empty_like(s.lse)
    center = torch.empty((c.b, c.hk, d), dtype=torch.float32, device=c.device)
    _sum_rows(c, s.mean, (t, d, t * d), 1 / t, None, 0, center)
    launch(
        adaptive_for_queries, (c.n_tiles[0] * p.queries["PARTS"], c.b * c.h),
        q, k, v, x.queries, x.keys, s.mean, s.value, x.logn, _some(s.moment), s.chosen, s.list, x.tiles,
        center, o, _some(s.rest), grad, s.lse, s.far, delta, more, dq,
        *_strides(q, k, v, o, grad, dq), at, c.sizes, c.h, c.groups, *c.numbers, **p.queries, KT=c.field.k_tile,
        **c.wide, **p.for_queries,
    )  # fmt: skip
    dmean, dvalue = (torch.empty_like(s.mean, dtype=torch.float32) for _ in range(2))
    launch(
        adaptive_for_tiles, (-(-t // p.for_tiles["BM"]), c.b * c.hk),
        q, x.queries, s.mean, s.value, x.logn, s.chosen, grad, s.lse, delta, more, dmean, dvalue, *_strides(q, grad),
        at, c.sizes, u * p.queries["PARTS"], c.hk, c.groups, *c.numbers, **p.queries, **c.wide, **p.for_tiles,
    )  # fmt: skip
    dmoment = None
    if c.first:
        dmoment = torch.empty_like(s.moment)
        _sums(c, q, grad, x.queries, at[0], None, s.far, dmoment, None)
    size, keys = max(1, p.for_keys["BK"] // c.field.k_tile), p.for_keys["BK"]
    groups, heads = -(-t // size), s.chosen.shape[0]
    readers = torch.empty((heads, groups, u), dtype=torch.int32, device=c.device)
    count = torch.empty((heads, groups), dtype=torch.int32, device=c.device)
    launch(adaptive_invert, (groups, heads), s.chosen, readers, count, u, t, u * t, G=size, BU=128, num_warps=1)
    launch(
        adaptive_for_keys, (sum(-(-n * c.field.k_tile // keys) for n in (t, c.sizes[4])), c.b * c.hk),
        q, k, v, x.queries, x.keys, readers, count, s.mean, s.value, x.logn, dmean, dvalue, dmoment, grad,
        s.lse, delta, dk, dv, *_strides(q, k, v, grad, dk, dv), at, c.sizes, c.hk, c.groups, *c.numbers,
        **p.queries, KT=c.field.k_tile, **c.wide, **p.for_keys,
    )  # fmt: skip
