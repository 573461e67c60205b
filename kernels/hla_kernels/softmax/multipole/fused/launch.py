"""Kernel launches and buffers of a call."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ....dispatch.recording import launch
from .backward import for_blocks, for_keys, for_queries, spread
from .forward import output, pool
from .plan import Tiles, patch_of, plan_of

ROWS = 16  # tokens of a block per step of a sum
LOG2 = math.log(2)
Tokens = tuple[Tensor, Tensor, Tensor]


class Call:
    """Arguments shared by the launches of a call; `where`: grid, blocks, outer tokens."""

    def __init__(
        self, grid: Sequence[int], blocks: Sequence[int], outer: Sequence[int], radius: int, scale: float,
        shape: Sequence[int],
    ):  # fmt: skip
        b, _, self.h, d = shape
        self.plan = plan_of(grid, blocks, outer, radius, d)
        self.heads, self.where = b * self.h, (tuple(grid), tuple(blocks), tuple(outer))
        self.numbers = (radius, self.h, scale / LOG2, scale)
        self.sizes = {"D": d, "DP": self.plan.width}

    def reading(self, tiles: Tiles) -> tuple[tuple[int, int], dict[str, int]]:
        """Return (programs, keywords) of a pass that reads keys one by one."""
        p = self.plan
        constants = {"ALL": p.whole, **p.place(tiles.patch)}
        return (p.count(tiles.patch), self.heads), {**constants, **tiles.launch}

    def asking(self, tiles: Tiles) -> dict[str, int]:
        """Return the keywords of a pass over all queries. It uses the patches of `for_keys`, so that each pair of query
        and block belongs to exactly one of both passes."""
        return {**self.plan.place(self.plan.tiles.for_keys.other), **tiles.launch}


def _strides(*tensors: Tensor) -> tuple[tuple[int, int, int], ...]:
    return tuple((x.stride(0), x.stride(1), x.stride(2)) for x in tensors)


def forward(
    c: Call, tokens: Tokens, o: Tensor, top: Tensor, mean: Tensor, value: Tensor, count: Tensor, rest: Tensor
) -> None:
    """Compute o and the tensors saved for the backward."""
    q, k, v = tokens
    anchors, tiles = tuple(mean), c.plan.tiles.output
    launch(
        pool, (c.plan.n_blocks, c.heads),
        k, v, *anchors, value, count, *_strides(k, v), *c.where, c.h, **c.sizes, BW=ROWS, num_warps=1
    )  # fmt: skip
    grid, constants = c.reading(tiles)
    launch(
        output, grid,
        q, k, v, *anchors, value, count, o, rest, top, *_strides(q, k, v, o), *c.where, *c.numbers,
        **constants, BJ=tiles.other, BM=tiles.blocks,
    )  # fmt: skip


def backward(
    c: Call, grad: Tensor, tokens: Tokens, o: Tensor, top: Tensor, mean: Tensor, value: Tensor, count: Tensor,
    rest: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
) -> None:  # fmt: skip
    """Compute dq, dk and dv."""
    q, k, v = tokens
    p, anchors = c.plan, tuple(mean)
    delta, by_key, by_mean = torch.empty_like(top), torch.empty_like(dk, dtype=torch.float32), torch.empty_like(dk)
    tiles = p.tiles.for_queries
    grid, constants = c.reading(tiles)
    launch(
        for_queries, grid,
        q, k, v, *anchors, value, count, o, rest, grad, top, delta, dq, *_strides(q, k, v, o, grad, dq),
        *c.where, *c.numbers, **constants, BJ=tiles.other, BM=tiles.blocks,
    )  # fmt: skip
    d_mean = d_value = None
    if not p.whole:
        d_mean, d_value = _for_blocks(c, q, grad, anchors, value, count, top, delta)
    grid, constants = c.reading(p.tiles.for_keys)
    qt, qy, qx = patch_of(p.grid, p.tiles.for_keys.other)
    launch(
        for_keys, grid,
        q, k, v, anchors[0], count, grad, top, delta, d_value, by_key, by_mean, dv,
        *_strides(q, k, v, grad, dv), *c.where, *c.numbers, **constants, QT=qt, QY=qy, QX=qx,
    )  # fmt: skip
    launch(
        spread, (p.n_blocks + -(-p.outer // ROWS), c.heads),
        by_key, by_mean, d_mean, dk, *_strides(dk), *c.where, c.h, ALL=p.whole, **c.sizes, BW=ROWS, num_warps=1
    )  # fmt: skip


def _for_blocks(c: Call, q, grad, anchors, value, count, top, delta) -> tuple[Tensor, Tensor]:
    """Return the gradients of the mean keys and values of pooled blocks, float32."""
    tiles = c.plan.tiles.for_blocks
    rows = -(-c.plan.n_blocks // tiles.blocks)
    splits = c.plan.splits(c.heads * rows)
    found = [_parts(splits, value.shape, value) for _ in range(2)]
    launch(
        for_blocks, (rows, c.heads, splits),
        q, *anchors, value, count, grad, top, delta, *found, *_strides(q, grad), *c.where, *c.numbers, splits,
        **c.asking(tiles), BM=tiles.blocks,
    )  # fmt: skip
    return _added(found[0]), _added(found[1])


def _parts(splits: int, shape: torch.Size, like: Tensor) -> Tensor:
    return torch.empty((splits, *shape), dtype=torch.float32, device=like.device)


def _added(parts: Tensor) -> Tensor:
    return parts[0] if parts.shape[0] == 1 else parts.sum(0)
