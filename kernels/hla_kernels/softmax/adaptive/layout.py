"""Tiles of the token grid: boxes of one size, cut at the border, and tiles of the other tokens."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ...dispatch.verify import traced_as_constant

Grid = tuple[int, ...]


class Field(NamedTuple):
    """Grid, number of tokens before and after it, and maximum number of tokens per query tile and per key tile."""

    grid: Grid
    prefix: int
    suffix: int
    q_tile: int
    k_tile: int

    @property
    def n_grid(self) -> int:
        """Number of tokens on the grid."""
        return math.prod(self.grid)

    @property
    def n_outer(self) -> int:
        """Number of tokens outside the grid."""
        return self.prefix + self.suffix

    @property
    def n_tokens(self) -> int:
        """Number of all tokens."""
        return self.n_grid + self.n_outer

    @property
    def n_query_tiles(self) -> int:
        """U, the number of query tiles on the grid."""
        return math.prod(counts(self.grid, self.q_tile))

    @property
    def n_key_tiles(self) -> int:
        """T, the number of key tiles on the grid."""
        return math.prod(counts(self.grid, self.k_tile))

    def exact(self, density: float) -> int:
        """Return the number of exact key tiles per query tile: density T, rounded, at least 1."""
        return max(1, int(density * self.n_key_tiles + 0.5))


def counts(grid: Grid, size: int) -> Grid:
    """Return the number of tiles along each axis."""
    return tuple(-(-length // s) for length, s in zip(grid, box_of(grid, size), strict=True))


@traced_as_constant  # torch.compile should not trace the search
def box_of(grid: Grid, size: int) -> Grid:
    """Return the box of at most `size` tokens that cuts the grid into few and compact tiles. It minimizes the number of
    tiles times surface / volume of a box; of equal boxes, the longest along the last axes is chosen."""
    return _box_of(grid, size)


@functools.lru_cache(maxsize=256)
def _box_of(grid: Grid, size: int) -> Grid:
    def cost(box: Grid) -> tuple[float, Grid]:
        tiles = math.prod(-(-length // s) for length, s in zip(grid, box, strict=True))
        return tiles * sum(1 / s for length, s in zip(grid, box, strict=True) if length > 1), box

    return min(_boxes(grid, size), key=cost)


def _boxes(grid: Grid, size: int) -> Iterator[Grid]:
    if not grid:
        yield ()
        return
    for first in range(1, min(grid[0], size) + 1):
        for rest in _boxes(grid[1:], size // first):
            yield (first, *rest)


def tokens_of(field: Field, size: int, device: torch.device | None = None) -> Tensor:
    """Return the token in each slot of each tile, int64 [tiles, size]: tiles of the grid in raster order, each with its
    tokens in Morton order, so that consecutive ones are close; then tiles of the other tokens. Empty slots are the last
    ones of a tile and contain the number of all tokens."""
    box, n = box_of(field.grid, size), field.n_tokens
    tile = place = torch.zeros((), dtype=torch.int64, device=device)
    lengths = torch.ones((), dtype=torch.int64, device=device)  # tokens per tile
    for length, s, bits in zip(field.grid, box, _bits(box), strict=True):
        x = torch.arange(length, device=device)
        lengths = lengths[..., None] * (length - x[::s]).clamp(max=s)
        tile = tile[..., None] * -(-length // s) + x // s
        place = place[..., None] + sum((((x % s) >> i & 1) << bit for i, bit in enumerate(bits)), 0 * x)
    tile, tiles = tile.flatten(), math.prod(counts(field.grid, size))
    order = (tile * 2 ** sum(map(len, _bits(box))) + place.flatten()).argsort()
    tile = tile[order]  # now ascending
    lengths = lengths.flatten()
    slot = torch.arange(field.n_grid, device=device) - (lengths.cumsum(0) - lengths)[tile]
    first, last = (torch.arange(a, b, device=device) for a, b in ((0, field.prefix), (n - field.suffix, n)))
    outer = torch.cat([first, last])
    table = torch.full(((tiles + -(-field.n_outer // size)) * size,), n, dtype=torch.int64, device=device)
    table[tile * size + slot] = order + field.prefix
    table[tiles * size : tiles * size + field.n_outer] = outer
    return table.view(-1, size)


def _bits(box: Grid) -> list[list[int]]:
    """Return the bits of the Morton number that hold the bits of a coordinate, from the lowest, per axis of a box."""
    found: list[list[int]] = [[] for _ in box]
    for i in range(max(box).bit_length()):
        for axis in reversed(range(len(box))):
            if (box[axis] - 1) >> i:
                found[axis].append(sum(map(len, found)))
    return found


def distances(field: Field, device: torch.device | None = None) -> Tensor:
    """Return the squared distances between the centres of query and key tiles of the grid, in units of 1/4 and exact,
    float32 [U, T]."""
    found = torch.zeros(1, 1, device=device)
    boxes = zip(field.grid, box_of(field.grid, field.q_tile), box_of(field.grid, field.k_tile), strict=True)
    for length, *sizes in boxes:
        q, k = (_centres(length, s, device) for s in sizes)
        along = (q[:, None] - k).square()
        found = (found[:, None, :, None] + along[None, :, None, :]).flatten(2, 3).flatten(0, 1)
    return found


def _centres(length: int, size: int, device: torch.device | None) -> Tensor:
    """Return twice the centre of each tile along an axis."""
    first = torch.arange(0, length, size, device=device)
    return (first + (first + size).clamp(max=length) - 1).float()
