"""The passes that sum over the tokens of a head."""

import triton
import triton.language as tl

from ..maps import phi_and_rest, power_of_two
from ..tiles import (
    add4,
    add_dot,
    load_rows,
    load_tail,
    outer4,
    outer4_begin,
    outer4_end,
    rowdot,
    rowmul,
    scale4,
    square4,
    zero_rows,
    zeros2,
    zeros4,
)  # fmt: skip
from .extent import alive
from .writes import as_row


@triton.jit
def zero_tile(BN: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, dtype: tl.constexpr):
    """A pair of zero token tiles."""
    x1 = tl.zeros([BN, D1], dtype)
    x2 = x1
    if D2 > 0:
        x2 = tl.zeros([BN, D2], dtype)
    return x1, x2


@triton.jit
def add_sum(s, x, D2: tl.constexpr):
    """s + the tokens of a tile, as many rows apart as s has (the narrow second part: row by row), so that no tile
    needs an exchange of threads."""
    s2 = s[1]
    if D2 > 0:
        s2 = s[1] + x[1].to(tl.float32)
    rows: tl.constexpr = s[0].shape[0]
    x1 = tl.reshape(x[0].to(tl.float32), [x[0].shape[0] // rows, rows, x[0].shape[1]])
    return s[0] + tl.sum(x1, 0), s2


@triton.jit
def begin_sum(ROWS: tl.constexpr, BN: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, NEEDED: tl.constexpr):
    """The accumulator of add_sum for tiles of BN tokens; ROWS of them are as many as the warps hold at once."""
    x1 = tl.zeros([1, 1], tl.float32)
    x2 = x1
    if NEEDED:
        x1 = tl.zeros([ROWS, D1], tl.float32)
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
def begin(
    A1: tl.constexpr, A2: tl.constexpr, B1: tl.constexpr, B2: tl.constexpr, NEEDED: tl.constexpr, SQUARE: tl.constexpr,
    TAIL: tl.constexpr,
):  # fmt: skip
    """The accumulator of outer4 or square4, a placeholder when not needed."""
    if NEEDED:
        out = outer4_begin(A1, A2, B1, B2, SQUARE, TAIL)
    else:
        out = zeros4(1, 0, 1, 0)
    return out


@triton.jit
def end(acc, A2: tl.constexpr, NEEDED: tl.constexpr):
    """What outer4 or square4 summed."""
    out = acc
    if NEEDED:
        out = outer4_end(acc, A2)
    return out


@triton.jit
def begin_moments(
    ORDER: tl.constexpr, F1: tl.constexpr, F2: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, NEEDED: tl.constexpr,
    TAIL: tl.constexpr,
):  # fmt: skip
    """Accumulators of (P, S, C, R, W). ORDER 6: C and R, what `polynomial` has beyond hla3."""
    mp = begin(F1, F2, V1, V2, NEEDED and ORDER != 2 and ORDER != 6, False, TAIL)
    ms = begin(F1, F2, F1, F2, NEEDED and (ORDER == 2 or ORDER == 4 or ORDER == 5), True, TAIL)
    mc = begin(F1, F2, V1, V2, NEEDED and (ORDER == 2 or ORDER >= 5), False, TAIL)
    mr = begin(F1, F2, F1, F2, NEEDED and (ORDER == 3 or ORDER >= 5), False, TAIL)
    mw = begin(F1, F2, F1, F2, NEEDED and (ORDER == 4 or ORDER == 5), True, TAIL)
    return mp, ms, mc, mr, mw


@triton.jit
def add_moments(
    m, fq, fk, tv, eq, ek, ORDER: tl.constexpr, F2: tl.constexpr, V2: tl.constexpr, TAIL: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    """m + the products of a tile; eq and ek are the tails of q and k."""
    mp, ms, mc, mr, mw = m
    if ORDER != 2 and ORDER != 6:
        mp = outer4(mp, fk, tv, ek, F2, V2, TAIL, PREC)
    if ORDER == 2 or ORDER == 4 or ORDER == 5:
        ms = square4(ms, fk, ek, F2, TAIL, PREC)
    if ORDER == 2 or ORDER >= 5:
        mc = outer4(mc, fq, tv, eq, F2, V2, TAIL, PREC)
    if ORDER == 3 or ORDER >= 5:
        mr = outer4(mr, fk, fq, ek, F2, F2, TAIL, PREC)
    if ORDER == 4 or ORDER == 5:
        mw = square4(mw, fq, eq, F2, TAIL, PREC)
    return mp, ms, mc, mr, mw


@triton.jit
def square_rest(acc, x, y, X2: tl.constexpr, PREC: tl.constexpr):
    """acc + x y' + y x' over the tokens of a tile, as far as `square4` computes it."""
    a11, a12, _, a22 = acc
    a11 = add_dot(tl.trans(x[0]), y[0], a11, PREC)
    a11 = add_dot(tl.trans(y[0]), x[0], a11, PREC)
    if X2 > 0:
        a12 = add_dot(tl.trans(x[0]), y[1], a12, PREC)
        a12 = add_dot(tl.trans(y[0]), x[1], a12, PREC)
        a22 = add_dot(tl.trans(x[1] + 0.0), y[1] + 0.0, a22, PREC)
        a22 = add_dot(tl.trans(y[1] + 0.0), x[1] + 0.0, a22, PREC)
    return a11, a12, a12, a22


@triton.jit
def add_rests(m, fq, fk, rq, rk, i, ORDER: tl.constexpr, F2: tl.constexpr, PREC: tl.constexpr):
    """S, R, W + what the features' rests add."""
    mp, ms, mc, mr, mw = m
    if ORDER == 2 or ORDER == 4 or ORDER == 5:
        ms = square_rest(ms, fk, rk, F2, PREC)
    if ORDER == 3 or ORDER >= 5:
        mr = outer4(mr, fk, rq, i, F2, F2, False, PREC)
        mr = outer4(mr, rk, fq, i, F2, F2, False, PREC)
    if ORDER == 4 or ORDER == 5:
        mw = square_rest(mw, fq, rq, F2, PREC)
    return mp, ms, mc, mr, mw


@triton.jit
def end_moments(m, ORDER: tl.constexpr, F2: tl.constexpr, NEEDED: tl.constexpr):
    """(P, S, C, R, W)."""
    mp = end(m[0], F2, NEEDED and ORDER != 2 and ORDER != 6)
    ms = end(m[1], F2, NEEDED and (ORDER == 2 or ORDER == 4 or ORDER == 5))
    mc = end(m[2], F2, NEEDED and (ORDER == 2 or ORDER >= 5))
    mr = end(m[3], F2, NEEDED and (ORDER == 3 or ORDER >= 5))
    return mp, ms, mc, mr, end(m[4], F2, NEEDED and (ORDER == 4 or ORDER == 5))


@triton.jit
def add_gradient(
    dm, sg, g, tq, i, gn, live, SUMS: tl.constexpr, TAIL: tl.constexpr, F2: tl.constexpr, DV: tl.constexpr,
    V1: tl.constexpr, V2: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """(dm + g q', sg + g) for a tile of queries and the gradients g of its outputs."""
    tg = load_rows(g, i, gn, live, DV, V1, V2, False)
    eg = i
    if TAIL:
        eg = load_tail(g, i, gn, live, DV, V1)
    dm = outer4(dm, tg, tq, eg, V2, F2, TAIL, PREC)
    if SUMS:
        sg = add_sum(sg, tg, V2)
    return dm, sg


@triton.jit
def sum_moments(
    q, k, v, g, qn, kn, vn, gn, lo, hi, ORDER: tl.constexpr, SUMS: tl.constexpr, GRAD: tl.constexpr,
    ONCE: tl.constexpr, D: tl.constexpr, F1: tl.constexpr, F2: tl.constexpr, DV: tl.constexpr, V1: tl.constexpr,
    V2: tl.constexpr, BN: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """(P, S, C, R, W), (sum q, sum k, sum v), dM', sum g over tokens lo..hi of the tokens as they are.

    ONCE: k and v are not read again; let q stay in L2 instead.
    """
    TAIL: tl.constexpr = F2 > 0 and V2 > 0 and F1 >= 64 and V1 >= 64
    m = begin_moments(ORDER, F1, F2, V1, V2, True, TAIL)
    dm = begin(V1, V2, F1, F2, GRAD, False, TAIL)
    sq = begin_sum(16, BN, F1, F2, SUMS)
    sk = begin_sum(16, BN, F1, F2, SUMS)
    sv = begin_sum(16, BN, V1, V2, SUMS)
    sg = begin_sum(16, BN, V1, V2, SUMS and GRAD)
    i = tl.arange(0, BN)
    zero = tl.full([], 0, tl.int64)
    for start in range(lo, hi[0], BN):
        live = alive(start + i, hi)
        tk = load_rows(k + (zero + start) * kn, i, kn, live, D, F1, F2, ONCE)
        tv = load_rows(v + (zero + start) * vn, i, vn, live, DV, V1, V2, ONCE)
        tq = load_rows(q + (zero + start) * qn, i, qn, live, D, F1, F2, False)
        ek = i
        eq = i
        if TAIL:
            ek = load_tail(k + (zero + start) * kn, i, kn, live, D, F1)
        if TAIL and ORDER != 1 and ORDER != 3:
            eq = load_tail(q + (zero + start) * qn, i, qn, live, D, F1)
        m = add_moments(m, tq, tk, tv, eq, ek, ORDER, F2, V2, TAIL, PREC)
        if SUMS:
            sq = add_sum(sq, tq, F2)
            sk = add_sum(sk, tk, F2)
            sv = add_sum(sv, tv, V2)
        if GRAD:
            dm, sg = add_gradient(dm, sg, g + (zero + start) * gn, tq, i, gn, live, SUMS, TAIL, F2, DV, V1, V2, PREC)
    sums = (end_sum(sq, F1, F2, SUMS), end_sum(sk, F1, F2, SUMS), end_sum(sv, V1, V2, SUMS))
    return end_moments(m, ORDER, F2, True), sums, end(dm, V2, GRAD), end_sum(sg, V1, V2, SUMS and GRAD)


@triton.jit
def sum_gradient(
    q, g, qn, gn, lo, hi, SUMS: tl.constexpr, D: tl.constexpr, F1: tl.constexpr, F2: tl.constexpr, DV: tl.constexpr,
    V1: tl.constexpr, V2: tl.constexpr, BN: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """dM' [V, F] and sum g [V] over tokens lo..hi of the tokens as they are."""
    TAIL: tl.constexpr = F2 > 0 and V2 > 0 and F1 >= 64 and V1 >= 64
    dm = begin(V1, V2, F1, F2, True, False, TAIL)
    sg = begin_sum(16, BN, V1, V2, SUMS)
    i = tl.arange(0, BN)
    zero = tl.full([], 0, tl.int64)
    for start in range(lo, hi[0], BN):
        live = alive(start + i, hi)
        tq = load_rows(q + (zero + start) * qn, i, qn, live, D, F1, F2, False)
        dm, sg = add_gradient(dm, sg, g + (zero + start) * gn, tq, i, gn, live, SUMS, TAIL, F2, DV, V1, V2, PREC)
    return end(dm, V2, True), end_sum(sg, V1, V2, SUMS)


@triton.jit
def divide(
    hq, lq, tg, live, m, m1, vbar, eps, LOW: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, F2: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    """Of o = q m / den + ...: q / den and d loss / d den times den, for a tile of queries hq (LOW: hq + lq)."""
    y = rowmul(zero_rows(hq[0].shape[0], V1, V2), hq, m, F2, V2, PREC)
    f1 = hq[0].to(tl.float32)
    f2 = hq[1].to(tl.float32)
    if LOW:
        f1 += lq[0].to(tl.float32)
    if LOW and F2 > 0:
        f2 += lq[1].to(tl.float32)
    inverse = 1.0 / tl.where(live, rowdot((f1, f2), as_row(m1), F2) + eps, 1.0)
    total = eps * rowdot(tg, as_row(vbar), V2) - rowdot(tg, y, V2)
    # a gather ends the layout of the product, which would draw the tile and its feature map into a second computation
    total = tl.gather(total, tl.arange(0, total.shape[0]), 0) * inverse
    return (f1 * inverse[:, None], f2 * inverse[:, None]), total


@triton.jit
def in_full(x, FULL: tl.constexpr):
    """A token tile, in float32 if FULL."""
    if FULL:
        x = (x[0].to(tl.float32), x[1].to(tl.float32))
    return x


@triton.jit
def sum_features(
    q, k, v, g, qn, kn, vn, gn, lo, hi, m, m1, vbar, eps, ORDER: tl.constexpr, MOMENTS: tl.constexpr,
    SUMS: tl.constexpr, REST: tl.constexpr, GRAD: tl.constexpr, NORM: tl.constexpr, FMAP: tl.constexpr,
    D: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr, F1: tl.constexpr, F2: tl.constexpr, DV: tl.constexpr,
    V1: tl.constexpr, V2: tl.constexpr, BN: tl.constexpr, PREC: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """((P, S, C, R, W), (sum q, sum k, sum v), dM', dm1, sum g) of phi(q), phi(k), v, g over tokens lo..hi.

    MOMENTS: the moments (with SUMS = 1 the sums that the order needs, 2 all).
    REST: P and C of features to twice the digits of the dtype of the tokens; 2: every moment, and dM; 3: as operands in
    float32.
    GRAD: dM' = Sum g q' (sum g with SUMS); NORM with the read-out's division, then m [F, V], m1 and vbar are read and
    only the sums of what has a rest are taken, the forward has the others.

    One turn transforms a tile and multiplies the tile before: a carried tile is an operand in shared memory, where one
    transformed in the same turn would be taken apart in registers. The first product and the last transform are of
    zeros, without a branch, which would keep the loads from being pipelined.
    """
    DIVIDE: tl.constexpr = GRAD and NORM
    QUERIES: tl.constexpr = GRAD or ORDER != 1 or not NORM
    FULL: tl.constexpr = REST == 3
    dtype: tl.constexpr = tl.float32 if FULL else q.dtype.element_ty
    unit = 1.0
    if DIVIDE and dtype == tl.float16:  # 1 / den of a higher order is too small for float16
        unit = power_of_two(tl.sum(rowdot(as_row(m1), as_row((m1[0] * 0.0 + 1.0, m1[1] * 0.0 + 1.0)), F2)))
    mm = begin_moments(ORDER, F1, F2, V1, V2, MOMENTS, False)
    dm = begin(V1, V2, F1, F2, GRAD, False, False)
    dm1 = begin_sum(32, BN, F1, F2, DIVIDE)
    SUM_Q: tl.constexpr = MOMENTS and SUMS and QUERIES and (not NORM or ORDER == 2 or ORDER >= 5 or SUMS == 2)
    SUM_K: tl.constexpr = MOMENTS and SUMS and (not NORM or ORDER != 2)
    SUM_V: tl.constexpr = MOMENTS and SUMS and not DIVIDE
    SUM_G: tl.constexpr = GRAD and SUMS and not DIVIDE
    ALL: tl.constexpr = REST == 2
    REST_K: tl.constexpr = MOMENTS and REST > 0 and not FULL and ORDER != 2 and ORDER != 6
    REST_Q: tl.constexpr = MOMENTS and REST > 0 and not FULL and (ORDER == 2 or ORDER >= 5)
    # of the first order dM is the only moment that dk sees
    REST_M: tl.constexpr = GRAD and (ALL or (DIVIDE and ORDER == 1 and dtype != tl.float32))
    LOW: tl.constexpr = REST_Q or REST_M or (ALL and QUERIES)
    LOW_K: tl.constexpr = REST_K or (ALL and MOMENTS)
    rm = begin(V1, V2, F1, F2, REST_M, False, False)
    rp = begin(F1, F2, V1, V2, REST_K, False, False)
    rc = begin(F1, F2, V1, V2, REST_Q, False, False)
    sq = begin_sum(32, BN, F1, F2, SUM_Q)
    sk = begin_sum(32, BN, F1, F2, SUM_K)
    sv = begin_sum(32, BN, V1, V2, SUM_V)
    sg = begin_sum(32, BN, V1, V2, SUM_G)
    hq = zero_tile(BN, F1, F2, dtype)
    hk = hq
    rk = hq
    lq = hq
    tv = zero_tile(BN, V1, V2, dtype)
    tg = tv
    i = tl.arange(0, BN)
    zero = tl.full([], 0, tl.int64)
    tiles = tl.cdiv(hi[0] - lo, BN)
    for t in tl.range(0, tiles + 1, num_stages=STAGES):
        start = lo + t * BN
        live = alive(start + i, hi)
        if QUERIES:
            xq = in_full(load_rows(q + (zero + start) * qn, i, qn, live, D, R1, R2, False), FULL)
        if MOMENTS:
            xk = in_full(load_rows(k + (zero + start) * kn, i, kn, live, D, R1, R2, False), FULL)
            xv = in_full(load_rows(v + (zero + start) * vn, i, vn, live, DV, V1, V2, False), FULL)
            mm = add_moments(mm, hq, hk, tv, i, i, ORDER, F2, V2, False, PREC)
            if ALL:
                mm = add_rests(mm, hq, hk, lq, rk, i, ORDER, F2, PREC)
        if REST_K:
            rp = outer4(rp, rk, tv, i, F2, V2, False, PREC)
        if REST_Q:
            rc = outer4(rc, lq, tv, i, F2, V2, False, PREC)
        if GRAD:
            xg = in_full(load_rows(g + (zero + start) * gn, i, gn, live, DV, V1, V2, False), FULL)
            dq = hq
        if DIVIDE:
            over, total = divide(
                hq, lq, tg, alive(tl.maximum(start - BN + i, 0), hi) & (t > 0), m, m1, vbar, eps, LOW, V1, V2, F2, PREC
            )
            dm1 = add_sum(dm1, (over[0] * total[:, None], over[1] * total[:, None]), F2)
            over = (over[0] * unit, over[1] * unit)
            dq = (over[0].to(dtype), over[1].to(dtype))
        if GRAD:
            dm = outer4(dm, tg, dq, i, V2, F2, False, PREC)
        if REST_M:
            rest_q = lq
            if DIVIDE:
                over = (over[0] - dq[0].to(tl.float32), over[1] - dq[1].to(tl.float32))
                rest_q = (over[0].to(dtype), over[1].to(dtype))
            rm = outer4(rm, tg, rest_q, i, V2, F2, False, PREC)
        if QUERIES:
            fq, hq, rest = phi_and_rest(xq, live, FMAP, D, R1, R2)
            if LOW:
                lq = rest
        if MOMENTS:
            fk, hk, lk = phi_and_rest(xk, live, FMAP, D, R1, R2)
            tv = xv
        if LOW_K:
            rk = lk
        if SUM_K:
            sk = add_sum(sk, fk if LOW_K else hk, F2)
        if SUM_V:
            sv = add_sum(sv, tv, V2)
        if SUM_Q:
            sq = add_sum(sq, fq if LOW else hq, F2)
        if GRAD:
            tg = xg
        if SUM_G:
            sg = add_sum(sg, tg, V2)
    dm = end(dm, V2, GRAD)
    if REST_M:
        dm = add4(dm, end(rm, V2, True), V2, F2)
    mp, ms, mc, mr, mw = end_moments(mm, ORDER, F2, MOMENTS)
    if REST_K:
        mp = add4(mp, end(rp, F2, True), F2, V2)
    if REST_Q:
        mc = add4(mc, end(rc, F2, True), F2, V2)
    sums = (
        end_sum(sq, F1, F2, SUM_Q),
        end_sum(sk, F1, F2, SUM_K),
        end_sum(sv, V1, V2, SUM_V),
    )
    return (
        (mp, ms, mc, mr, mw), sums, scale4(dm, 1.0 / unit), end_sum(dm1, F1, F2, DIVIDE),
        end_sum(sg, V1, V2, SUM_G),
    )  # fmt: skip
