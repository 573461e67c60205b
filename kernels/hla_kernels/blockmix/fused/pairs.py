"""Kernels of first-order block mixing by pairs of tokens, for sequences too short for moments.

    A_ij = (q_i . k_j) m[block of i, block of j],    o_i = f_i Sum_j A_ij v_j,    f_i = s or s / (s Sum_j A_ij + eps)
    P_ij = f_i (g_i . v_j - g_i . o_i),  dq_i = Sum_j m_ij P_ij k_j,  dk_j = Sum_i m_ij P_ij q_i,
    dv_j = Sum_i f_i A_ij g_i,  dm_ab = the sum of (q_i . k_j) P_ij over i in block a and j in block b

The mixing weights of a tile of pairs are a product as well: of E [N, MP], one-hot rows that tell the block of a token,
and COLUMNS [heads of m, N, MP], the column of m of its block. The first operand of a product is always loaded rows:
products with a first operand in registers are miscompiled.
"""

import triton
import triton.language as tl

from .geometry import at_head, keep_of, scale_of

NO_SPECIALIZE = ["qs", "ks", "vs", "os", "gs", "dqs", "dks", "dvs", "ms", "GEO", "N", "H", "BH", "M", "G", "step",
                 "scale", "eps"]  # fmt: skip


@triton.jit
def tokens_at(keep, start, N, BN: tl.constexpr):
    """Return the positions of a tile, and which of them are tokens that are not padded."""
    i = start + tl.arange(0, BN)
    live = i < N
    if keep is not None:
        live = live & (tl.load(keep + i, mask=live, other=0) != 0)
    return i, live


@triton.jit
def rows(ptr, i, stride, live, D: tl.constexpr, DP: tl.constexpr):
    """Load rows i as [., DP], zeros where not live and beyond D."""
    c = tl.arange(0, DP)
    kept = live[:, None]
    if DP > D:
        kept = kept & (c < D)[None, :]
    return tl.load(ptr + i.to(tl.int64)[:, None] * stride + c[None, :], mask=kept, other=0.0)


@triton.jit
def put(ptr, i, stride, live, x, D: tl.constexpr, DP: tl.constexpr):
    """Store what `rows` loads."""
    c = tl.arange(0, DP)
    kept = live[:, None]
    if DP > D:
        kept = kept & (c < D)[None, :]
    tl.store(ptr + i.to(tl.int64)[:, None] * stride + c[None, :], x.to(ptr.dtype.element_ty), mask=kept)


@triton.jit
def against(x, y, PREC: tl.constexpr):
    """Return x y' for loaded rows, float32."""
    return tl.dot(x, tl.trans(y), input_precision=PREC)


