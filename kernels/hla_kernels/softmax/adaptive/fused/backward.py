"""Gradients for a given routing: of query tiles, pooled key tiles, and keys and values of tiles.

With p_tj the normalized weights and delta_t = g_t.o_t, the gradient of s_tj is p_tj (g_t.v_j - delta_t). The gradient
of the exponent b_tb of a far tile is e_tb (n_b (g_t.v_b - delta_t) + c_t), with e_tb = exp(b_tb) / denominator and
c_t = g_t.(H'q_t) / tiles.
"""

import triton
import triton.language as tl

from .tiles import (
    FREE,
    LOWEST,
    UNITS,
    added,
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
    store,
    zero_sums,
)


@triton.jit(do_not_specialize=FREE)
def adaptive_for_queries(
    Q, K, V, QTOKENS, KTOKENS, MEAN, VALUE, LOGN, MOMENT, CHOSEN, LIST, TILES, KBAR, O, REST, G, LSE, FAR, DELTA, C, DQ,
    qs, ks, vs, os, gs, dqs, at, sizes, heads, groups, factor, scale,
    BQ: tl.constexpr, PARTS: tl.constexpr, KT: tl.constexpr, BJ: tl.constexpr, BM: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr,
):  # fmt: skip
    """Compute DQ, DELTA and C [B, H, N]; other arguments as in `forward.adaptive_output`.

    The gradients of the scores of a query sum to zero, and DQ does not change if KBAR [B Hk, D] is subtracted from all
    keys. Their rounded sum times KBAR is: with keys of large mean, their rounding errors are as large as DQ.
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
    g = get(head_of(G, gs, b, h), row, gs, inside, D, DP)
    o = get(head_of(O, os, b, h), row, os, inside, D, DP).to(tl.float32)
    if REST is not None:
        o += get(head_of(REST, os, b, h), row, os, inside, D, DP).to(tl.float32)
    delta = tl.sum(o * g.to(tl.float32), 1)
    place = bh.to(tl.int64) * N + row
    lse = tl.load(LSE + place, inside, other=float("inf"))
    c = tl.zeros([BQ], tl.float32)
    dq = zero_sums(q, BQ, DP)
    if MOMENT is not None:
        d = tl.arange(0, DP)
        moment = load(MOMENT + hk * D * D, d, D, d < D, D, DP)
        by_grad = projected(g, tl.trans(moment))
        c = tl.where(on_grid, tl.sum(by_row(by_grad, q) * q.to(tl.float32), 1) * scale, 0.0)
        far = tl.load(FAR + place, inside, other=0.0) * tl.load(TILES + b * at[3])
        dq += by_grad * per_row(far, q)
    tl.store(DELTA + place, delta, inside)
    tl.store(C + place, c, inside)
    total = tl.zeros([BQ], tl.float32)
    next_chosen = is_chosen(CHOSEN, 0, tl.where(on_grid, T, 0), BM)
    for start in range(0, tl.where(on_grid, T, 0), BM):
        m, there, mean, logn = far_tiles(start, MEAN, LOGN, T, D, DP, BM)
        power = products(q, mean) * factor
        chosen = next_chosen
        next_chosen = is_chosen(CHOSEN, start + BM, T, BM)
        far_tile = (chosen == 0) & (logn > LOWEST)
        e = tl.exp2(tl.where(far_tile[None, :], power - lse[:, None], -float("inf")))
        n = tl.where(far_tile, tl.exp2(logn), 0.0)
        dp = products(g, load(VALUE, m, D, there, D, DP)) - delta[:, None]
        db = (e * (n[None, :] * dp + c[:, None])).to(mean.dtype)
        total += tl.sum(db.to(tl.float32), 1)
        dq = mixed(dq, db, mean)
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
        p = tl.exp2(tl.where(there[None, :], products(q, k) * factor - lse[:, None], -float("inf")))
        ds = (p * (products(g, v) - delta[:, None])).to(k.dtype)
        total += tl.sum(ds.to(tl.float32), 1)
        dq = mixed(dq, ds, k)
    d = tl.arange(0, DP)
    dq = by_row(dq, q) - total[:, None] * tl.load(KBAR + hk * D + d, d < D, other=0.0)[None, :]
    row = query_rows(QTOKENS + b.to(tl.int64) * at[0], part, True, BQ)  # again, rather than kept in registers
    put(head_of(DQ, dqs, b, h), row, dqs, row >= 0, (dq * scale).to(DQ.dtype.element_ty), D, DP)


@triton.jit(do_not_specialize=FREE)
def adaptive_for_tiles(
    Q, QTOKENS, MEAN, VALUE, LOGN, CHOSEN, G, LSE, DELTA, C, DMEAN, DVALUE, qs, gs, at, sizes, U, heads, groups, factor,
    scale, BQ: tl.constexpr, PARTS: tl.constexpr, BM: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Compute DMEAN, DVALUE [B Hk, T, D] of BM far tiles. U: number of parts of query tiles; heads: number of key
    heads."""
    tile, bhk = tl.program_id(0), tl.program_id(1)
    b, hk = bhk // heads, bhk % heads
    N, T = sizes[0], sizes[2]
    own = bhk.to(tl.int64) * T * D
    m, there, mean, logn = far_tiles(tile * BM, MEAN + own, LOGN + b.to(tl.int64) * at[2], T, D, DP, BM)
    value = load(VALUE + own, m, D, there, D, DP)
    n = tl.where(logn > LOWEST, tl.exp2(logn), 0.0)
    QTOKENS += b.to(tl.int64) * at[0]
    dmean, dvalue = tl.zeros([DP, BM], tl.float32), tl.zeros([DP, BM], tl.float32)
    next_row = query_rows(QTOKENS, 0, True, BQ)  # a step ahead, as in `tiles.exact_rows`
    next_chosen = is_chosen(CHOSEN + (b * heads + hk).to(tl.int64) * groups * at[4], tile * BM, T, BM)
    for i in range(groups * U):
        h = hk * groups + i // U
        bh = (b * heads * groups + h).to(tl.int64)
        row, inside = next_row, next_row >= 0
        next_row = query_rows(QTOKENS, (i + 1) % U, True, BQ)
        q = get(head_of(Q, qs, b, h), row, qs, inside, D, DP)
        g = get(head_of(G, gs, b, h), row, gs, inside, D, DP)
        lse = tl.load(LSE + bh * N + row, inside, other=float("inf"))
        delta = tl.load(DELTA + bh * N + row, inside, other=0.0)
        c = tl.load(C + bh * N + row, inside, other=0.0)
        chosen, next_u, next_h = next_chosen, (i + 1) % U, (b * heads + hk) * groups + (i + 1) // U
        next_here = CHOSEN + next_h.to(tl.int64) * at[4] + (next_u // PARTS).to(tl.int64) * T
        next_chosen = is_chosen(next_here, tile * BM, tl.where(i + 1 < groups * U, T, 0), BM)
        far_tile = (chosen == 0) & (n > 0)
        e = tl.exp2(tl.where(far_tile[None, :], products(q, mean) * factor - lse[:, None], -float("inf")))
        dvalue = added(dvalue, g, e * n[None, :])
        db = e * (n[None, :] * (products(g, value) - delta[:, None]) + c[:, None])
        dmean = added(dmean, q, db)
    store(DMEAN + own, m, D, there, tl.trans(dmean * scale), D, DP)
    store(DVALUE + own, m, D, there, tl.trans(dvalue), D, DP)


@triton.jit
def reader(entry, i, count, behind):
    """Return (number, tiles that it reads, as bits) of the i-th query tile that reads some keys: entries of the list
    for i < count, then those from `behind` on, which read all tiles."""
    return tl.where(i < count, entry & (UNITS - 1), behind + i - count), tl.where(i < count, entry // UNITS, -1)


@triton.jit(do_not_specialize=FREE)
def adaptive_for_keys(
    Q, K, V, QTOKENS, KTOKENS, LIST, COUNT, MEAN, VALUE, LOGN, DMEAN, DVALUE, DMOMENT, G, LSE, DELTA, DK, DV, qs, ks,
    vs, gs, dks, dvs, at, sizes, heads, groups, factor, scale,
    BQ: tl.constexpr, PARTS: tl.constexpr, KT: tl.constexpr, BK: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Compute DK, DV of BK consecutive slots of KTOKENS: of some key tiles, or a part of one.

    They add the gradients from the pooled quantities of the tile, and from the queries that read these keys exactly:
    the query tiles in LIST [B Hs, groups of key tiles, U] and COUNT (`choose.adaptive_invert`), or all. heads: number
    of key heads.
    """
    group, bhk = tl.program_id(0), tl.program_id(1)
    b, hk = bhk // heads, bhk % heads
    N, U, T = sizes[0], sizes[1], sizes[2]
    slots = T * KT
    n_groups = tl.cdiv(slots, BK)
    on_grid = group < n_groups
    # slots on the grid fill whole groups; slots of other tokens start a new group
    e = tl.where(on_grid, group * BK, slots + (group - n_groups) * BK) + tl.arange(0, BK)
    last = tl.where(on_grid, slots, slots + sizes[4] * KT)
    row = tl.load(KTOKENS + b.to(tl.int64) * at[1] + e, e < last, other=-1)
    there = row >= 0
    k = get(head_of(K, ks, b, hk), row, ks, there, D, DP)
    v = get(head_of(V, vs, b, hk), row, vs, there, D, DP)
    dk, dv = tl.zeros([DP, BK], tl.float32), tl.zeros([DP, BK], tl.float32)
    if on_grid:
        own, tile = bhk.to(tl.int64) * T * D, e // KT
        n = tl.maximum(tl.exp2(tl.load(LOGN + b.to(tl.int64) * at[2] + tile, there, other=0.0)), 1.0)
        by_key = load(DMEAN + own, tile, D, there, D, DP)
        dk += tl.trans(by_key / n[:, None])
        dv += tl.trans(load(DVALUE + own, tile, D, there, D, DP) / n[:, None])
        if DMOMENT is not None:
            d = tl.arange(0, DP)
            DMOMENT += bhk.to(tl.int64) * D * D
            moment = load(DMOMENT, d, D, d < D, D, DP)
            away = v.to(tl.float32) - load(VALUE + own, tile, D, there, D, DP).to(tl.float32)
            dk += products(moment, away.to(k.dtype))
            moment = tl.trans(moment)
            if k.dtype == tl.float32:  # shared memory has no room for a transposed copy
                moment = tl.load(DMOMENT + d[None, :] * D + d[:, None], (d < D)[None, :] & (d < D)[:, None], other=0.0)
            rest = k.to(tl.float32) - load(MEAN + own, tile, D, there, D, DP).to(tl.float32)
            dv += products(moment, rest.to(k.dtype))
    bit = tl.arange(0, BK) // KT
    QTOKENS += b.to(tl.int64) * at[0]
    for g in range(groups):
        h = hk * groups + g
        bh = (b * heads * groups + h).to(tl.int64)
        listed = bh * at[6] * tl.cdiv(slots, max(BK, KT)) + group * BK // max(BK, KT)
        QH, GH = head_of(Q, qs, b, h), head_of(G, gs, b, h)
        count = tl.load(COUNT + listed, on_grid, other=0)
        total = (tl.where(on_grid, count, U) + sizes[3]) * PARTS
        # rows are loaded a step ahead, and the list of query tiles two, as in `tiles.exact_rows`
        behind = tl.where(on_grid, U, 0)
        OWN = LIST + listed * U
        u, next_tiles = reader(tl.load(OWN, count > 0, other=0), 0, count, behind)
        next_rows = query_rows(QTOKENS, u * PARTS, total > 0, BQ)
        entry = tl.load(OWN + 1 // PARTS, count > 1 // PARTS, other=0)
        for i in range(total):
            rows, inside, tiles = next_rows, next_rows >= 0, next_tiles
            u, next_tiles = reader(entry, (i + 1) // PARTS, count, behind)
            next_rows = query_rows(QTOKENS, u * PARTS + (i + 1) % PARTS, i + 1 < total, BQ)
            entry = tl.load(OWN + (i + 2) // PARTS, (i + 2) // PARTS < count, other=0)
            q, grad = get(QH, rows, qs, inside, D, DP), get(GH, rows, gs, inside, D, DP)
            lse = tl.load(LSE + bh * N + rows, inside, other=float("inf"))
            delta = tl.load(DELTA + bh * N + rows, inside, other=0.0)
            read = there & ((tiles >> bit) & 1 != 0)
            p = tl.exp2(tl.where(read[None, :], products(q, k) * factor - lse[:, None], -float("inf")))
            dv = added(dv, grad, p)
            dk = added(dk, q, p * (products(grad, v) - delta[:, None]) * scale)
    put(head_of(DK, dks, b, hk), row, dks, there, tl.trans(dk.to(DK.dtype.element_ty)), D, DP)
    put(head_of(DV, dvs, b, hk), row, dvs, there, tl.trans(dv.to(DV.dtype.element_ty)), D, DP)
