"""Tiles of rows, one row per token and head, for kernels that read every row once.

A row is read in parts of W channels: W is a power of two, and its lanes are as few as possible.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

WIDTHS = (64, 32, 16)  # of a part in channels
WARPS = 4


@triton.jit
def rows_of(tile, N, H: tl.constexpr, BT: tl.constexpr):
    """Return (sample, tokens [BT], heads [BT]) of rows of one sample, places in a contiguous tensor and whether they
    exist."""
    tiles = tl.cdiv(N * H, BT)
    row = tile % tiles * BT + tl.arange(0, BT)
    b = (tile // tiles).to(tl.int64)
    return (b, row // H, row % H), b * (N * H) + row, row < N * H


@triton.jit
def starts(at, row, ALIGN: tl.constexpr):
    """Return the offsets [BT] of rows (sample, token, head) of a tensor; at: its `spec.strides` in ALIGN elements."""
    b, n, h = row
    return (b * (at[0] // 2) + n.to(tl.int64) * at[1] + h.to(tl.int64) * (at[2] // 2)) * ALIGN


@triton.jit
def part(start, keep, i: tl.constexpr, D: tl.constexpr, W: tl.constexpr):
    """Return the offsets [BT, W] of channels i .. i + W - 1 of rows, and whether they exist."""
    c = i + tl.arange(0, W)[None, :]
    return start[:, None] + c, keep[:, None] & (c < D)


def grid(x: Tensor, registers: bool = False) -> tuple[int, dict[str, int]]:
    """Return the number of tiles of x [B, N, H, D] and their constants. A thread has 8 channels of each part, or 4 of
    more than two parts if many `registers` are needed."""
    b, n, h, d = x.shape
    width = min((w for w in WIDTHS if 2 * w <= max(d, 32)), key=lambda w: -d % w)
    each = 4 if registers and d > 2 * width else 8
    rows = WARPS * 32 * each // width
    return b * math.ceil(n * h / rows), {"D": d, "W": width, "BT": rows, "num_warps": WARPS}


def inner(x: Tensor) -> Tensor:
    """Return x with contiguous channels."""
    return x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()
