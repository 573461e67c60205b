"""Launch plan of the causal kernels: tile sizes, warps and segments."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..fused.spec import padded

CHUNK = 64  # tokens per tile
PROGRAMS = 396  # programs of a launch, at least: three per multiprocessor of an H100
REST = torch.bfloat16  # dtype of rounding errors of outputs: with them, an output of 16 bits has 16 or more
SEGMENT = 8  # chunks of the shortest segment of a divided sequence
WALK_BLOCK = 32  # channels of values per program of a walk
WALKS = 256  # programs of a walk, at least


class Plan(NamedTuple):
    """Sizes of a launch: tokens per segment, number of segments, channels per block of the output and its blocks."""

    tokens: int
    segments: int
    block: int
    blocks: int


def in_tf32(dtype: torch.dtype) -> bool:
    """Whether products of tokens of a dtype are in TF32."""
    return dtype == torch.float32


def tile_of(width: int, *others: int) -> int:
    """Return the channels of a tile of `width`: 64 at least if an operand of `others` channels has them. With tiles of
    different widths, kernels spill, or a copy to shared memory overwrites what a product still reads."""
    return max(padded(width), min(64, padded(max(others))))


def plan(heads: int, n: int, width: int, tile: int, frame: int, many: bool) -> Plan:
    """Return the plan of a launch of `heads` (of all samples), n tokens, and outputs of `width` channels, in tiles of
    `tile`. frame: tokens per frame, each of which is a segment, or 0. many: blocks of 64 channels would have too few
    registers."""
    block = min(32 if many else 64, tile)
    blocks = -(-width // block)
    if frame:
        return Plan(frame, n // frame, block, blocks)
    chunks = -(-n // CHUNK)
    segments = -(-PROGRAMS // (heads * blocks))
    each = max(min(SEGMENT, chunks), -(-chunks // segments))
    return Plan(each * CHUNK, -(-chunks // each), block, blocks)


def together(widest: int, plain: bool) -> int:
    """Return how many terms fit into the registers of one launch; plain: without decay, extra channels and TF32."""
    return 2 if plain and widest <= 64 else 1


def warps(widest: int, many: bool, stages: int) -> dict[str, int]:
    """Return the launch options for tiles of `widest` channels; many: 4 warps would have too few registers. 8 warps
    compute products of 64 rows twice, at half the speed. stages: of the pipeline of 4 warps."""
    return {"num_warps": 8, "num_stages": 2} if widest > 64 or many else {"num_warps": 4, "num_stages": stages}


def walk_chunk(d: int) -> int:
    """Return the tokens per chunk of a walk through all stages; longer chunks would spill registers."""
    return 32 if d <= 64 else 16


def walks(
    op: str, dtype: torch.dtype, sizes: tuple[int, int, int, int], decay: bool, normalize: bool, frame: int, save: bool
) -> bool:
    """Whether all stages of a call are one walk per head: without a backward, a ratio and frames, and where that is
    faster. The stages would be divided into segments then, and the walk still occupies the GPU; a walk with an inner
    state of keys needs too many registers beyond 64 channels; two short stages without a decay are faster. op: as in
    `causal_stages`; sizes: heads of all samples, n, features, Dv; save: with a backward."""
    heads, n, d, dv = sizes
    wins = {"hla3": d <= 64, "hla2": d <= 64 and decay, "ahla": d > 64 or decay}.get(op, False)
    plain = dtype == torch.bfloat16 and not (normalize or frame or save)
    return wins and plain and heads >= walk_heads(dv) and plan(heads, n, dv, padded(dv), 0, False).segments > 1


def walk_heads(dv: int) -> int:
    """Return the least number of heads of a walk, of all samples."""
    return -(-WALKS // -(-dv // WALK_BLOCK))
