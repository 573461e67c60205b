"""Options of a block-mixing call, and its layout: the assignment of tokens to blocks.

Blocks are balanced boxes of the grid, and one block for the prefix.

An axis of L positions is cut into m blocks: block i contains the positions floor(i L / m) .. floor((i+1) L / m) - 1, so
sizes differ by at most one, and position p lies in block ((p + 1) m - 1) // L. Blocks are numbered in raster order; if
there are prefix tokens, they form block 0.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

ORDERS = ("la", "ahla", "hla2")
MOMENTS = ("bfloat16", "float32")


class Layout(NamedTuple):
    """Grid of tokens (any number of axes, last one fastest), number of blocks along each axis, and number of prefix
    tokens before the grid."""

    grid: tuple[int, ...]
    blocks: tuple[int, ...]
    prefix: int = 0

    @property
    def n_tokens(self) -> int:
        """prefix + prod(grid)."""
        return self.prefix + math.prod(self.grid)

    @property
    def n_blocks(self) -> int:
        """M: number of blocks of the grid, plus one if there are prefix tokens."""
        return math.prod(self.blocks) + (self.prefix > 0)

    @property
    def widest(self) -> int:
        """Number of tokens of the largest block."""
        return max(self.prefix, math.prod(-(-length // m) for length, m in zip(self.grid, self.blocks, strict=True)))

    def runs(self) -> list[int]:
        """Return the first token of each block, for blocks that are contiguous, and the number of tokens."""
        length, m, row = self.grid[0], self.blocks[0], math.prod(self.grid[1:])
        return [0] * (self.prefix > 0) + [self.prefix + row * (i * length // m) for i in range(m + 1)]


class BlockOptions(NamedTuple):
    """Options of `mhla` in canonical form; tensors (mixing, mask, rotary tables) are passed separately."""

    layout: Layout
    order: str = "la"
    feature_map: str | None = "relu"
    normalize: bool = True
    causal: bool | str = False
    scale: float | None = None
    q_scale: float = 1.0
    eps: float = 1e-6
    rotary_half: bool = False
    moments: str = "bfloat16"


def block_of(position: int | Tensor, length: int, m: int) -> int | Tensor:
    """Return the block of a position on an axis that is cut into m blocks."""
    return ((position + 1) * m - 1) // length


def block_table(layout: Layout, device: torch.device | None = None) -> Tensor:
    """Return the block of each token, int64 [N]."""
    index = torch.zeros((), dtype=torch.int64, device=device)
    for length, m in zip(layout.grid, layout.blocks, strict=True):
        along = block_of(torch.arange(length, device=device), length, m)
        index = index[..., None] * m + along
    first = torch.zeros(layout.prefix, dtype=torch.int64, device=device)
    behind = 1 if layout.prefix > 0 else 0  # an int: torch.jit cannot add a bool
    return torch.cat([first, index.flatten() + behind])


def block_slots(layout: Layout, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return (tokens, places). tokens: the tokens of each block, int64 [M, W], W the size of the largest block, N in
    unused slots. places: the slot of each token, int64 [N], an index into [M * W]."""
    return slots_of(layout, 0, layout.n_tokens, device)[1:]


def slots_of(layout: Layout, start: int, n: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return the blocks that hold the n tokens from `start` on, int64 [M'], and `block_slots` of these tokens alone,
    [M', W] (n in unused slots) and [n]."""
    made = _slots_of.__wrapped__ if torch.compiler.is_exporting() else _slots_of  # no fake tensors in the cache
    return made(layout, start, n, device)


@functools.lru_cache(maxsize=64)
def _slots_of(layout: Layout, start: int, n: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    table = [0]
    for length, m in zip(layout.grid, layout.blocks, strict=True):
        table = [block * m + int(block_of(p, length, m)) for block in table for p in range(length)]
    table = [0] * layout.prefix + [block + (layout.prefix > 0) for block in table]
    slots: dict[int, list[int]] = {block: [] for block in sorted(set(table[start : start + n]))}
    for token, block in enumerate(table[start : start + n]):
        slots[block].append(token)
    width, places = max(map(len, slots.values()), default=1), [0] * n
    for row, tokens in enumerate(slots.values()):
        for column, token in enumerate(tokens):
            places[token] = row * width + column
    padded = [tokens + [n] * (width - len(tokens)) for tokens in slots.values()]
    with torch.inference_mode(False):  # the cached tables must be usable with autograd
        blocks, held, found = (torch.tensor(x, dtype=torch.int64, device=device) for x in (list(slots), padded, places))
        return blocks, held.view(len(padded), width), found
