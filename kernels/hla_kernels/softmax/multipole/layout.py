"""Where the tokens lie: blocks of the grid, the slots of their tokens, and what is near.

All tables are arithmetic on ranges, so torch.compile can trace them for any grid. An axis of L positions is cut into m
blocks as in `blockmix.layout`. A block has W slots along the axis; the last ones are empty in a narrower block.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ...blockmix.layout import Layout, block_table
from ..heads import Heads


class Field(NamedTuple):
    """Grid cut into blocks (`blocks.prefix` is 0), number of tokens before and after it, and radius of the near
    field."""

    layout: Layout
    prefix: int
    suffix: int
    radius: int

    @property
    def n_grid(self) -> int:
        """Number of tokens on the grid."""
        return self.layout.n_tokens

    @property
    def n_outer(self) -> int:
        """Number of tokens outside the grid."""
        return self.prefix + self.suffix


class Slots(NamedTuple):
    """Tokens of the grid by blocks; N in unused slots.

    tokens: [M, W], the token in each slot.  places: [N], the slot of each token, an index into [M * W].
    halo: [M, V], the tokens of each block and all tokens near to one of them.  near: [M, W, V] bool, whether a token of
    the halo is near to the token of a slot.
    """

    tokens: Tensor
    places: Tensor
    halo: Tensor
    near: Tensor


def membership(layout: Layout, like: Tensor) -> Tensor:
    """Return the membership of tokens in blocks, 0 or 1, [N, M]."""
    blocks = block_table(layout, like.device)
    return (blocks[:, None] == torch.arange(layout.n_blocks, device=like.device)).to(like.dtype)


def sizes(x: Heads, field: Field) -> tuple[Tensor, Tensor]:
    """Return (membership of each token in the blocks [.., N, M], number of real tokens per block [.., M, 1])."""
    weight = membership(field.layout, x.k)
    if x.live is not None:
        weight = weight * x.live.narrow(-2, field.prefix, field.n_grid)
    return weight, weight.sum(-2)[..., None]


def anchors_of(x: Heads, field: Field) -> Tensor:
    """Return the mean key of each block, [B, H, M, D]; 0 for blocks without a real token."""
    weight, n = sizes(x, field)
    return (weight.mT @ x.k.narrow(-2, field.prefix, field.n_grid)) / n.clamp(min=1)


def near(grid: tuple[int, ...], radius: int, rows: Tensor, columns: Tensor) -> Tensor:
    """Return which pairs of tokens of the grid, given by their numbers, differ by at most `radius` along every axis,
    [I, J] bool."""
    found = torch.ones(1, 1, dtype=torch.bool, device=rows.device)
    for length in reversed(grid):
        found = found & ((rows[:, None] % length - columns % length).abs() <= radius)
        rows, columns = rows // length, columns // length
    return found


def slots(layout: Layout, radius: int, device: torch.device) -> Slots:
    """Return the tables of a grid."""
    tokens = halo = torch.zeros(1, 1, dtype=torch.int64, device=device)
    block = slot = torch.zeros(1, dtype=torch.int64, device=device)
    pairs = torch.ones(1, 1, 1, dtype=torch.bool, device=device)
    kept, there = torch.ones_like(tokens, dtype=torch.bool), torch.ones_like(halo, dtype=torch.bool)
    for length, m in zip(layout.grid, layout.blocks, strict=True):
        index, width = torch.arange(m + 1, device=device) * length // m, -(-length // m)
        first, last = index[:-1, None], index[1:, None]
        reach = min(radius, length - 1)
        own = first + torch.arange(width, device=device)
        around = first - reach + torch.arange(width + 2 * reach, device=device)
        tokens = _outer(tokens * length, own, torch.add)
        kept = _outer(kept, own < last, torch.logical_and)
        halo = _outer(halo * length, around, torch.add)
        there = _outer(there, (around >= 0) & (around < length), torch.logical_and)
        pairs = _outer(pairs, (own[:, :, None] - around[:, None]).abs() <= reach, torch.logical_and)
        x = torch.arange(length, device=device)
        along = ((x + 1) * m - 1) // length
        block = (block[:, None] * m + along).flatten()
        slot = (slot[:, None] * width + (x - index[along])).flatten()
    n = math.prod(layout.grid)
    places = block * tokens.shape[1] + slot
    return Slots(tokens.where(kept, n), places, halo.where(there, n), pairs & there[:, None])


def _outer(a: Tensor, b: Tensor, combine) -> Tensor:
    """Combine all pairs: [I, J, ..] and [K, L, ..] -> [I K, J L, ..], with the axes of b fastest."""
    for axis in range(a.dim()):
        a, b = a.unsqueeze(2 * axis + 1), b.unsqueeze(2 * axis)
    pairs = combine(a, b)
    sizes = [x * y for x, y in zip(pairs.shape[::2], pairs.shape[1::2], strict=True)]
    return pairs.reshape(sizes)
