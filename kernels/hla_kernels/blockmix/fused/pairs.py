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

from ...hla.fused.tiles import load_rows, store_rows
from .geometry import at_head, keep_of, scale_of

NO_SPECIALIZE = ["xs", "ys", "zs", "outs", "qs", "ks", "vs", "gs", "dks", "dvs", "ms", "GEO", "N", "H", "BH", "M", "G",
                 "step", "scale", "eps"]  # fmt: skip


@triton.jit
def tokens_at(keep, start, N, BN: tl.constexpr):
    """Return the positions of a tile, and which of them are tokens that are not padded."""
    i = start + tl.arange(0, BN)
    live = i < N
    if keep is not None:
        live = live & (tl.load(keep + i, mask=live, other=0) != 0)
    return i, live


@triton.jit
def rows(ptr, i, stride, live, W: tl.constexpr):
    """Load rows i in one tile, zeros where not live and beyond D."""
    return load_rows(ptr, i.to(tl.int64), stride, live, W, False)[0]


@triton.jit
def put(ptr, i, stride, live, x, W: tl.constexpr):
    """Store what `rows` loads."""
    store_rows(ptr, i.to(tl.int64), stride, live, (x, x), W)


@triton.jit
def against(x, y, PREC: tl.constexpr):
    """Return x y' for loaded rows, float32."""
    return tl.dot(x, tl.trans(y), input_precision=PREC)


