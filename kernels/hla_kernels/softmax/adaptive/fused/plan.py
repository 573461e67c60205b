"""How a call is cut: slots that are read at a time, warps, and the tables of tokens."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from ..layout import Field, distances, tokens_of

SLOTS = 64  # keys of the exact part at a time
ROWS = 64  # tokens of D x D sums at a time
PROGRAMS = 264  # two for each multiprocessor of an H200
LEAST = 16  # of a product


class Plan(NamedTuple):
    """Tiles of the passes. d: channels; keys: slots of a program of `for_keys`; far: key tiles at a time."""

    field: Field
    d: int

    @property
    def width(self) -> int:
        """Channels of a tile."""
        return max(LEAST, 1 << (self.d - 1).bit_length())

    @property
    def warps(self) -> dict[str, int]:
        """Launch options of all passes but those that pool and choose."""
        return {"num_warps": 4 if self.width <= 64 else 8, "num_stages": 2}

    @property
    def slots(self) -> int:
        """Slots that queries read at a time."""
        return max(SLOTS, self.field.k_tile)

    @property
    def far(self) -> int:
        """Far tiles that queries read at a time."""
        return 64 if self.width <= 64 else 32

    @property
    def keys(self) -> int:
        """Slots of a program for the gradients of keys."""
        return max(LEAST, self.field.k_tile)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Tokens, query tiles, key tiles of the grid, those beside it."""
        f = self.field
        q, k = (-(-f.n_outer // n) for n in (f.q_tile, f.k_tile))
        return f.n_tokens, f.n_query_tiles, f.n_key_tiles, q, k


class Tables(NamedTuple):
    """Tokens of query and of key tiles, int32 [B or 1, tiles, slots], -1 for none; logarithm (2) of the number of
    tokens of each key tile of the grid [B or 1, T]; number of tiles with a token [B or 1]."""

    queries: Tensor
    keys: Tensor
    logn: Tensor
    tiles: Tensor


def tables(field: Field, mask: Tensor | None, device: torch.device) -> Tables:
    """Those of a call; padded tokens are none."""
    kept = _tables(field, device)
    if mask is None:
        return kept
    queries, keys = (_masked(t[0], mask) for t in kept[:2])
    return Tables(queries, keys, *_sizes(keys, field))


def _masked(table: Tensor, mask: Tensor) -> Tensor:
    return table.where((table >= 0) & mask[:, table.clamp(min=0)], -1)


def _sizes(keys: Tensor, field: Field) -> tuple[Tensor, Tensor]:
    n = (keys[:, : field.n_key_tiles] >= 0).sum(-1)
    return n.float().log2(), (n > 0).sum(-1).clamp(min=1).float()


@functools.lru_cache(maxsize=64)
def _tables(field: Field, device: torch.device) -> Tables:
    with torch.inference_mode(False):  # or autograd could not use what a call without gradients leaves here
        each = [tokens_of(field, size, device) for size in (field.q_tile, field.k_tile)]
        queries, keys = (t.where(t < field.n_tokens, -1).int()[None] for t in each)
        return Tables(queries, keys, *_sizes(keys, field))


@functools.lru_cache(maxsize=64)
def near_scores(field: Field, device: torch.device) -> Tensor:
    """Scores of "near", [1, U, T]."""
    with torch.inference_mode(False):
        return -distances(field, device)[None]