@triton.jit
def summed(acc, x, w, PREC: tl.constexpr):
    """Return acc + x' w for loaded rows x [I, .] and computed w [I, J]."""
    return tl.dot(tl.trans(x), w.to(x.dtype), acc, input_precision=PREC)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def spread(m, E, COLUMNS, ms, GEO, N, M, MP: tl.constexpr, BN: tl.constexpr):
    """Compute E and COLUMNS of BN tokens for one head of m; GEO as in `geometry`."""
    i = tl.program_id(0) * BN + tl.arange(0, BN)
    head = tl.program_id(1).to(tl.int64)
    prefix, t, h, w, mt, mh, mw, _ = GEO
    c = tl.maximum(i - prefix, 0)
    line = c // w
    it, ih, iw = ((line // h + 1) * mt - 1) // t, ((line % h + 1) * mh - 1) // h, ((c % w + 1) * mw - 1) // w
    block = tl.where(i < prefix, 0, (it * mh + ih) * mw + iw + (prefix > 0).to(tl.int32))
    a = tl.arange(0, MP)
    inside = (i < N)[:, None] & (a < M)[None, :]
    column = tl.load(m + head * ms[0] + a[None, :] * ms[1] + block[:, None] * ms[2], mask=inside, other=0.0)
    place = i.to(tl.int64)[:, None] * MP + a[None, :]
    tl.store(COLUMNS + head * N * MP + place, column.to(COLUMNS.dtype.element_ty), mask=(i < N)[:, None])
    if head == 0:
        own = (block[:, None] == a[None, :]).to(E.dtype.element_ty)
        tl.store(E + place, own, mask=(i < N)[:, None])


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def pair_outputs(
    q, k, v, E, COLUMNS, keep, scales, o, O32, F, qs, ks, vs, os, N, H, G, step, scale, eps, NORM: tl.constexpr,
    ALIGN: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, VP: tl.constexpr, MP: tl.constexpr,
    PREC: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compute o of BQ queries, and for a backward (or None) O32 [B H, N, DV] and F [B H, N], o and f in float32. step:
    numbers from one head of COLUMNS to the next."""
    bh = tl.program_id(1)
    k, v = at_head(k, ks, bh, H, G, ALIGN), at_head(v, vs, bh, H, G, ALIGN)
    keep = keep_of(keep, bh, H, N)
    s = scale_of(scales, scale, bh, H)
    COLUMNS += (bh % H).to(tl.int64) * step
    i, live = tokens_at(keep, tl.program_id(0) * BQ, N, BQ)
    x = rows(at_head(q, qs, bh, H, 1, ALIGN), i, qs[1] * ALIGN, live, D, DP)
    e = rows(E, i, MP, i < N, MP, MP)
    acc, den = tl.zeros([VP, BQ], tl.float32), tl.zeros([BQ], tl.float32)
    for start in range(0, N, BK):
        j, there = tokens_at(keep, start, N, BK)
        y = rows(k, j, ks[1] * ALIGN, there, D, DP)
        z = rows(v, j, vs[1] * ALIGN, there, DV, VP)
        a = against(x, y, PREC) * against(e, rows(COLUMNS, j, MP, j < N, MP, MP), PREC)
        if NORM:
            den += tl.sum(a, 1)
        high = a.to(z.dtype)
        acc = summed(acc, z, tl.trans(high), PREC)
        if NORM:  # rounded weights would change g_i . o_i, the same error in all P_ij of a query
            acc = summed(acc, z, tl.trans(a - high.to(tl.float32)), PREC)
    f = tl.full([BQ], 1.0, tl.float32) * s
    if NORM:
        f = s / tl.where(live, den * s + eps, 1.0)
    out = tl.trans(acc) * f[:, None]
    put(at_head(o, os, bh, H, 1, ALIGN), i, os[1] * ALIGN, live, out, DV, VP)
    if F is not None:
        tl.store(F + bh.to(tl.int64) * N + i, f, mask=i < N)
        put(O32 + bh.to(tl.int64) * N * DV, i, DV, i < N, out, DV, VP)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def pair_query_grads(
    q, k, v, g, E, COLUMNS, keep, scales, O32, F, DELTA, dq, qs, ks, vs, gs, dqs, N, H, G, step, scale,
    ALIGN: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, VP: tl.constexpr, MP: tl.constexpr,
    PREC: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compute dq of BQ queries and DELTA [B H, N] = g_i . o_i. O32, F, DELTA: None without a ratio."""
    bh = tl.program_id(1)
    k, v = at_head(k, ks, bh, H, G, ALIGN), at_head(v, vs, bh, H, G, ALIGN)
    keep = keep_of(keep, bh, H, N)
    s = scale_of(scales, scale, bh, H)
    COLUMNS += (bh % H).to(tl.int64) * step
    i, live = tokens_at(keep, tl.program_id(0) * BQ, N, BQ)
    tg = rows(at_head(g, gs, bh, H, 1, ALIGN), i, gs[1] * ALIGN, live, DV, VP)
    e = rows(E, i, MP, i < N, MP, MP)
    f, delta = tl.full([BQ], 1.0, tl.float32) * s, tl.zeros([BQ], tl.float32)
    if F is not None:
        at = bh.to(tl.int64) * N
        f = tl.load(F + at + i, mask=live, other=0.0)
        delta = tl.sum(rows(O32 + at * DV, i, DV, live, DV, VP) * tg.to(tl.float32), 1)
        tl.store(DELTA + at + i, delta, mask=i < N)
    acc = tl.zeros([DP, BQ], tl.float32)
    for start in range(0, N, BK):
        j, there = tokens_at(keep, start, N, BK)
        y = rows(k, j, ks[1] * ALIGN, there, D, DP)
        p = against(tg, rows(v, j, vs[1] * ALIGN, there, DV, VP), PREC) - delta[:, None]
        p *= against(e, rows(COLUMNS, j, MP, j < N, MP, MP), PREC)
        acc = summed(acc, y, tl.trans(p), PREC)
    put(at_head(dq, dqs, bh, H, 1, ALIGN), i, dqs[1] * ALIGN, live, tl.trans(acc) * f[:, None], D, DP)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def pair_key_grads(
    q, k, v, g, E, COLUMNS, keep, scales, F, DELTA, dk, dv, PARTS, qs, ks, vs, gs, dks, dvs, N, H, BH, M, G, step,
    scale, ALIGN: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, VP: tl.constexpr, MP: tl.constexpr,
    PREC: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv of BK keys for one query head, and their part of dm in PARTS [H, B, tiles of keys, M, M]."""
    tile, bh = tl.program_id(0), tl.program_id(1)
    q, g = at_head(q, qs, bh, H, 1, ALIGN), at_head(g, gs, bh, H, 1, ALIGN)
    keep = keep_of(keep, bh, H, N)
    s = scale_of(scales, scale, bh, H)
    j, there = tokens_at(keep, tile * BK, N, BK)
    y = rows(at_head(k, ks, bh, H, G, ALIGN), j, ks[1] * ALIGN, there, D, DP)
    z = rows(at_head(v, vs, bh, H, G, ALIGN), j, vs[1] * ALIGN, there, DV, VP)
    columns = rows(COLUMNS + (bh % H).to(tl.int64) * step, j, MP, j < N, MP, MP)
    acc_k, acc_v = tl.zeros([DP, BK], tl.float32), tl.zeros([VP, BK], tl.float32)
    acc_m = tl.zeros([MP, BK], tl.float32)
    at = bh.to(tl.int64) * N
    for start in range(0, N, BQ):
        i, live = tokens_at(keep, start, N, BQ)
        x = rows(q, i, qs[1] * ALIGN, live, D, DP)
        tg = rows(g, i, gs[1] * ALIGN, live, DV, VP)
        e = rows(E, i, MP, i < N, MP, MP)
        f, delta = tl.full([BQ], 1.0, tl.float32) * s, tl.zeros([BQ], tl.float32)
        if F is not None:
            f = tl.load(F + at + i, mask=live, other=0.0)
            delta = tl.load(DELTA + at + i, mask=live, other=0.0)
        w, score = against(e, columns, PREC), against(x, y, PREC) * f[:, None]
        p = against(tg, z, PREC) - delta[:, None]
        acc_m = summed(acc_m, e, score * p, PREC)
        acc_v = summed(acc_v, tg, score * w, PREC)
        acc_k = summed(acc_k, x, p * w * f[:, None], PREC)
    put(at_head(dk, dks, bh, H, 1, ALIGN), j, dks[1] * ALIGN, there, tl.trans(acc_k), D, DP)
    put(at_head(dv, dvs, bh, H, 1, ALIGN), j, dvs[1] * ALIGN, there, tl.trans(acc_v), DV, VP)
    own, half = rows(E, j, MP, j < N, MP, MP), acc_m.to(E.dtype.element_ty)
    part = summed(tl.zeros([MP, MP], tl.float32), own, tl.trans(half), PREC)  # [block of key, block of query]
    part = summed(part, own, tl.trans(acc_m - half.to(tl.float32)), PREC)
    a = tl.arange(0, MP)
    PARTS += (((bh % H) * (BH // H) + bh // H).to(tl.int64) * tl.num_programs(0) + tile) * M * M
    tl.store(PARTS + a[None, :] * M + a[:, None], part, mask=(a < M)[:, None] & (a < M)[None, :])
