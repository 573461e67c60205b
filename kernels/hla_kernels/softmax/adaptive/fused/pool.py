"""Pooling of key tiles and of queries, D x D sums over tokens, and sums of rows."""

import triton
import triton.language as tl

from .tiles import FREE, added, get, head_of, load, store


@triton.jit(do_not_specialize=FREE)
def adaptive_pool(
    K, V, TOKENS, MEAN, EXACT, HALF, VALUE, ks, vs, at, heads,
    W: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Compute MEAN (EXACT: in float32), HALF (half the variance) and VALUE [B Hk, T, D] of each tile; zeros for a tile
    without tokens. EXACT and HALF may be None. at: batch stride of TOKENS."""
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
    if EXACT is not None:
        tl.store(EXACT + place, mean, d < D)
    if HALF is not None:
        rest = tl.where(there[:, None], k - mean[None, :], 0.0)
        tl.store(HALF + place, (0.5 * tl.sum(rest * rest, 0) / n).to(HALF.dtype.element_ty), d < D)
    v = get(head_of(V, vs, b, h), row, vs, there, D, DP).to(tl.float32)
    tl.store(VALUE + place, (tl.sum(v, 0) / n).to(VALUE.dtype.element_ty), d < D)


@triton.jit(do_not_specialize=FREE)
def adaptive_pool_queries(
    Q, TOKENS, QUERY, SQUARE, qs, at, sizes, heads, scale, W: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """Compute QUERY, the mean of W slots, and SQUARE = scale QUERY^2 [B H, slots / W, D]. SQUARE may be None. at: batch
    stride of TOKENS. sizes: number of slots."""
    start, bh = tl.program_id(0) * BN, tl.program_id(1)
    b, h = bh // heads, bh % heads
    r = tl.arange(0, BN)
    e = start + r % (BN // W) * W + r // (BN // W)  # in this order the W slots of a mean are in one thread
    row = tl.load(TOKENS + b.to(tl.int64) * at + e, e < sizes[0], other=-1)
    q = get(head_of(Q, qs, b, h), row, qs, row >= 0, D, DP).to(tl.float32)
    n = tl.maximum(tl.sum(tl.reshape((row >= 0).to(tl.float32), [W, BN // W]), 0), 1.0)
    mean = tl.sum(tl.reshape(q, [W, BN // W, DP]), 0) / n[:, None]
    i, own = start // W + tl.arange(0, BN // W), bh.to(tl.int64) * (sizes[0] // W) * D
    inside = i < sizes[0] // W
    store(QUERY + own, i, D, inside, mean, D, DP)
    if SQUARE is not None:
        store(SQUARE + own, i, D, inside, scale * mean * mean, D, DP)


@triton.jit(do_not_specialize=FREE)
def adaptive_outer_sum(
    X, Y, TOKENS, EXACT, WEIGHT, OUT, xs, ys, at, sizes, heads, groups,
    W: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Sum x y' over a part of the tokens of the grid into OUT [parts, B Hk, D, D].

    y is centred by the mean of its tile of W slots (EXACT [B Hk, T, D], not rounded: all values of a tile would add up
    its error), or multiplied by WEIGHT [B, H, N]. X and Y have `groups` heads for each of the `heads` of OUT. sizes:
    number of slots, slots per part, tokens.
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
            if EXACT is not None:
                y -= load(EXACT + bh.to(tl.int64) * (sizes[0] // W) * D, e // W, D, there, D, DP)
            else:
                weight = WEIGHT + (b * heads * groups + head).to(tl.int64) * sizes[2] + row
                y *= tl.load(weight, there, other=0.0)[:, None]
            acc = added(acc, x, y)
    d = tl.arange(0, DP)
    store(OUT + (part.to(tl.int64) * tl.num_programs(1) + bh) * D * D, d, D, d < D, acc, D, DP)


@triton.jit(do_not_specialize=["at", "n", "step", "own", "width", "heads", "factor"])
def adaptive_sum_rows(
    X, TILES, OUT, at, n, step, own, width, heads, factor, BN: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """Compute OUT [B Hk, width] = factor / TILES times the sum of n rows of X, `step` apart. own: distance between the
    first rows. TILES [B] may be None. at: its batch stride."""
    column, bh = tl.program_id(0) * BW + tl.arange(0, BW), tl.program_id(1)
    X += bh.to(tl.int64) * own
    acc = tl.zeros([BN, BW], tl.float32)
    for start in range(0, n, BN):
        i = start + tl.arange(0, BN)
        at_rows = i.to(tl.int64)[:, None] * step + column[None, :]
        acc += tl.load(X + at_rows, (i < n)[:, None] & (column < width)[None, :], other=0.0).to(tl.float32)
    found = tl.sum(acc, 0) * factor
    if TILES is not None:
        found /= tl.load(TILES + bh // heads * at)
    tl.store(OUT + bh.to(tl.int64) * width + column, found.to(OUT.dtype.element_ty), column < width)
