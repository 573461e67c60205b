"""Gradients of queries, pooled keys and values, keys and values, and tokens through block means.

With w_ij the normalized weights and delta_i = g_i.o_i, the gradient of log w_ij is u_ij = w_ij (g_i.v_j - delta_i).
"""

import triton
import triton.language as tl

from ...rows import load, of_head, products, store, weighted
from .forward import FREE
from .geometry import (
    EVERYWHERE,
    axes_of,
    block_box,
    block_of,
    in_box,
    inverses,
    is_near,
    is_touched,
    patches,
    reads,
    start_of,
    tile_of,
    touched,
)
from .tiles import keys, pooled, weights_of

FREE = [*FREE, "gs", "dqs", "dks", "dvs", "splits"]


@triton.jit(do_not_specialize=FREE)
def for_queries(
    Q, K, V, A, LOW, E, COUNT, O, REST, G, TOP, DELTA, DQ, qs, ks, vs, os, gs, dqs, grid, blocks, outer, radius,
    heads, factor, scale, ALL: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PT: tl.constexpr,
    PY: tl.constexpr, PX: tl.constexpr, BJ: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Compute dq and DELTA of a tile of queries."""
    patch, bh = tl.program_id(0), tl.program_id(1)
    b, h = bh // heads, bh % heads
    n_grid, total = grid[0] * grid[1] * grid[2], blocks[0] * blocks[1] * blocks[2]
    tile, near, reach, n_near, box = reads(patch, grid, blocks, outer, radius, ALL, PT, PY, PX)
    row, inside, place, on_grid = tile
    per_length = inverses(grid)
    K, V = of_head(K, ks, b, h), of_head(V, vs, b, h)
    A += bh.to(tl.int64) * total * D
    E += bh.to(tl.int64) * total * D
    LOW += bh.to(tl.int64) * total * D
    at_row = bh.to(tl.int64) * (n_grid + outer[0] + outer[1]) + row
    q = load(of_head(Q, qs, b, h), row, qs[1], inside, D, DP)
    g = load(of_head(G, gs, b, h), row, gs[1], inside, D, DP)
    o = load(of_head(O, os, b, h), row, os[1], inside, D, DP).to(tl.float32)
    o += load(of_head(REST, os, b, h), row, os[1], inside, D, DP).to(tl.float32)
    delta = tl.sum(o * g.to(tl.float32), 1)
    tl.store(DELTA + at_row, delta, inside)
    top = tl.load(TOP + at_row, inside, other=0.0)
    dq = tl.zeros([PT * PY * PX, DP], tl.float32)
    for start in range(0, n_near, BJ):
        k, v, there, block, exact = keys(
            start, K, V, ks, vs, box, place, reach, grid, per_length, blocks, outer, D, DP, PT, BJ
        )
        s = products(q, k) * factor
        mean = load(A, block, D, there, D, DP)
        exponent = tl.where(exact, s, products(q, mean) * factor)
        u = tl.exp2(tl.where(there[None, :], exponent - top[:, None], -float("inf")))
        u = u * (products(g, v) - delta[:, None]) * scale
        dq = weighted(dq, tl.where(exact, u, 0.0), k)
        dq = weighted(dq, tl.where(exact, 0.0, u), mean)
    if not ALL:
        for start in range(0, tl.where(on_grid, total, 0), BM):
            m = start + tl.arange(0, BM)
            there, count = weights_of(COUNT, near, m, blocks)
            mean, a = pooled(q, A, LOW, m, there, D, DP)
            u = tl.exp2(a * factor + count[None, :] - top[:, None])
            u = u * (products(g, load(E, m, D, there, D, DP)) - delta[:, None]) * scale
            dq = weighted(dq, u, mean)
            dq = weighted(dq, u, load(LOW, m, D, there, D, DP))
    store(of_head(DQ, dqs, b, h), row, dqs[1], inside, dq, D, DP)


@triton.jit(do_not_specialize=FREE)
def for_blocks(
    Q, A, LOW, E, COUNT, G, TOP, DELTA, DA, DE, qs, gs, grid, blocks, outer, radius, heads, factor, scale, splits,
    D: tl.constexpr, DP: tl.constexpr, PT: tl.constexpr, PY: tl.constexpr, PX: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Compute DA, DE [splits, B H, M, D], the gradients of pooled keys and values from a part of the queries, for a
    tile of blocks."""
    tile, bh, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, h = bh // heads, bh % heads
    n, total = grid[0] * grid[1] * grid[2] + outer[0] + outer[1], blocks[0] * blocks[1] * blocks[2]
    m = tile * BM + tl.arange(0, BM)
    at = axes_of(m, blocks)
    there = m < total
    base = bh.to(tl.int64) * total * D
    mean, value = load(A + base, m, D, there, D, DP), load(E + base, m, D, there, D, DP)
    low = load(LOW + base, m, D, there, D, DP)
    count = tl.load(COUNT + m, there, other=-float("inf"))
    Q, G = of_head(Q, qs, b, h), of_head(G, gs, b, h)
    nt, ny, nx = patches(grid, PT, PY, PX)
    each = tl.cdiv(nt * ny * nx, splits)
    da, de = tl.zeros([BM, DP], tl.float32), tl.zeros([BM, DP], tl.float32)
    for patch in range(part * each, tl.minimum((part + 1) * each, nt * ny * nx)):
        row, inside, _, on_grid = tile_of(patch, grid, outer, PT, PY, PX)
        near = touched(patch, on_grid, grid, blocks, radius, False, PT, PY, PX)
        q, g = load(Q, row, qs[1], inside, D, DP), load(G, row, gs[1], inside, D, DP)
        top = tl.load(TOP + bh.to(tl.int64) * n + row, inside, other=float("inf"))
        delta = tl.load(DELTA + bh.to(tl.int64) * n + row, inside, other=0.0)
        weight = tl.where(is_touched(near, at), -float("inf"), count)
        a = products(mean, q)
        a += products(low, q)
        u = tl.exp2(a * factor + weight[:, None] - top[None, :])
        de = weighted(de, u, g)
        u = u * (products(value, g) - delta[None, :]) * scale
        da = weighted(da, u, q)
    base += part.to(tl.int64) * tl.num_programs(1) * total * D
    store(DA + base, m, D, there, da, D, DP)
    store(DE + base, m, D, there, de, D, DP)


@triton.jit
def patches_along(first, last, length, m, size, radius, ALL: tl.constexpr):
    """Return the first patch along an axis whose neighbourhood may intersect a block from `first` to `last`, and the
    number of such patches."""
    if ALL:
        lowest, highest = first * 0, first * 0 + length - 1
    else:
        lowest = tl.maximum(start_of(first, length, m) - radius, 0)
        highest = tl.minimum(start_of(last + 1, length, m) - 1 + radius, length - 1)
    return lowest // size, highest // size - lowest // size + 1


@triton.jit(do_not_specialize=FREE)
def for_keys(
    Q, K, V, A, COUNT, G, TOP, DELTA, DE, DK, DA, DV, qs, ks, vs, gs, dvs, grid, blocks, outer, radius, heads,
    factor, scale, ALL: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PT: tl.constexpr, PY: tl.constexpr,
    PX: tl.constexpr, QT: tl.constexpr, QY: tl.constexpr, QX: tl.constexpr,
):  # fmt: skip
    """Compute dv of a tile PT x PY x PX of keys, and DK, DA [B, N, H, D], its gradients through scores with keys and
    with mean keys. Queries are read in patches of QT x QY x QX."""
    tile, bh = tl.program_id(0), tl.program_id(1)
    b, h = bh // heads, bh % heads
    n, total = grid[0] * grid[1] * grid[2] + outer[0] + outer[1], blocks[0] * blocks[1] * blocks[2]
    theirs, there, at, on_grid = tile_of(tile, grid, outer, PT, PY, PX)
    bt, by = block_of(at[0], grid[0], blocks[0]), block_of(at[1], grid[1], blocks[1])
    bx = block_of(at[2], grid[2], blocks[2])
    block = tl.where(on_grid, (bt * blocks[1] + by) * blocks[2] + bx, 0)
    own = touched(tile, on_grid, grid, blocks, 0, ALL, PT, PY, PX)
    k = load(of_head(K, ks, b, h), theirs, ks[1], there, D, DP)
    v = load(of_head(V, vs, b, h), theirs, vs[1], there, D, DP)
    base = bh.to(tl.int64) * total * D
    mean = load(A + base, block, D, there, D, DP)
    dk, da = tl.zeros([PT * PY * PX, DP], tl.float32), tl.zeros([PT * PY * PX, DP], tl.float32)
    if ALL:
        dv = tl.zeros([PT * PY * PX, DP], tl.float32)
    else:
        count = tl.load(COUNT + block, there, other=0.0)
        share = tl.where(on_grid, tl.exp2(-count), 0.0)  # outer tokens belong to no block
        dv = load(DE + base, block, D, there, D, DP) * share[:, None]
    ft, ct = patches_along(own[0][0], own[0][1], grid[0], blocks[0], QT, radius, ALL)
    fy, cy = patches_along(own[1][0], own[1][1], grid[1], blocks[1], QY, radius, ALL)
    fx, cx = patches_along(own[2][0], own[2][1], grid[2], blocks[2], QX, radius, ALL)
    nt, ny, nx = patches(grid, QT, QY, QX)
    near_patches = ct * cy * cx
    Q, G = of_head(Q, qs, b, h), of_head(G, gs, b, h)
    for i in range(near_patches + tl.cdiv(outer[0] + outer[1], QT * QY * QX)):
        patch = ((ft + i // (cy * cx)) * ny + fy + i // cx % cy) * nx + fx + i % cx
        patch = tl.where(i < near_patches, patch, nt * ny * nx + i - near_patches)
        row, inside, place, q_on_grid = tile_of(patch, grid, outer, QT, QY, QX)
        near = touched(patch, q_on_grid, grid, blocks, radius, ALL, QT, QY, QX)
        live = there & (is_touched(near, (bt, by, bx)) | (on_grid == 0))
        reach = tl.where(q_on_grid, tl.where(on_grid, radius, EVERYWHERE), EVERYWHERE)
        q, g = load(Q, row, qs[1], inside, D, DP), load(G, row, gs[1], inside, D, DP)
        top = tl.load(TOP + bh.to(tl.int64) * n + row, inside, other=float("inf"))
        delta = tl.load(DELTA + bh.to(tl.int64) * n + row, inside, other=0.0)
        exact = is_near(at, place, reach, PT)
        exponent = tl.where(exact, products(k, q) * factor, products(mean, q) * factor)
        u = tl.exp2(tl.where(live[:, None], exponent - top[None, :], -float("inf")))
        dv = weighted(dv, u, g)
        u = u * (products(v, g) - delta[None, :]) * scale
        dk = weighted(dk, tl.where(exact, u, 0.0), q)
        da = weighted(da, tl.where(exact, 0.0, u), q)
    own_rows = ((b.to(tl.int64) * n) * heads + h) * D
    store(DK + own_rows, theirs, heads * D, there, dk, D, DP)
    store(DA + own_rows, theirs, heads * D, there, da, D, DP)
    store(of_head(DV, dvs, b, h), theirs, dvs[1], there, dv, D, DP)


@triton.jit(do_not_specialize=FREE)
def spread(
    DK, DA, POOLED, OUT, dks, grid, blocks, outer, heads,
    ALL: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """Compute dk = DK + mean over the block of the gradients of mean keys; the last programs handle outer tokens."""
    m, bh = tl.program_id(0), tl.program_id(1)
    b, h = bh // heads, bh % heads
    n, total = grid[0] * grid[1] * grid[2] + outer[0] + outer[1], blocks[0] * blocks[1] * blocks[2]
    first, size = block_box(m, grid, blocks)
    per_size = inverses(size)
    width = size[0] * size[1] * size[2]
    own_rows = ((b.to(tl.int64) * n) * heads + h) * D
    OUT = of_head(OUT, dks, b, h)
    if m < total:
        da = tl.zeros([BW, DP], tl.float32)
        for start in range(0, width, BW):
            e = start + tl.arange(0, BW)
            row, _, _, _ = in_box(e, first, size, per_size, grid, outer, 0)
            da += load(DA + own_rows, row, heads * D, e < width, D, DP).to(tl.float32)
        more = tl.sum(da, 0)
        if not ALL:
            d = tl.arange(0, DP)
            more += tl.load(POOLED + (bh.to(tl.int64) * total + m) * D + d, d < D, other=0.0)
        more = more / width
        for start in range(0, width, BW):
            e = start + tl.arange(0, BW)
            row, _, _, _ = in_box(e, first, size, per_size, grid, outer, 0)
            x = load(DK + own_rows, row, heads * D, e < width, D, DP)
            store(OUT, row, dks[1], e < width, x + more[None, :], D, DP)
    else:
        e = (m - total) * BW + tl.arange(0, BW)
        row = tl.where(e < outer[0], e, e + grid[0] * grid[1] * grid[2])
        x = load(DK + own_rows, row, heads * D, e < outer[0] + outer[1], D, DP)
        store(OUT, row, dks[1], e < outer[0] + outer[1], x, D, DP)
