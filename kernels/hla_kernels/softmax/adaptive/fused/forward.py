"""Output of a query tile: far tiles first, then the keys of the selected tiles."""

import triton
import triton.language as tl

from .tiles import (
    FREE,
    LOWEST,
    by_row,
    exact_rows,
    exact_tiles,
    far_tiles,
    get,
    head_of,
    is_chosen,
    load,
    mixed,
    per_row,
    products,
    projected,
    put,
    query_rows,
    zero_sums,
)


@triton.jit(do_not_specialize=FREE)
def adaptive_output(
    Q, K, V, QTOKENS, KTOKENS, MEAN, VALUE, LOGN, MOMENT, CHOSEN, LIST, TILES, O, REST, LSE, FAR, qs, ks, vs, os, at,
    sizes, heads, groups, factor, scale,
    BQ: tl.constexpr, PARTS: tl.constexpr, KT: tl.constexpr, BJ: tl.constexpr, BM: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr,
):  # fmt: skip
    """Compute O of BQ queries, one of PARTS of a query tile; REST, its rounding error, or None; LSE [B, H, N], log2 of
    the denominator; and, with MOMENT [B Hk, D, D] = H' / TILES, FAR [B, H, N] = m_t / denominator.

    LIST: key tiles that each query tile reads exactly. sizes: N, U, T, query tiles and key tiles outside the grid,
    exact. at: strides of QTOKENS, KTOKENS, LOGN, TILES (per sample), CHOSEN, LIST (per head).
    """
    part, bh = tl.program_id(0), tl.program_id(1)
    u, b, h = part // PARTS, bh // heads, bh % heads
    N, U, T, exact = sizes[0], sizes[1], sizes[2], sizes[5]
    hk = (b * (heads // groups) + h // groups).to(tl.int64)
    on_grid = u < U
    MEAN += hk * T * D
    VALUE += hk * T * D
    LOGN += b.to(tl.int64) * at[2]
    CHOSEN += bh.to(tl.int64) * at[4] + u.to(tl.int64) * T
    row = query_rows(QTOKENS + b.to(tl.int64) * at[0], part, True, BQ)
    inside = row >= 0
    q = get(head_of(Q, qs, b, h), row, qs, inside, D, DP)
    top, z = tl.full([BQ], LOWEST, tl.float32), tl.zeros([BQ], tl.float32)
    far, o = tl.zeros([BQ], tl.float32), zero_sums(q, BQ, DP)
    next_chosen = is_chosen(CHOSEN, 0, tl.where(on_grid, T, 0), BM)
    for start in range(0, tl.where(on_grid, T, 0), BM):
        m, there, mean, logn = far_tiles(start, MEAN, LOGN, T, D, DP, BM)
        power = products(q, mean) * factor
        chosen = next_chosen
        next_chosen = is_chosen(CHOSEN, start + BM, T, BM)
        logn = tl.where(chosen == 0, logn, -float("inf"))
        power += logn[None, :]
        higher = tl.maximum(top, tl.max(power, 1))
        shrink = tl.exp2(top - higher)
        p = tl.exp2(power - higher[:, None])
        z = z * shrink + tl.sum(p, 1)
        far = far * shrink + tl.sum(p * tl.where(logn > LOWEST, tl.exp2(-logn), 0.0)[None, :], 1)
        o = mixed(o * per_row(shrink, q), p, load(VALUE, m, D, there, D, DP))
        top = higher
    if MOMENT is not None:
        d = tl.arange(0, DP)
        moment = load(MOMENT + hk * D * D, d, D, d < D, D, DP)
        o += projected(q, moment) * per_row(far * scale, q)
    KH, VH = head_of(K, ks, b, h // groups), head_of(V, vs, b, h // groups)
    n_slots = (tl.where(on_grid, exact, T) + sizes[4]) * KT
    LIST += bh.to(tl.int64) * at[5] + u.to(tl.int64) * (exact + sizes[4])
    KTOKENS += b.to(tl.int64) * at[1]
    next_row = exact_rows(0, n_slots, KTOKENS, exact_tiles(0, n_slots, LIST, on_grid, KT, BJ), KT, BJ)
    next_tile = exact_tiles(BJ, n_slots, LIST, on_grid, KT, BJ)
    for start in range(0, n_slots, BJ):
        there = next_row >= 0
        k, v = get(KH, next_row, ks, there, D, DP), get(VH, next_row, vs, there, D, DP)
        next_row = exact_rows(start + BJ, n_slots, KTOKENS, next_tile, KT, BJ)
        next_tile = exact_tiles(start + 2 * BJ, n_slots, LIST, on_grid, KT, BJ)
        s = products(q, k) * factor + tl.where(there, 0.0, -float("inf"))[None, :]
        higher = tl.maximum(top, tl.max(s, 1))
        shrink = tl.exp2(top - higher)
        p = tl.exp2(s - higher[:, None])
        z = z * shrink + tl.sum(p, 1)
        far *= shrink
        o = mixed(o * per_row(shrink, q), p, v)
        top = higher
    z = tl.maximum(z, 1e-30)
    o = by_row(o / per_row(z, q), q)
    rounded = o.to(O.dtype.element_ty)
    put(head_of(O, os, b, h), row, os, inside, rounded, D, DP)
    if REST is not None:
        rest = (o - rounded.to(tl.float32)).to(O.dtype.element_ty)
        put(head_of(REST, os, b, h), row, os, inside, rest, D, DP)
    tl.store(LSE + bh.to(tl.int64) * N + row, top + tl.log2(z), inside)
    tl.store(FAR + bh.to(tl.int64) * N + row, far / (z * tl.load(TILES + b * at[3])), inside)
