"""Pooling of key tiles and of queries, and D x D sums over tokens."""

import triton
import triton.language as tl

from ...rows import store
from .tiles import FREE, added, get, head_of, put, squares, tile_sums


@triton.jit(do_not_specialize=FREE)
def pool(
    K, V, TOKENS, MEAN, HALF, VALUE, OUT, ks, vs, at, sizes, heads,
    W: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Compute MEAN, HALF (half the variance) and VALUE [B Hk, T, D] of a part of the tiles, with zeros for tiles
    without tokens; and OUT [parts, B Hk, D, D], the sum of v (k - mean)' over the tokens of the part.

    HALF and OUT may be None. at: batch stride of TOKENS. sizes: number of slots, slots per part.
    """
    part, bh = tl.program_id(0), tl.program_id(1)
    b, h = bh // heads, bh % heads
    TOKENS += b.to(tl.int64) * at
    KH, VH = head_of(K, ks, b, h), head_of(V, vs, b, h)
    own = bh.to(tl.int64) * (sizes[0] // W) * D
    acc, d = tl.zeros([DP, DP], tl.float32), tl.arange(0, DP)
    last = tl.minimum((part + 1) * sizes[1], sizes[0])
    for start in range(part * sizes[1], last, BN):
        e = start + tl.arange(0, BN)
        row = tl.load(TOKENS + e, e < last, other=-1)
        there = row >= 0
        k, v = get(KH, row, ks, there, D, DP).to(tl.float32), get(VH, row, vs, there, D, DP)
        n = tl.maximum(tl.sum(tl.reshape(there.to(tl.float32), [BN // W, W]), 1), 1.0)[:, None]
        mean = tile_sums(k, W) / n
        wide = tl.broadcast_to(mean[:, None, :], [BN // W, W, DP])
        rest = tl.where(there[:, None], k - tl.reshape(wide, [BN, DP]), 0.0)
        tile = start // W + tl.arange(0, BN // W)
        inside = tile < last // W
        store(MEAN + own, tile, D, inside, mean, D, DP)
        store(VALUE + own, tile, D, inside, tile_sums(v.to(tl.float32), W) / n, D, DP)
        if HALF is not None:
            store(HALF + own, tile, D, inside, 0.5 * tile_sums(rest * rest, W) / n, D, DP)
        if OUT is not None:
            acc = added(acc, v, rest)
    if OUT is not None:
        store(OUT + (part.to(tl.int64) * tl.num_programs(1) + bh) * D * D, d, D, d < D, acc, D, DP)


@triton.jit(do_not_specialize=FREE)
def pool_queries(
    Q, TOKENS, Q2, QUERY, SQUARE, qs, os, at, sizes, heads, scale, W: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """Compute Q2 = scale Q^2 of the tokens on the grid; QUERY, the mean of W slots, and SQUARE = scale QUERY^2
    [B H, slots / W, D]. Q2, or QUERY and SQUARE, may be None. at: batch stride of TOKENS. sizes: number of slots."""
    start, bh = tl.program_id(0) * BN, tl.program_id(1)
    b, h = bh // heads, bh % heads
    e = start + tl.arange(0, BN)
    row = tl.load(TOKENS + b.to(tl.int64) * at + e, e < sizes[0], other=-1)
    q = get(head_of(Q, qs, b, h), row, qs, row >= 0, D, DP).to(tl.float32)
    if Q2 is not None:
        put(head_of(Q2, os, b, h), row, os, row >= 0, squares(q, scale), D, DP)
    if QUERY is not None:
        n = tl.maximum(tl.sum(tl.reshape((row >= 0).to(tl.float32), [BN // W, W]), 1), 1.0)
        mean = tile_sums(q, W) / n[:, None]
        i, own = start // W + tl.arange(0, BN // W), bh.to(tl.int64) * (sizes[0] // W) * D
        inside = i < sizes[0] // W
        store(QUERY + own, i, D, inside, mean, D, DP)
        store(SQUARE + own, i, D, inside, squares(mean, scale), D, DP)


@triton.jit(do_not_specialize=FREE)
def outer_sum(
    X, Y, TOKENS, WEIGHT, OUT, xs, ys, at, sizes, heads, groups, D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Sum x y' times WEIGHT [B, H, N] over a part of the tokens of the grid into OUT [parts, B Hk, D, D].

    X and Y have `groups` heads for each of the `heads` of OUT. sizes: number of slots, slots per part, tokens.
    """
    part, bh = tl.program_id(0), tl.program_id(1)
    b, h = bh // heads, bh % heads
    TOKENS += b.to(tl.int64) * at
    acc = tl.zeros([DP, DP], tl.float32)
    for g in range(groups):
        head = h * groups + g
        XH, YH = head_of(X, xs, b, head), head_of(Y, ys, b, head)
        for start in range(part * sizes[1], tl.minimum((part + 1) * sizes[1], sizes[0]), BN):
            e = start + tl.arange(0, BN)
            row = tl.load(TOKENS + e, e < sizes[0], other=-1)
            there = row >= 0
            x, y = get(XH, row, xs, there, D, DP), get(YH, row, ys, there, D, DP).to(tl.float32)
            weight = tl.load(WEIGHT + (b * heads * groups + head).to(tl.int64) * sizes[2] + row, there, other=0.0)
            acc = added(acc, x, y * weight[:, None])
    d = tl.arange(0, DP)
    store(OUT + (part.to(tl.int64) * tl.num_programs(1) + bh) * D * D, d, D, d < D, acc, D, DP)
