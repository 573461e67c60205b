"""Selection of key tiles: scores, the highest ones, and the query tiles that selected each key tile."""

import triton
import triton.language as tl

from .tiles import FREE, LOWEST, UNITS, far_tiles, load, products, tile_sums


@triton.jit(do_not_specialize=FREE)
def adaptive_summed_scores(
    QUERY, SQUARE, COUNT, MEAN, HALF, LOGN, SCORES, at, sizes, heads, groups, factor,
    ERROR: tl.constexpr, PARTS: tl.constexpr, BQ: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Compute SCORES [B H, U, T] of BQ / PARTS query tiles for "mass" or, if ERROR, "error". QUERY, SQUARE: pooled
    queries [B H, U PARTS, D], of COUNT [.., U PARTS] queries. sizes: U, T. at: batch strides of COUNT and LOGN."""
    u, bh = tl.program_id(0) * (BQ // PARTS), tl.program_id(1)
    b, h, U, T = bh // heads, bh % heads, sizes[0], sizes[1]
    own = (b * (heads // groups) + h // groups).to(tl.int64) * T * D
    MEAN, HALF, LOGN = MEAN + own, HALF + own, LOGN + b.to(tl.int64) * at[1]
    i, first = u * PARTS + tl.arange(0, BQ), bh.to(tl.int64) * U * PARTS * D
    inside = i < U * PARTS
    q, q2 = load(QUERY + first, i, D, inside, D, DP), load(SQUARE + first, i, D, inside, D, DP)
    n = tl.load(COUNT + b.to(tl.int64) * at[0] + i, inside, other=0.0)
    top, z = tl.full([BQ], LOWEST, tl.float32), tl.zeros([BQ], tl.float32)
    for start in range(0, T, BM):
        m, there, mean, logn = far_tiles(start, MEAN, LOGN, T, D, DP, BM)
        half = load(HALF, m, D, there, D, DP)
        power = products(q2, half, products(q, mean)) * factor + logn[None, :]
        higher = tl.maximum(top, tl.max(power, 1))
        z = z * tl.exp2(top - higher) + tl.sum(tl.exp2(power - higher[:, None]), 1)
        top = higher
    top += tl.log2(tl.maximum(z, 1e-30))
    u += tl.arange(0, BQ // PARTS)
    SCORES += (bh.to(tl.int64) * U + u)[:, None] * T
    for start in range(0, T, BM):
        m, there, mean, logn = far_tiles(start, MEAN, LOGN, T, D, DP, BM)
        spread = products(q2, load(HALF, m, D, there, D, DP)) * factor
        p = tl.exp2(products(q, mean) * factor + spread + logn[None, :] - top[:, None]) * n[:, None]
        if ERROR:
            p *= spread  # up to a constant, which selects the same tiles
        score = tile_sums(p, PARTS)
        score = tl.where((logn > LOWEST)[None, :], score, -float("inf"))
        tl.store(SCORES + m[None, :], score, (u < U)[:, None] & there[None, :])


@triton.jit(do_not_specialize=FREE)
def adaptive_mean_scores(
    QUERY, MEAN, LOGN, SCORES, at, sizes, heads, groups, factor,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Compute SCORES for "mean", for BM mean queries QUERY [B H, U, D] and BM key tiles."""
    m, u, bh = tl.program_id(0) * BM, tl.program_id(1) * BM, tl.program_id(2)
    b, h, T = bh // heads, bh % heads, sizes[1]
    own = (b * (heads // groups) + h // groups).to(tl.int64) * T * D
    m, there, mean, logn = far_tiles(m, MEAN + own, LOGN + b.to(tl.int64) * at[1], T, D, DP, BM)
    u += tl.arange(0, BM)
    inside = u < sizes[0]
    q = load(QUERY + bh.to(tl.int64) * sizes[0] * D, u, D, inside, D, DP)
    power = products(mean, q) * factor
    power = tl.where((logn > LOWEST)[:, None], power, -float("inf"))
    place = (bh.to(tl.int64) * sizes[0] + u)[None, :] * T + m[:, None]
    tl.store(SCORES + place, power, inside[None, :] & there[:, None])


@triton.jit(do_not_specialize=["own", "T", "exact", "outer"])
def adaptive_choose(SCORES, LIST, CHOSEN, own, T, exact, outer, BT: tl.constexpr):
    """Select the highest of T scores (of equal ones the first): LIST [rows, exact + outer] int32, ascending and
    followed by the `outer` tiles from T on, and CHOSEN [rows, T] int8. own: number of rows of SCORES, which repeat.

    The lowest selected score is found bit by bit, on 32-bit integers in the order of the floats.
    """
    row = tl.program_id(0).to(tl.int64)
    m = tl.arange(0, BT)
    there = m < T
    bits = tl.load(SCORES + row % own * T + m, there, other=0.0).to(tl.int32, bitcast=True)
    key = tl.where(there, bits ^ ((bits >> 31) & 0x7FFFFFFF), -2147483648)
    least = tl.where(tl.sum((key >= 0).to(tl.int32), 0) >= exact, 0, -2147483648)
    for i in range(31):
        higher = least | (1 << (30 - i))
        least = tl.where(tl.sum((key >= higher).to(tl.int32), 0) >= exact, higher, least)
    above, equal = key > least, key == least
    room = exact - tl.sum(above.to(tl.int32), 0)
    chosen = above | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= room))
    tl.store(CHOSEN + row * T + m, chosen.to(tl.int8), there)
    LIST += row * (exact + outer)
    tl.store(LIST + tl.cumsum(chosen.to(tl.int32), 0) - 1, m, chosen)
    tl.store(LIST + exact + m, T + m, m < outer)


@triton.jit(do_not_specialize=["U", "T", "step"])
def adaptive_invert(CHOSEN, LIST, COUNT, U, T, step, G: tl.constexpr, BU: tl.constexpr):
    """Compute LIST [heads, groups, U] int32, ascending, and COUNT [heads, groups]: the query tiles that selected any of
    G consecutive key tiles, each plus UNITS times the bits of those tiles. step: head stride of CHOSEN."""
    group, bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    m = group * G + tl.arange(0, G)
    place = bh * tl.num_programs(0) + group
    count = 0
    for start in range(0, U, BU):
        u = start + tl.arange(0, BU)
        at = CHOSEN + bh * step + u.to(tl.int64)[:, None] * T + m[None, :]
        chosen = tl.load(at, (u < U)[:, None] & (m < T)[None, :], other=0).to(tl.int32)
        bits = tl.sum(chosen << tl.arange(0, G)[None, :], 1)
        found = (bits > 0).to(tl.int32)
        tl.store(LIST + place * U + count + tl.cumsum(found, 0) - 1, bits * UNITS + u, found > 0)
        count += tl.sum(found, 0)
    tl.store(COUNT + place, count)
