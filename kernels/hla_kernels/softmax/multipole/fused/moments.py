"""Degree-1 moments P_b = sum_j (k_j - k_b) v_j' of blocks.

A block adds exp(a_b) s q.P_b to the sum of a query, and nothing to the denominator, since the expansion is around the
mean. Centred keys are small, and so are their rounding errors.
"""

import triton
import triton.language as tl

from ...rows import load, of_head, products, store, weighted
from .geometry import axes_of, block_box, in_box, inverses, is_touched, patches, tile_of, touched

FREE = ["ks", "vs", "qs", "gs", "grid", "blocks", "outer", "radius", "heads", "factor", "scale", "splits"]


@triton.jit
def mean_of(A, LOW, m, D: tl.constexpr, DP: tl.constexpr):
    """Return the mean key of a block, [DP]."""
    d = tl.arange(0, DP)
    at = m * D + d
    return tl.load(A + at, d < D, other=0.0).to(tl.float32) + tl.load(LOW + at, d < D, other=0.0).to(tl.float32)


@triton.jit
def weight_of(q, mean, top, factor, skip):
    """Return exp(a - top) of a tile of queries with one block, 0 if the block is read key by key."""
    a = tl.sum(q.to(tl.float32) * mean[None, :], 1) * factor
    return tl.where(skip, 0.0, tl.exp2(a - top))


@triton.jit
def moment(P, m, D: tl.constexpr, DP: tl.constexpr):
    """Return P_b, [DP, DP]."""
    rows = tl.arange(0, DP)
    return load(P + m.to(tl.int64) * (D * D), rows, D, rows < D, D, DP)


