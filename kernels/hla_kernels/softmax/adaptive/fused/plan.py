"""Launch plan of a call: tile sizes, warps and tables of tokens."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from ..layout import Field, distances, tokens_of
from ..routing import PART

ROWS = 64  # tokens, or pooled queries, per step or program of the other passes
KEYS = 16  # keys per program of `adaptive_for_keys`, unless key tiles are larger
PROGRAMS = 264  # two per multiprocessor of an H200
LEAST = 16  # minimum size of an axis in a product


class Plan(NamedTuple):
    """Tile sizes of the passes; d: number of channels; single: whether tokens are float32.

    Float32 has smaller tiles, since its products keep tails or addresses of operands in registers (`tiles.in_tf32`).
    """

    field: Field
    d: int
    single: bool

    @property
    def width(self) -> int:
        """Channels of a tile, a power of two."""
        return max(LEAST, 1 << (self.d - 1).bit_length())

    @property
    def small(self) -> bool:
        """Whether 4 warps have the registers for tiles of 64 rows. Products of 64 rows are computed twice by 8."""
        return self.width <= 64

    @property
    def warps(self) -> int:
        """Warps of the passes over query tiles and far tiles."""
        return 8 if self.single and not self.small else 4

    @property
    def queries(self) -> dict[str, int]:
        """Queries per program or step, and the number of such parts of a query tile."""
        rows = (32 if self.small else 16) if self.single else self.field.q_tile
        return {"BQ": rows, "PARTS": self.field.q_tile // rows}

    @property
    def pooling(self) -> int:
        """Warps of `adaptive_pool`; several have to exchange their sums."""
        return max(1, self.field.k_tile * self.width // 4096)

    @property
    def sums(self) -> dict[str, int]:
        """Launch options of D x D sums."""
        return {"num_warps": 4 if self.small else 8, "num_stages": 1 if self.single else 2}

    @property
    def scores(self) -> dict[str, int]:
        """Launch options of `adaptive_summed_scores`; BQ pooled queries per program, BM key tiles per step."""
        return {"BQ": ROWS * 4 // self.warps, "BM": 64, "num_warps": self.warps, "num_stages": 2}

    @property
    def output(self) -> dict[str, int]:
        """Launch options of `adaptive_output`; BM far tiles and BJ slots are read per step. With 3 stages, keys are
        loaded while others are computed with."""
        shallow = self.single or not self.small
        slots = 32 if self.single else 64
        return {"BM": 32, "BJ": slots, "num_warps": self.warps, "num_stages": 2 if shallow else 3}

    @property
    def for_queries(self) -> dict[str, int]:
        """Launch options of `adaptive_for_queries`, as of `adaptive_output`; 64 slots spill with more than 64
        channels."""
        if self.small:
            return {**self.output, "BM": 16 if self.single else 32}
        return {**self.output, "BJ": 32, "num_stages": 2}

    @property
    def for_tiles(self) -> dict[str, int]:
        """Launch options of `adaptive_for_tiles`; BM far tiles per program."""
        tiles = 64 if self.small else 32
        if self.single:
            tiles = 16 if self.small else 32
        return {"BM": tiles, "num_warps": self.warps, "num_stages": 2 if self.small or self.single else 3}

    @property
    def for_keys(self) -> dict[str, int]:
        """Launch options of `adaptive_for_keys`; BK slots per program."""
        keys = max(KEYS, self.field.k_tile)
        if self.single:
            return {"BK": KEYS, "num_warps": self.warps, "num_stages": 2}
        return {"BK": keys, "num_warps": 8 if self.width * keys > 4096 else 4, "num_stages": 3 if keys == KEYS else 2}

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of tokens, of query tiles and key tiles on the grid, and of tiles outside it."""
        f = self.field
        q, k = (-(-f.n_outer // n) for n in (f.q_tile, f.k_tile))
        return f.n_tokens, f.n_query_tiles, f.n_key_tiles, q, k


class Tables(NamedTuple):
    """Tokens of query tiles and of key tiles, int32 [B or 1, tiles, slots], -1 for none; number of queries of each part
    of a query tile of the grid [B or 1, U parts]; log2 of the number of tokens per key tile of the grid [B or 1, T];
    number of tiles with a token [B or 1]."""

    queries: Tensor
    keys: Tensor
    parts: Tensor
    logn: Tensor
    tiles: Tensor


def tables(field: Field, mask: Tensor | None, device: torch.device) -> Tables:
    """Return the tables of a call; padded tokens are omitted."""
    kept = _tables(field, device)
    if mask is None:
        return kept
    queries, keys = (_masked(t[0], mask) for t in kept[:2])
    return Tables(queries, keys, *_sizes(queries, keys, field))


def _masked(table: Tensor, mask: Tensor) -> Tensor:
    return table.where((table >= 0) & mask[:, table.clamp(min=0)], -1)


def _sizes(queries: Tensor, keys: Tensor, field: Field) -> tuple[Tensor, Tensor, Tensor]:
    parts = (queries[:, : field.n_query_tiles] >= 0).unflatten(-1, (-1, PART)).sum(-1).flatten(1)
    n = (keys[:, : field.n_key_tiles] >= 0).sum(-1)
    return parts.float(), n.float().log2(), (n > 0).sum(-1).clamp(min=1).float()


@functools.lru_cache(maxsize=64)
def _tables(field: Field, device: torch.device) -> Tables:
    with torch.inference_mode(False):  # the cached tables must be usable with autograd
        each = [tokens_of(field, size, device) for size in (field.q_tile, field.k_tile)]
        queries, keys = (t.where(t < field.n_tokens, -1).int()[None] for t in each)
        return Tables(queries, keys, *_sizes(queries, keys, field))


@functools.lru_cache(maxsize=64)
def near_scores(field: Field, device: torch.device) -> Tensor:
    """Return the scores of "near", [1, U, T]."""
    with torch.inference_mode(False):
        return -distances(field, device)[None]