@triton.jit
def summed(acc, x, w, PREC: tl.constexpr):
    """Return acc + x' w for loaded rows x [I, .] and computed w [I, J]."""
    return tl.dot(tl.trans(x), w.to(x.dtype), acc, input_precision=PREC)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def blockmix_spread(m, E, COLUMNS, ms, GEO, N, M, MP: tl.constexpr, BN: tl.constexpr):
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
def blockmix_pair_queries(
    x, y, z, E, COLUMNS, keep, scales, out, O32, F, DELTA, xs, ys, zs, outs, N, H, G, step, scale, eps,
    NORM: tl.constexpr, BACK: tl.constexpr, ALIGN: tl.constexpr, X: tl.constexpr, Z: tl.constexpr, B: tl.constexpr,
    PREC: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compute o of BQ queries from x, y, z = q, k, v, and for a backward (or None) O32 [B H, N, Dv] and F [B H, N], o
    and f in float32. BACK: dq from g, v, k, and DELTA [B H, N] = g_i . o_i; O32, F and DELTA are None without a ratio.

    step: numbers from one head of COLUMNS to the next.
    """
    bh = tl.program_id(1)
    y, z = at_head(y, ys, bh, H, G, ALIGN), at_head(z, zs, bh, H, G, ALIGN)
    keep = keep_of(keep, bh, H, N)
    s = scale_of(scales, scale, bh, H)
    COLUMNS += (bh % H).to(tl.int64) * step
    i, live = tokens_at(keep, tl.program_id(0) * BQ, N, BQ)
    tx = rows(at_head(x, xs, bh, H, 1, ALIGN), i, xs[1] * ALIGN, live, X)
    e = rows(E, i, B.D, i < N, B)
    at = bh.to(tl.int64) * N
    f, acc = tl.full([BQ], 1.0, tl.float32) * s, tl.full([Z.D1, BQ], 0.0, tl.float32)
    total = tl.zeros([BQ], tl.float32)  # the denominator, or g_i . o_i
    if BACK and NORM:
        f = tl.load(F + at + i, mask=live, other=0.0)
        total = tl.sum(rows(O32 + at * X.D, i, X.D, live, X) * tx.to(tl.float32), 1)
        tl.store(DELTA + at + i, total, mask=i < N)
    for start in range(0, N, BK):
        j, there = tokens_at(keep, start, N, BK)
        ty = rows(y, j, ys[1] * ALIGN, there, X)
        tz = rows(z, j, zs[1] * ALIGN, there, Z)
        a = against(tx, ty, PREC)
        if BACK:
            a -= total[:, None]
        a *= against(e, rows(COLUMNS, j, B.D, j < N, B), PREC)
        high = a.to(tz.dtype)
        acc = summed(acc, tz, tl.trans(high), PREC)
        if NORM and not BACK:  # rounded weights would change g_i . o_i, the same error in all P_ij of a query
            total += tl.sum(a, 1)
            acc = summed(acc, tz, tl.trans(a - high.to(tl.float32)), PREC)
    if NORM and not BACK:
        f = s / tl.where(live, total * s + eps, 1.0)
    found = tl.trans(acc) * f[:, None]
    put(at_head(out, outs, bh, H, 1, ALIGN), i, outs[1] * ALIGN, live, found, Z)
    if F is not None and not BACK:
        tl.store(F + at + i, f, mask=i < N)
        put(O32 + at * Z.D, i, Z.D, i < N, found, Z)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def blockmix_pair_keys(
    q, k, v, g, E, COLUMNS, keep, scales, F, DELTA, dk, dv, PARTS, qs, ks, vs, gs, dks, dvs, N, H, BH, M, G, step,
    scale, ALIGN: tl.constexpr, D: tl.constexpr, V: tl.constexpr, B: tl.constexpr, PREC: tl.constexpr, BQ: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv of BK keys for one query head, and their part of dm in PARTS [H, B, tiles of keys, M, M]."""
    tile, bh = tl.program_id(0), tl.program_id(1)
    q, g = at_head(q, qs, bh, H, 1, ALIGN), at_head(g, gs, bh, H, 1, ALIGN)
    keep = keep_of(keep, bh, H, N)
    s = scale_of(scales, scale, bh, H)
    j, there = tokens_at(keep, tile * BK, N, BK)
    y = rows(at_head(k, ks, bh, H, G, ALIGN), j, ks[1] * ALIGN, there, D)
    z = rows(at_head(v, vs, bh, H, G, ALIGN), j, vs[1] * ALIGN, there, V)
    columns = rows(COLUMNS + (bh % H).to(tl.int64) * step, j, B.D, j < N, B)
    acc_k, acc_v = tl.full([D.D1, BK], 0.0, tl.float32), tl.full([V.D1, BK], 0.0, tl.float32)
    acc_m = tl.full([B.D, BK], 0.0, tl.float32)
    at = bh.to(tl.int64) * N
    for start in range(0, N, BQ):
        i, live = tokens_at(keep, start, N, BQ)
        x = rows(q, i, qs[1] * ALIGN, live, D)
        tg = rows(g, i, gs[1] * ALIGN, live, V)
        e = rows(E, i, B.D, i < N, B)
        f, delta = tl.full([BQ], 1.0, tl.float32) * s, tl.zeros([BQ], tl.float32)
        if F is not None:
            f = tl.load(F + at + i, mask=live, other=0.0)
            delta = tl.load(DELTA + at + i, mask=live, other=0.0)
        w, score = against(e, columns, PREC), against(x, y, PREC) * f[:, None]
        p = against(tg, z, PREC) - delta[:, None]
        acc_m = summed(acc_m, e, score * p, PREC)
        acc_v = summed(acc_v, tg, score * w, PREC)
        acc_k = summed(acc_k, x, p * w * f[:, None], PREC)
    put(at_head(dk, dks, bh, H, 1, ALIGN), j, dks[1] * ALIGN, there, tl.trans(acc_k), D)
    put(at_head(dv, dvs, bh, H, 1, ALIGN), j, dvs[1] * ALIGN, there, tl.trans(acc_v), V)
    own, half = rows(E, j, B.D, j < N, B), acc_m.to(E.dtype.element_ty)
    part = summed(tl.full([B.D, B.D], 0.0, tl.float32), own, tl.trans(half), PREC)  # [block of key, block of query]
    part = summed(part, own, tl.trans(acc_m - half.to(tl.float32)), PREC)
    a = tl.arange(0, B.D)
    PARTS += (((bh % H) * (BH // H) + bh // H).to(tl.int64) * tl.num_programs(0) + tile) * M * M
    tl.store(PARTS + a[None, :] * M + a[:, None], part, mask=(a < M)[:, None] & (a < M)[None, :])