@triton.jit(do_not_specialize=FREE)
def sum_moments(
    K, V, A, LOW, P, ks, vs, grid, blocks, outer, heads, D: tl.constexpr, DP: tl.constexpr, BW: tl.constexpr
):
    """Compute P [B H, M, D, D] of one block."""
    m, bh = tl.program_id(0), tl.program_id(1)
    at = bh.to(tl.int64) * tl.num_programs(0) + m
    first, size = block_box(m, grid, blocks)
    n, per_size = size[0] * size[1] * size[2], inverses(size)
    K, V = of_head(K, ks, bh // heads, bh % heads), of_head(V, vs, bh // heads, bh % heads)
    mean = mean_of(A, LOW, at, D, DP)
    p = tl.zeros([DP, DP], tl.float32)
    for start in range(0, n, BW):
        e = start + tl.arange(0, BW)
        row, _, _, _ = in_box(e, first, size, per_size, grid, outer, 0)
        k, v = load(K, row, ks[1], e < n, D, DP), load(V, row, vs[1], e < n, D, DP)
        rest = tl.where((e < n)[:, None], k.to(tl.float32) - mean[None, :], 0.0)
        p = weighted(p, tl.trans(rest.to(v.dtype)), v)
    d = tl.arange(0, DP)
    store(P + at * (D * D), d, D, d < D, p, D, DP)


@triton.jit
def add_moments(o, q, top, A, LOW, P, near, blocks, on_grid, factor, scale, D: tl.constexpr, DP: tl.constexpr):
    """Return o + sum_b exp(a_b - top) s q.P_b of a tile of queries."""
    for m in range(tl.where(on_grid, blocks[0] * blocks[1] * blocks[2], 0)):
        skip = is_touched(near, axes_of(m, blocks))
        w = weight_of(q, mean_of(A, LOW, m, D, DP), top, factor, skip) * scale
        o = weighted(o, q.to(tl.float32) * w[:, None], moment(P, tl.cast(m, tl.int32), D, DP))
    return o


@triton.jit
def add_moment_queries(
    dq, q, g, top, A, LOW, P, near, blocks, on_grid, factor, scale, D: tl.constexpr, DP: tl.constexpr
):
    """Add the part of the moments to dq."""
    for m in range(tl.where(on_grid, blocks[0] * blocks[1] * blocks[2], 0)):
        skip = is_touched(near, axes_of(m, blocks))
        mean = mean_of(A, LOW, m, D, DP)
        w = weight_of(q, mean, top, factor, skip) * scale
        t = products(g, moment(P, tl.cast(m, tl.int32), D, DP))
        dq += w[:, None] * t
        dq += (w * tl.sum(q.to(tl.float32) * t, 1) * scale)[:, None] * mean[None, :]
    return dq


@triton.jit(do_not_specialize=FREE)
def for_moments(
    Q, A, LOW, P, G, TOP, DA, DP_, qs, gs, grid, blocks, outer, radius, heads, factor, scale, splits,
    D: tl.constexpr, DP: tl.constexpr, PT: tl.constexpr, PY: tl.constexpr, PX: tl.constexpr,
):  # fmt: skip
    """Compute DP_ [splits, B H, M, D, D], the gradient of P of a block from a part of the queries, and DA [splits, B H,
    M, D], the gradient of its mean key through P."""
    m, bh, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, h = bh // heads, bh % heads
    total, n = tl.num_programs(0), grid[0] * grid[1] * grid[2] + outer[0] + outer[1]
    at = bh.to(tl.int64) * total + m
    mean, p = mean_of(A, LOW, at, D, DP), moment(P, at, D, DP)
    Q, G = of_head(Q, qs, b, h), of_head(G, gs, b, h)
    nt, ny, nx = patches(grid, PT, PY, PX)
    each = tl.cdiv(nt * ny * nx, splits)
    da, dp = tl.zeros([DP], tl.float32), tl.zeros([DP, DP], tl.float32)
    for patch in range(part * each, tl.minimum((part + 1) * each, nt * ny * nx)):
        row, inside, _, on_grid = tile_of(patch, grid, outer, PT, PY, PX)
        near = touched(patch, on_grid, grid, blocks, radius, False, PT, PY, PX)
        q, g = load(Q, row, qs[1], inside, D, DP), load(G, row, gs[1], inside, D, DP)
        top = tl.load(TOP + bh.to(tl.int64) * n + row, inside, other=float("inf"))
        wide = q.to(tl.float32)
        w = weight_of(q, mean, top, factor, is_touched(near, axes_of(m, blocks))) * scale
        x = tl.sum(wide * products(g, p), 1) * w * scale
        da += tl.sum(wide * x[:, None], 0)
        dp = weighted(dp, tl.trans((wide * w[:, None]).to(g.dtype)), g)
    at += part.to(tl.int64) * tl.num_programs(1) * total
    d = tl.arange(0, DP)
    tl.store(DA + at * D + d, da, d < D)
    store(DP_ + at * (D * D), d, D, d < D, dp, D, DP)


@triton.jit(do_not_specialize=FREE)
def spread_moments(
    K, V, A, LOW, E, DP_, DK, DV, ks, vs, grid, blocks, outer, heads,
    D: tl.constexpr, DP: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """Add the gradients through P of a block to DK and DV [B, N, H, D] of its tokens."""
    m, bh = tl.program_id(0), tl.program_id(1)
    b, h = bh // heads, bh % heads
    at = bh.to(tl.int64) * tl.num_programs(0) + m
    first, size = block_box(m, grid, blocks)
    n, per_size = size[0] * size[1] * size[2], inverses(size)
    own_rows = (b.to(tl.int64) * (grid[0] * grid[1] * grid[2] + outer[0] + outer[1]) * heads + h) * D
    K, V = of_head(K, ks, b, h), of_head(V, vs, b, h)
    d = tl.arange(0, DP)
    mean = mean_of(A, LOW, at, D, DP)
    value = tl.load(E + at * D + d, d < D, other=0.0).to(tl.float32)
    dp = moment(DP_, at, D, DP)
    for start in range(0, n, BW):
        e = start + tl.arange(0, BW)
        row, _, _, _ = in_box(e, first, size, per_size, grid, outer, 0)
        there = e < n
        k, v = load(K, row, ks[1], there, D, DP), load(V, row, vs[1], there, D, DP)
        dk, dv = load(DK + own_rows, row, heads * D, there, D, DP), load(DV + own_rows, row, heads * D, there, D, DP)
        dk += products((v.to(tl.float32) - value[None, :]).to(v.dtype), dp.to(v.dtype))
        dv = weighted(dv, (k.to(tl.float32) - mean[None, :]).to(k.dtype), dp.to(k.dtype))
        store(DK + own_rows, row, heads * D, there, dk, D, DP)
        store(DV + own_rows, row, heads * D, there, dv, D, DP)
