"""Pooling of key tiles, squared queries, and D x D sums over tokens."""

import triton
import triton.language as tl

from ...rows import load, store
from .tiles import FREE, added, get, head_of, put, squares


@triton.jit(do_not_specialize=FREE)
def pool(
    K, V, TOKENS, MEAN, HALF, VALUE, ks, vs, at, heads,
    W: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Compute MEAN, HALF (half the variance) and VALUE [B Hk, T, D] of each tile; zeros for a tile without tokens. V,
    VALUE and HALF may be None. at: batch stride of TOKENS."""
    tile, bh = tl.program_id(0), tl.program_id(1)
    b, h = bh // heads, bh % heads
    row = tl.load(TOKENS + b.to(tl.int64) * at + tile * W + tl.arange(0, W))
    there = row >= 0
    n = tl.maximum(tl.sum(there.to(tl.float32), 0), 1.0)
    d = tl.arange(0, DP)
    place = (bh.to(tl.int64) * tl.num_programs(0) + tile) * D + d
    k = get(head_of(K, ks, b, h), row, ks, there, D, DP).to(tl.float32)
    mean = tl.sum(k, 0) / n
    tl.store(MEAN + place, mean.to(MEAN.dtype.element_ty), d < D)
    if HALF is not None:
        rest = tl.where(there[:, None], k - mean[None, :], 0.0)
        tl.store(HALF + place, (0.5 * tl.sum(rest * rest, 0) / n).to(HALF.dtype.element_ty), d < D)
    if V is not None:
        v = get(head_of(V, vs, b, h), row, vs, there, D, DP).to(tl.float32)
        tl.store(VALUE + place, (tl.sum(v, 0) / n).to(VALUE.dtype.element_ty), d < D)


@triton.jit(do_not_specialize=[*FREE, "N"])
def square(Q, Q2, qs, q2s, N, heads, scale, D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr):
    """Compute Q2 = (scale Q)^2 of BN tokens."""
    row, bh = tl.program_id(0) * BN + tl.arange(0, BN), tl.program_id(1)
    b, h = bh // heads, bh % heads
    q = get(head_of(Q, qs, b, h), row, qs, row < N, D, DP)
    put(head_of(Q2, q2s, b, h), row, q2s, row < N, squares(q, scale), D, DP)


@triton.jit(do_not_specialize=FREE)
def outer_sum(
    X, Y, TOKENS, MEAN, WEIGHT, OUT, qs, ks, at, sizes, heads, groups,
    W: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Sum x y' over a part of the tokens of the grid into OUT [splits, B Hk, D, D].

    y is centred by the mean of its tile (MEAN [B Hk, T, D]), or multiplied by WEIGHT [B, H, N]. X and Y have `groups`
    heads for each of the `heads` of OUT. sizes: number of slots, slots per part, tokens.
    """
    part, bh = tl.program_id(0), tl.program_id(1)
    b, h = bh // heads, bh % heads
    TOKENS += b.to(tl.int64) * at
    acc = tl.zeros([DP, DP], tl.float32)
    for g in range(groups):
        head = h * groups + g
        XH, YH = head_of(X, qs, b, head), head_of(Y, ks, b, head)
        for start in range(part * sizes[1], tl.minimum((part + 1) * sizes[1], sizes[0]), BN):
            e = start + tl.arange(0, BN)
            row = tl.load(TOKENS + e, e < sizes[0], other=-1)
            there = row >= 0
            x, y = get(XH, row, qs, there, D, DP), get(YH, row, ks, there, D, DP).to(tl.float32)
            if MEAN is not None:
                tiles = sizes[0] // W
                y -= load(MEAN + bh.to(tl.int64) * tiles * D, e // W, D, there, D, DP).to(tl.float32)
            else:
                y *= tl.load(WEIGHT + ((b * heads * groups + head).to(tl.int64) * sizes[2]) + row, there, other=0.0)[
                    :, None
                ]
            acc = added(acc, x, y)
    d = tl.arange(0, DP)
    OUT += (part.to(tl.int64) * tl.num_programs(1) + bh) * D * D
    store(OUT, d, D, d < D, acc, D, DP)
