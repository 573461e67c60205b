"""How a call is cut: patches of queries and keys, whether far blocks are pooled, tiles and warps."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

from ....blockmix.layout import block_of

Sizes = tuple[int, ...]  # along the axes (T, Y, X)
MARGIN = 2  # of estimated costs
PROGRAMS = 264  # of passes over blocks at least, two for each multiprocessor of an H200


class Tiles(NamedTuple):
    """Tokens of a patch, of what it reads at a time, of blocks at a time; launch options."""

    patch: int
    other: int
    blocks: int
    num_warps: int
    num_stages: int = 2

    @property
    def launch(self) -> dict[str, int]:
        """Keywords of a launch."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


class Pass(NamedTuple):
    """The tiles of every pass. A pair of query and key is pooled in `for_blocks` or not in `for_keys`: their queries
    come in the same patches."""

    output: Tiles
    for_queries: Tiles
    for_blocks: Tiles
    for_keys: Tiles
    for_moments: Tiles
    of_moments: Tiles


NARROW = Pass(
    Tiles(64, 64, 64, 4), Tiles(64, 64, 64, 4), Tiles(32, 0, 64, 4), Tiles(64, 32, 0, 4), Tiles(32, 0, 1, 4),
    Tiles(0, 32, 1, 4),
)  # fmt: skip
WIDE = Pass(
    Tiles(64, 64, 64, 8), Tiles(64, 32, 32, 8), Tiles(32, 0, 64, 8), Tiles(64, 32, 0, 8), Tiles(32, 0, 1, 8),
    Tiles(0, 32, 1, 8),
)  # fmt: skip


class Plan(NamedTuple):
    """A grid of three axes and the tokens that are not on it; `whole`: every key is read, no block is pooled."""

    grid: Sizes
    blocks: Sizes
    outer: int
    radius: int
    degree: int
    channels: int
    whole: bool
    tiles: Pass

    @property
    def width(self) -> int:
        """Channels of a tile."""
        return max(16, 1 << (self.channels - 1).bit_length())

    @property
    def n_blocks(self) -> int:
        """M."""
        return math.prod(self.blocks)

    @property
    def moments(self) -> bool:
        """Whether pooled blocks have moments."""
        return self.degree == 1 and not self.whole

    def count(self, tokens: int) -> int:
        """Patches of all tokens, those of the grid first."""
        patch = patch_of(self.grid, tokens)
        cut = math.prod(-(-length // size) for length, size in zip(self.grid, patch, strict=True))
        return cut + -(-self.outer // tokens)

    def place(self, tokens: int) -> dict[str, int]:
        """Constants of all passes over patches."""
        names = dict(zip(("PT", "PY", "PX"), patch_of(self.grid, tokens), strict=True))
        return {"D": self.channels, "DP": self.width, **names}

    def pairs(self, tokens: int) -> int:
        """Pairs of a query in patches of so many tokens and a key that it reads one by one."""
        n = math.prod(self.grid) + self.outer
        if self.whole:
            return n * n
        sizes = zip(self.grid, self.blocks, patch_of(self.grid, tokens), strict=True)
        near = math.prod(_along(length, m, size, self.radius) for length, m, size in sizes)
        return near + self.outer * (2 * n - self.outer)

    def splits(self, programs: int) -> int:
        """Parts of the queries, so that there are enough programs."""
        return max(1, min(16, PROGRAMS // programs))


def _along(length: int, m: int, size: int, radius: int) -> int:
    """These pairs along an axis."""
    total = 0
    for first in range(0, length, size):
        ends = max(first - radius, 0), min(first + size - 1 + radius, length - 1)
        lowest, highest = (int(block_of(x, length, m)) for x in ends)
        total += min(size, length - first) * ((highest + 1) * length // m - lowest * length // m)
    return total


def patch_of(grid: Sequence[int], tokens: int) -> Sizes:
    """A box of so many tokens, a power of two, as near to a cube as the grid has room for."""
    sizes = [1, 1, 1]
    while math.prod(sizes) < tokens:
        room = [i for i in range(3) if sizes[i] < grid[i]] or [2]
        axis = min(room, key=lambda i: (sizes[i], -i))
        sizes[axis] *= 2
    return sizes[0], sizes[1], sizes[2]


def plan_of(
    grid: Sequence[int], blocks: Sequence[int], outer: Sequence[int], radius: int, degree: int, channels: int
) -> Plan:
    """The plan of a call; what it depends on must be plain numbers, which a compiler then takes for constants."""
    rest = (int(x) for x in (sum(outer), radius, degree, channels))
    return _plan(tuple(map(int, grid)), tuple(map(int, blocks)), *rest)


@functools.lru_cache(maxsize=256)
def _plan(grid: Sizes, blocks: Sizes, outer: int, radius: int, degree: int, channels: int) -> Plan:
    tiles = NARROW if channels <= 64 else WIDE
    plan = Plan(grid, blocks, outer, radius, degree, channels, False, tiles)
    return plan._replace(whole=not pools(plan))


def pools(plan: Plan) -> bool:
    """Whether to pool far blocks: fewer products of D channels then, of the forward pass, by a margin."""
    n, each = math.prod(plan.grid), 3 + plan.degree * plan.channels
    products = 3 * plan.pairs(plan.tiles.output.patch) + each * plan.n_blocks * n
    return plan.degree < 2 and MARGIN * products < 3 * (n + plan.outer) ** 2
