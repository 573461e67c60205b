"""Launch plan of a call: patches of queries and keys, pooling of far blocks, tiles and warps."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

from ....blockmix.layout import block_of

Sizes = tuple[int, ...]  # sizes along the axes (T, Y, X)
MARGIN = 2  # factor between estimated costs from which pooling is used
PROGRAMS = 264  # minimum number of programs of passes over blocks, two per multiprocessor of an H200


class Tiles(NamedTuple):
    """Tokens per patch, keys per step, blocks per step; launch options."""

    patch: int
    other: int
    blocks: int
    num_warps: int
    num_stages: int = 2

    @property
    def launch(self) -> dict[str, int]:
        """Return the keywords of a launch."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


class Pass(NamedTuple):
    """Tiles of every pass. `for_blocks` (pooled pairs of query and key) and `for_keys` (all other pairs) use the same
    patches of queries."""

    output: Tiles
    for_queries: Tiles
    for_blocks: Tiles
    for_keys: Tiles


NARROW = Pass(
    Tiles(64, 64, 64, 4), Tiles(64, 64, 64, 4), Tiles(32, 0, 64, 4), Tiles(64, 32, 0, 4)
)  # fmt: skip
WIDE = Pass(
    Tiles(64, 64, 64, 8), Tiles(64, 32, 32, 8), Tiles(32, 0, 64, 8), Tiles(64, 32, 0, 8)
)  # fmt: skip


class Plan(NamedTuple):
    """Plan for a grid of three axes and the tokens outside it; `whole`: every key is read, and no block is pooled."""

    grid: Sizes
    blocks: Sizes
    outer: int
    radius: int
    channels: int
    whole: bool
    tiles: Pass

    @property
    def width(self) -> int:
        """Channels of a tile, a power of two."""
        return max(16, 1 << (self.channels - 1).bit_length())

    @property
    def n_blocks(self) -> int:
        """M, the number of blocks."""
        return math.prod(self.blocks)

    def count(self, tokens: int) -> int:
        """Return the number of patches of all tokens; patches on the grid come first."""
        patch = patch_of(self.grid, tokens)
        cut = math.prod(-(-length // size) for length, size in zip(self.grid, patch, strict=True))
        return cut + -(-self.outer // tokens)

    def place(self, tokens: int) -> dict[str, int]:
        """Return the constants of passes over patches."""
        names = dict(zip(("PT", "PY", "PX"), patch_of(self.grid, tokens), strict=True))
        return {"D": self.channels, "DP": self.width, **names}

    def pairs(self, tokens: int) -> int:
        """Return the number of pairs of query and key that are not pooled, for patches of `tokens` tokens."""
        n = math.prod(self.grid) + self.outer
        if self.whole:
            return n * n
        sizes = zip(self.grid, self.blocks, patch_of(self.grid, tokens), strict=True)
        near = math.prod(_along(length, m, size, self.radius) for length, m, size in sizes)
        return near + self.outer * (2 * n - self.outer)

    def splits(self, programs: int) -> int:
        """Return the number of parts of the queries that gives enough programs."""
        return max(1, min(16, PROGRAMS // programs))


def _along(length: int, m: int, size: int, radius: int) -> int:
    """Return the number of these pairs along an axis."""
    total = 0
    for first in range(0, length, size):
        ends = max(first - radius, 0), min(first + size - 1 + radius, length - 1)
        lowest, highest = (int(block_of(x, length, m)) for x in ends)
        total += min(size, length - first) * ((highest + 1) * length // m - lowest * length // m)
    return total


def patch_of(grid: Sequence[int], tokens: int) -> Sizes:
    """Return a box of `tokens` tokens, a power of two, as close to a cube as the grid allows."""
    sizes = [1, 1, 1]
    while math.prod(sizes) < tokens:
        room = [i for i in range(3) if sizes[i] < grid[i]] or [2]
        axis = min(room, key=lambda i: (sizes[i], -i))
        sizes[axis] *= 2
    return sizes[0], sizes[1], sizes[2]


def plan_of(grid: Sequence[int], blocks: Sequence[int], outer: Sequence[int], radius: int, channels: int) -> Plan:
    """Return the plan of a call; arguments must be plain numbers, which torch.compile treats as constants."""
    rest = (int(x) for x in (sum(outer), radius, channels))
    return _plan(tuple(map(int, grid)), tuple(map(int, blocks)), *rest)


@functools.lru_cache(maxsize=256)
def _plan(grid: Sizes, blocks: Sizes, outer: int, radius: int, channels: int) -> Plan:
    tiles = NARROW if channels <= 64 else WIDE
    plan = Plan(grid, blocks, outer, radius, channels, False, tiles)
    return plan._replace(whole=not pools(plan))


def pools(plan: Plan) -> bool:
    """Whether to pool far blocks: if that reduces the products of the forward by more than a margin."""
    n = math.prod(plan.grid)
    return MARGIN * (plan.pairs(plan.tiles.output.patch) + plan.n_blocks * n) < (n + plan.outer) ** 2
