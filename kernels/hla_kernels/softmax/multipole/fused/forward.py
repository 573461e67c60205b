"""Mean keys and values of blocks, and the output."""

import triton
import triton.language as tl

from ...rows import load, of_head, products, store, weighted
from .geometry import block_box, in_box, inverses, reads
from .tiles import keys, pooled, weights_of

FREE = ["ks", "vs", "qs", "os", "grid", "blocks", "outer", "radius", "heads", "factor", "scale"]


@triton.jit(do_not_specialize=FREE)
def pool(
    K, V, A, LOW, E, COUNT, ks, vs, grid, blocks, outer, heads,
    D: tl.constexpr, DP: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """Compute A, E [B H, M, D], the mean key and mean value of each block; LOW, the rounding error of A; and COUNT [M],
    log2 of the number of tokens per block."""
    m, bh = tl.program_id(0), tl.program_id(1)
    total = blocks[0] * blocks[1] * blocks[2]
    first, size = block_box(m, grid, blocks)
    n, per_size = size[0] * size[1] * size[2], inverses(size)
    K, V = of_head(K, ks, bh // heads, bh % heads), of_head(V, vs, bh // heads, bh % heads)
    k, v = tl.zeros([BW, DP], tl.float32), tl.zeros([BW, DP], tl.float32)
    for start in range(0, n, BW):
        e = start + tl.arange(0, BW)
        row, _, _, _ = in_box(e, first, size, per_size, grid, outer, 0)
        k += load(K, row, ks[1], e < n, D, DP).to(tl.float32)
        v += load(V, row, vs[1], e < n, D, DP).to(tl.float32)
    d = tl.arange(0, DP)
    at = (bh.to(tl.int64) * total + m) * D + d
    mean = tl.sum(k, 0) / n
    tl.store(A + at, mean.to(A.dtype.element_ty), d < D)
    tl.store(LOW + at, (mean - mean.to(A.dtype.element_ty).to(tl.float32)).to(A.dtype.element_ty), d < D)
    tl.store(E + at, (tl.sum(v, 0) / n).to(E.dtype.element_ty), d < D)
    tl.store(COUNT + m, tl.log2(n * 1.0), bh == 0)


@triton.jit
def online(top, z, o, exponent, v):
    """Add a tile of keys to the running maximum of exponents, denominator and sum of values."""
    higher = tl.maximum(top, tl.max(exponent, 1))
    w = tl.exp2(exponent - higher[:, None])
    shrink = tl.exp2(top - higher)
    return higher, z * shrink + tl.sum(w, 1), weighted(o * shrink[:, None], w, v)


@triton.jit(do_not_specialize=FREE)
def output(
    Q, K, V, A, LOW, E, COUNT, O, REST, TOP, qs, ks, vs, os, grid, blocks, outer, radius, heads, factor, scale,
    ALL: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PT: tl.constexpr, PY: tl.constexpr,
    PX: tl.constexpr, BJ: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Compute o, REST (its rounding error) and TOP [B H, N], the logarithm of the denominator, of a tile of queries."""
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
    q = load(of_head(Q, qs, b, h), row, qs[1], inside, D, DP)
    top = tl.full([PT * PY * PX], -float("inf"), tl.float32)
    z = tl.zeros([PT * PY * PX], tl.float32)
    o = tl.zeros([PT * PY * PX, DP], tl.float32)
    for start in range(0, n_near, BJ):
        k, v, there, block, exact = keys(
            start, K, V, ks, vs, box, place, reach, grid, per_length, blocks, outer, D, DP, PT, BJ
        )
        s = products(q, k) * factor
        a = products(q, load(A, block, D, there, D, DP))
        exponent = tl.where(exact, s, a * factor)
        exponent = tl.where(there[None, :], exponent, -float("inf"))
        top, z, o = online(top, z, o, exponent, v)
    if not ALL:
        for start in range(0, tl.where(on_grid, total, 0), BM):
            m = start + tl.arange(0, BM)
            there, count = weights_of(COUNT, near, m, blocks)
            _, a = pooled(q, A, LOW, m, there, D, DP)
            top, z, o = online(top, z, o, a * factor + count[None, :], load(E, m, D, there, D, DP))
    o = o / z[:, None]
    store(of_head(O, os, b, h), row, os[1], inside, o, D, DP)
    store(of_head(REST, os, b, h), row, os[1], inside, o - o.to(O.dtype.element_ty).to(tl.float32), D, DP)
    tl.store(TOP + bh.to(tl.int64) * (n_grid + outer[0] + outer[1]) + row, top + tl.log2(z), inside)
