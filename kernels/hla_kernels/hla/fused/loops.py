"""The four passes over the tokens of one head. Every kernel is one or more of them around the D x D algebra of one
head.

q, k, v, g, o point at the first token of the head; strides are in elements. phi(q), phi(k) have width F = F1 + F2, v
and g V = V1 + V2.

    sum_moments   P = Sum k v'  S = Sum k k'  C = Sum q v'  R = Sum k q'  W = Sum q q', token sums, and, when
                  GRAD, dM' = Sum g q'
    sum_readout   dM' = Sum g q' and, normalised, dm1, through the division
    read_out      o = q M + row, or q M / (q.m1 + eps)
    write_grads   dq, dk, dv from the weights of `algebra.weights`
"""

import triton
import triton.language as tl

from .maps import load_features, phi, phi_grad
from .tiles import (
    axpy2,
    load_rows,
    load_tail,
    outer4,
    outer4_begin,
    outer4_end,
    rowdot,
    rowmul,
    square4,
    store_rows,
    trans4,
    zero_rows,
    zeros2,
    zeros4,
)  # fmt: skip


@triton.jit
def add_sum(s, x, D2: tl.constexpr):
    """s + the tokens of a tile, 16 rows apart (the narrow second part: row by row), so that no tile needs an exchange
    of threads."""
    s2 = s[1]
    if D2 > 0:
        s2 = s[1] + x[1].to(tl.float32)
    x1 = tl.reshape(x[0].to(tl.float32), [x[0].shape[0] // 16, 16, x[0].shape[1]])
    return s[0] + tl.sum(x1, 0), s2


@triton.jit
def begin_sum(BN: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, NEEDED: tl.constexpr):
    """The accumulator of add_sum for tiles of BN tokens."""
    x1 = tl.zeros([1, 1], tl.float32)
    x2 = x1
    if NEEDED:
        x1 = tl.zeros([16, D1], tl.float32)
    if NEEDED and D2 > 0:
        x2 = tl.zeros([BN, D2], tl.float32)
    return x1, x2


@triton.jit
def end_sum(s, D1: tl.constexpr, D2: tl.constexpr, NEEDED: tl.constexpr):
    """The vector that add_sum summed (zero when not needed)."""
    out = zeros2(D1, D2)
    if NEEDED:
        s2 = out[1]
        if D2 > 0:
            s2 = tl.sum(s[1], 0)
        out = (tl.sum(s[0], 0), s2)
    return out


@triton.jit
def as_row(x):
    """A vector as one row of a token tile."""
    return x[0][None, :], x[1][None, :]


@triton.jit
def outer_or_trans(
    acc, a, b, tail, A2: tl.constexpr, B2: tl.constexpr, NATURAL: tl.constexpr, TAIL: tl.constexpr, PREC: tl.constexpr
):
    """acc + a'b, or acc + b'a when not NATURAL, so that a transformed tile a is operand B."""
    if NATURAL:
        out = outer4(acc, a, b, tail, A2, B2, TAIL, PREC)
    else:
        out = outer4(acc, b, a, tail, B2, A2, False, PREC)
    return out


@triton.jit
def begin(
    A1: tl.constexpr, A2: tl.constexpr, B1: tl.constexpr, B2: tl.constexpr, NEEDED: tl.constexpr, NATURAL: tl.constexpr,
    SQUARE: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """The accumulator of outer_or_trans, or of square4."""
    if not NEEDED:
        out = zeros4(1, 0, 1, 0)
    elif NATURAL:
        out = outer4_begin(A1, A2, B1, B2, SQUARE, TAIL)
    else:
        out = outer4_begin(B1, B2, A1, A2, SQUARE, False)
    return out


@triton.jit
def end(acc, A2: tl.constexpr, B2: tl.constexpr, NEEDED: tl.constexpr, NATURAL: tl.constexpr):
    """The sum, in the orientation it was accumulated in."""
    out = acc
    if NEEDED:
        out = outer4_end(acc, A2 if NATURAL else B2)
    return out


@triton.jit
def sum_moments(
    q, k, v, g, qn, kn, vn, gn, lo, hi, ORDER: tl.constexpr, SUMS: tl.constexpr, GRAD: tl.constexpr,
    NATURAL: tl.constexpr, ONCE: tl.constexpr, FMAP: tl.constexpr, D: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr,
    F1: tl.constexpr, F2: tl.constexpr, DV: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, BN: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    """(P, S, C, R, W), (sum q, sum k, sum v), dM', sum g over tokens lo..hi; P and C transposed unless NATURAL.

    ONCE: k and v are not read again; let q stay in L2 instead. ORDER 6: C and R, what `polynomial` has beyond hla3.
    """
    HAS_P: tl.constexpr = ORDER != 2 and ORDER != 6
    HAS_S: tl.constexpr = ORDER == 2 or ORDER == 4 or ORDER == 5
    HAS_C: tl.constexpr = ORDER == 2 or ORDER >= 5
    HAS_R: tl.constexpr = ORDER == 3 or ORDER >= 5
    HAS_W: tl.constexpr = ORDER == 4 or ORDER == 5
    TAIL: tl.constexpr = FMAP == 0 and F2 > 0 and V2 > 0 and F1 >= 64 and V1 >= 64
    mp = begin(F1, F2, V1, V2, HAS_P, NATURAL, False, TAIL)
    ms = begin(F1, F2, F1, F2, HAS_S, True, True, TAIL)
    mc = begin(F1, F2, V1, V2, HAS_C, NATURAL, False, TAIL)
    mr = begin(F1, F2, F1, F2, HAS_R, True, False, TAIL)
    mw = begin(F1, F2, F1, F2, HAS_W, True, True, TAIL)
    dm = begin(V1, V2, F1, F2, GRAD, True, False, TAIL)
    sq = begin_sum(BN, F1, F2, SUMS)
    sk = begin_sum(BN, F1, F2, SUMS)
    sv = begin_sum(BN, V1, V2, SUMS)
    sg = begin_sum(BN, V1, V2, SUMS and GRAD)
    i = tl.arange(0, BN)
    zero = tl.full([], 0, tl.int64)
    for start in range(lo, hi, BN):
        live = start + i < hi
        fk = load_features(k + (zero + start) * kn, i, kn, live, FMAP, D, R1, R2, ONCE)
        tv = load_rows(v + (zero + start) * vn, i, vn, live, DV, V1, V2, ONCE)
        fq = load_features(q + (zero + start) * qn, i, qn, live, FMAP, D, R1, R2, False)
        ek = i
        eq = i
        if TAIL and (HAS_P or HAS_S or HAS_R):
            ek = load_tail(k + (zero + start) * kn, i, kn, live, D, R1)
        if TAIL and (HAS_C or HAS_W):
            eq = load_tail(q + (zero + start) * qn, i, qn, live, D, R1)
        if HAS_P:
            mp = outer_or_trans(mp, fk, tv, ek, F2, V2, NATURAL, TAIL, PREC)
        if HAS_S:
            ms = square4(ms, fk, ek, F2, TAIL, PREC)
        if HAS_C:
            mc = outer_or_trans(mc, fq, tv, eq, F2, V2, NATURAL, TAIL, PREC)
        if HAS_R:
            mr = outer4(mr, fk, fq, ek, F2, F2, TAIL, PREC)
        if HAS_W:
            mw = square4(mw, fq, eq, F2, TAIL, PREC)
        if SUMS:
            sq = add_sum(sq, fq, F2)
            sk = add_sum(sk, fk, F2)
            sv = add_sum(sv, tv, V2)
        if GRAD:
            tg = load_rows(g + (zero + start) * gn, i, gn, live, DV, V1, V2, False)
            eg = i
            if TAIL:
                eg = load_tail(g + (zero + start) * gn, i, gn, live, DV, V1)
            dm = outer4(dm, tg, fq, eg, V2, F2, TAIL, PREC)
            if SUMS:
                sg = add_sum(sg, tg, V2)
    mp = end(mp, F2, V2, HAS_P, NATURAL)
    ms = end(ms, F2, F2, HAS_S, True)
    mc = end(mc, F2, V2, HAS_C, NATURAL)
    mr = end(mr, F2, F2, HAS_R, True)
    mw = end(mw, F2, F2, HAS_W, True)
    sums = (end_sum(sq, F1, F2, SUMS), end_sum(sk, F1, F2, SUMS), end_sum(sv, V1, V2, SUMS))
    return (mp, ms, mc, mr, mw), sums, end(dm, V2, F2, GRAD, True), end_sum(sg, V1, V2, SUMS and GRAD)


@triton.jit
def sum_readout(
    q, g, qn, gn, lo, hi, m, m1, vbar, eps, NORM: tl.constexpr, SUMS: tl.constexpr, FMAP: tl.constexpr, D: tl.constexpr,
    R1: tl.constexpr, R2: tl.constexpr, F1: tl.constexpr, F2: tl.constexpr, DV: tl.constexpr, V1: tl.constexpr,
    V2: tl.constexpr, BN: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """dM' [V, F], dm1 [F], sum g [V] over tokens lo..hi. NORM: g enters divided by the denominator, m [F, V], m1 and
    vbar are read."""
    TAIL: tl.constexpr = FMAP == 0 and not NORM and F2 > 0 and V2 > 0 and F1 >= 64 and V1 >= 64
    dm = begin(V1, V2, F1, F2, True, True, False, TAIL)
    dm1 = begin_sum(BN, F1, F2, NORM)
    sg = begin_sum(BN, V1, V2, SUMS)
    i = tl.arange(0, BN)
    zero = tl.full([], 0, tl.int64)
    for start in range(lo, hi, BN):
        live = start + i < hi
        fq = load_features(q + (zero + start) * qn, i, qn, live, FMAP, D, R1, R2, False)
        tg = load_rows(g + (zero + start) * gn, i, gn, live, DV, V1, V2, False)
        if NORM:
            y = rowmul(zero_rows(BN, V1, V2), fq, m, F2, V2, PREC)
            inverse = 1.0 / tl.where(live, rowdot(fq, m1, F2) + eps, 1.0)
            total = (eps * rowdot(tg, as_row(vbar), V2) - rowdot(tg, y, V2)) * inverse * inverse
            dm1 = add_sum(dm1, (fq[0].to(tl.float32) * total[:, None], fq[1].to(tl.float32) * total[:, None]), F2)
            fq = ((fq[0] * inverse[:, None]).to(tg[0].dtype), (fq[1] * inverse[:, None]).to(tg[0].dtype))
        eg = i
        if TAIL:
            eg = load_tail(g + (zero + start) * gn, i, gn, live, DV, V1)
        dm = outer4(dm, tg, fq, eg, V2, F2, TAIL, PREC)
        if SUMS:
            sg = add_sum(sg, tg, V2)
    return end(dm, V2, F2, True, True), end_sum(dm1, F1, F2, NORM), end_sum(sg, V1, V2, SUMS)


@triton.jit
def read_out(
    q, o, qn, on, lo, hi, m, m1, row, eps, NORM: tl.constexpr, ROW: tl.constexpr, FMAP: tl.constexpr, D: tl.constexpr,
    R1: tl.constexpr, R2: tl.constexpr, F1: tl.constexpr, F2: tl.constexpr, DV: tl.constexpr, V1: tl.constexpr,
    V2: tl.constexpr, BN: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Write o = q m (+ row) or, with den = q.m1 + eps, q m / den + vbar (1 - eps / den) for tokens lo..hi.

    Last tile first: it is the one still in L2. m is the operator of v - vbar when normalised and row is vbar.
    """
    i = tl.arange(0, BN)
    zero = tl.full([], 0, tl.int64)
    tiles = tl.cdiv(hi - lo, BN)
    for t in range(tiles):
        start = lo + (tiles - 1 - t) * BN
        live = start + i < hi
        fq = load_features(q + (zero + start) * qn, i, qn, live, FMAP, D, R1, R2, False)
        y = rowmul(zero_rows(BN, V1, V2), fq, m, F2, V2, PREC)
        if NORM:
            inverse = 1.0 / tl.where(live, rowdot(fq, m1, F2) + eps, 1.0)
            y = (y[0] * inverse[:, None], y[1] * inverse[:, None])
            y = axpy2(y, (1.0 - eps * inverse)[:, None], as_row(row), V2)
        elif ROW:
            y = axpy2(y, 1.0, as_row(row), V2)
        store_rows(o + (zero + start) * on, i, on, live, y, DV, V1, V2)


@triton.jit
def query_grad(
    fq, g, live, mt, m1, vbar, eps, NORM: tl.constexpr, F1: tl.constexpr, F2: tl.constexpr, V2: tl.constexpr,
    BN: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """The read-out's part of dq: g m', or (g m' - m1 (q.g m' - eps g.vbar) / den) / den when normalised."""
    dq = rowmul(zero_rows(BN, F1, F2), g, mt, V2, F2, PREC)
    if NORM:
        inverse = 1.0 / tl.where(live, rowdot(fq, m1, F2) + eps, 1.0)
        total = (eps * rowdot(g, as_row(vbar), V2) - rowdot(fq, dq, F2)) * inverse * inverse
        d1 = dq[0] * inverse[:, None] + total[:, None] * m1[0][None, :]
        d2 = d1
        if F2 > 0:
            d2 = dq[1] * inverse[:, None] + total[:, None] * m1[1][None, :]
        dq = (d1, d2)
    return dq


@triton.jit
def write_grads(
    q, k, v, g, dq, dk, dv, qn, kn, vn, gn, dqn, dkn, dvn, lo, hi, mt, m1, vbar, w, rows, eps, PART: tl.constexpr,
    ORDER: tl.constexpr, NORM: tl.constexpr, ROW: tl.constexpr, FMAP: tl.constexpr, D: tl.constexpr, R1: tl.constexpr,
    R2: tl.constexpr, F1: tl.constexpr, F2: tl.constexpr, DV: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr,
    BN: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """dq = read-out + k WR + q WW + v WC', dk = k WS + q WR' + v WP', dv = k WP + q WC, plus rows; w = (WP', WS, WC',
    WR', WW).

    PART 0: all three, 1: dq, 2: dk and dv, 3: dk, 4: dv (what a part does not use is not loaded).
    """
    i = tl.arange(0, BN)
    zero = tl.full([], 0, tl.int64)
    tiles = tl.cdiv(hi - lo, BN)
    for t in range(tiles):
        start = lo + (tiles - 1 - t) * BN
        live = start + i < hi
        rq = load_rows(q + (zero + start) * qn, i, qn, live, D, R1, R2, False)
        rk = load_rows(k + (zero + start) * kn, i, kn, live, D, R1, R2, False)
        tv = load_rows(v + (zero + start) * vn, i, vn, live, DV, V1, V2, False)
        tg = load_rows(g + (zero + start) * gn, i, gn, live, DV, V1, V2, False)
        fq = phi(rq, live, FMAP, D, R1, R2)
        fk = phi(rk, live, FMAP, D, R1, R2)
        if PART == 0 or PART == 2 or PART == 4:
            gv = zero_rows(BN, V1, V2)
            if ORDER != 2:
                gv = rowmul(gv, fk, trans4(w[0]), F2, V2, PREC)
            if ORDER == 2 or ORDER == 5:
                gv = rowmul(gv, fq, trans4(w[2]), F2, V2, PREC)
            if ROW:
                gv = axpy2(gv, 1.0, as_row(rows[2]), V2)
            store_rows(dv + (zero + start) * dvn, i, dvn, live, gv, DV, V1, V2)
        if PART == 0 or PART == 2 or PART == 3:
            gk = zero_rows(BN, F1, F2)
            if ORDER != 2:
                gk = rowmul(gk, tv, w[0], V2, F2, PREC)
            if ORDER == 2 or ORDER >= 4:
                gk = rowmul(gk, fk, w[1], F2, F2, PREC)
            if ORDER == 3 or ORDER == 5:
                gk = rowmul(gk, fq, w[3], F2, F2, PREC)
            if ROW:
                gk = axpy2(gk, 1.0, as_row(rows[1]), F2)
            store_rows(dk + (zero + start) * dkn, i, dkn, live, phi_grad(rk, gk, live, FMAP, D, R1, R2), D, R1, R2)
        if PART < 2:
            gq = query_grad(fq, tg, live, mt, m1, vbar, eps, NORM, F1, F2, V2, BN, PREC)
            if ORDER == 2 or ORDER == 5:
                gq = rowmul(gq, tv, w[2], V2, F2, PREC)
            if ORDER == 3 or ORDER == 5:
                gq = rowmul(gq, fk, trans4(w[3]), F2, F2, PREC)
            if ORDER >= 4:
                gq = rowmul(gq, fq, w[4], F2, F2, PREC)
            if ROW:
                gq = axpy2(gq, 1.0, as_row(rows[0]), F2)
            store_rows(dq + (zero + start) * dqn, i, dqn, live, phi_grad(rq, gq, live, FMAP, D, R1, R2), D, R1, R2)
