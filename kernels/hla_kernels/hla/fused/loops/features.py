"""Pass that applies the feature map to tokens and sums over the features."""

import triton
import triton.language as tl

from ..maps import is_shifted, phi32, phi_and_rest, power_of_two
from ..tiles import add4, load_rows, outer4, rowdot, rowmul, scale4, trans4, zero_rows, zeros2, zeros4
from .extent import alive, anew
from .ratio import add_outer, begin_outer, end_outer
from .stores import put_ratio, store_tokens
from .sums import (
    add_moments,
    add_sum,
    add_together,
    add_total,
    begin,
    begin_moments,
    begin_sum,
    begin_total,
    end,
    end_moments,
    end_sum,
    end_together,
    end_total,
)
from .vectors import as_row, once


@triton.jit
def zero_tile(BN: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, dtype: tl.constexpr):
    """Return a pair of zero token tiles."""
    x1 = tl.zeros([BN, D1], dtype)
    x2 = x1
    if D2 > 0:
        x2 = tl.zeros([BN, D2], dtype)
    return x1, x2


@triton.jit
def ones_column(x, live, C: tl.constexpr):
    """Return a tile of tokens with ones in column C."""
    return tl.where((tl.arange(0, x.shape[1]) == C)[None, :] & live[:, None], 1.0, x).to(x.dtype)


@triton.jit
def column_of(m, C: tl.constexpr, ONES: tl.constexpr):
    """Return column C of the second half of a matrix [V, F], for any V. ONES: the rows have a column of ones there too;
    its product with this column, the number of tokens, is left out."""
    x1 = tl.sum(tl.where((tl.arange(0, m[1].shape[1]) == C)[None, :], m[1], 0.0), 1)
    column = (tl.arange(0, m[3].shape[1]) == C)[None, :]
    if ONES:
        column = column & (tl.arange(0, m[3].shape[0]) != C)[:, None]
    return x1, tl.sum(tl.where(column, m[3], 0.0), 1)


@triton.jit
def divide(
    hq, lq, tg, live, m, m1, vbar, eps, LOW: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, F2: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    """Return q / den, d loss / d den times den, and 1 / den of o = q m / den + ..., for a tile of queries hq (LOW: hq +
    lq)."""
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
    return (f1 * inverse[:, None], f2 * inverse[:, None]), total, inverse


@triton.jit
def sum_keys(
    k, v, kn, vn, lo, hi, FMAP: tl.constexpr, D: tl.constexpr, F1: tl.constexpr, F2: tl.constexpr, DV: tl.constexpr,
    V1: tl.constexpr, V2: tl.constexpr, BN: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Return (P = Sum phi(k) v', sum phi(k), sum v) over tokens lo..hi, for a ratio of first order. P' = v' phi(k) is
    summed, so that the transformed tile is operand B."""
    dtype: tl.constexpr = k.dtype.element_ty
    mp = begin_outer(V1, V2, F1, F2)
    sk = begin_sum(16 if F1 > 64 else 32, BN, F1, F2, True)
    sv = begin_total(dtype, BN, V1, V2, True)
    i = tl.arange(0, BN)
    zero = tl.full([], 0, tl.int64)
    for start in tl.range(lo, hi[0], BN, disable_licm=F1 > 64):
        live = alive(start + i, hi)
        tk = load_rows(k + (zero + start) * kn, i, kn, live, D, F1, F2, False)
        tv = load_rows(v + (zero + start) * vn, i, vn, live, DV, V1, V2, False)
        fk = phi32(tk, live, FMAP, D, F1, F2)
        hk = (fk[0].to(dtype), fk[1].to(dtype))
        if V2 > 0:
            hk = (once(hk[0]), once(hk[1]))
        mp = add_outer(mp, tv, hk, V2, F2, PREC)
        sk = add_sum(sk, fk, F2)  # from features before rounding
        sv = add_total(sv, tv, V2, True)
    mp = trans4(end_outer(mp, V2))
    return mp, end_sum(sk, F1, F2, True), end_total(sv, dtype, V1, V2, True)


@triton.jit
def keep_features(
    keep, start, j, live, fq, fk, QUERIES: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, F1: tl.constexpr,
    F2: tl.constexpr,
):  # fmt: skip
    """Write the features of q and k of the tile of tokens at `start`; keep as in `sum_features`."""
    if QUERIES:
        store_tokens(keep[0] + start * keep[2], j, keep[2], live, fq, D, F1, F2)
    if KEYS:
        store_tokens(keep[1] + start * keep[3], j, keep[3], live, fk, D, F1, F2)


@triton.jit
def sum_features(
    q, k, v, g, qn, kn, vn, gn, lo, hi, m, m1, vbar, eps, keep, ratio, ORDER: tl.constexpr, MOMENTS: tl.constexpr,
    SUMS: tl.constexpr, REST: tl.constexpr, GRAD: tl.constexpr, NORM: tl.constexpr, KEEP: tl.constexpr,
    SPARE: tl.constexpr,
    FMAP: tl.constexpr, D: tl.constexpr, F1: tl.constexpr, F2: tl.constexpr,
    DV: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, BN: tl.constexpr, PREC: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Return ((P, S, C, R, W), (sum q, sum k, sum v), dM', dm1, sum g) of phi(q), phi(k), v, g over tokens lo..hi.

    MOMENTS: compute the moments (with SUMS = 1 also the sums that the order needs, 2 all sums).
    REST: P and C of features to twice the digits of the dtype of the tokens.
    GRAD: dM' = Sum g q' (sum g with SUMS). With NORM it includes the division of the read-out: m [F, V], m1 and vbar
    are read, only sums with rests are computed (the forward has the others), and 1 / den and d loss / d den of every
    token are stored in ratio [*, 2].
    KEEP: also write the features, one iteration late, in the layout of the products: keep = (of q, of k, token
    strides); heads of a group write the same values.

    SPARE: nothing reads the moments beyond D, so that an additional column of ones gives sums.

    One iteration transforms a tile and multiplies the previous one: a carried tile is an operand in shared memory,
    while a tile transformed in the same iteration would be an operand in registers. v and g are loaded one iteration
    late. The first product and the last transform are of zeros; a branch would prevent pipelining of the loads.
    """
    DIVIDE: tl.constexpr = GRAD and NORM
    SHIFT: tl.constexpr = is_shifted(FMAP)
    QUERIES: tl.constexpr = (GRAD or ORDER != 1 or not NORM or KEEP) and ORDER != 8 and ORDER != 11
    KEYS: tl.constexpr = MOMENTS and ORDER != 12 and ORDER != 7 and ORDER != 9
    dtype: tl.constexpr = q.dtype.element_ty
    unit = 1.0
    if DIVIDE and dtype == tl.float16:  # 1 / den of a higher order is too small for float16
        unit = power_of_two(tl.sum(rowdot(as_row(m1), as_row((m1[0] * 0.0 + 1.0, m1[1] * 0.0 + 1.0)), F2)))
    mm = begin_moments(ORDER, F1, F2, V1, V2, MOMENTS, False)
    dm = begin(V1, V2, F1, F2, GRAD, False, False)
    dm1 = begin_sum(32, BN, F1, F2, DIVIDE)
    SUM_Q: tl.constexpr = (
        MOMENTS and QUERIES and SUMS and (not NORM or ORDER == 2 or (3 if SHIFT else 5) <= ORDER or SUMS == 2)
    )
    SUM_K: tl.constexpr = KEYS and SUMS and (not NORM or SHIFT or (ORDER != 2 and ORDER != 8))
    SUM_V: tl.constexpr = MOMENTS and SUMS and not DIVIDE and ORDER != 7 and ORDER != 8
    SUM_G: tl.constexpr = GRAD and SUMS and not DIVIDE
    HAS_P: tl.constexpr = (ORDER < 6 and ORDER != 2) or ORDER == 11
    HAS_C: tl.constexpr = ORDER == 2 or ORDER == 5 or ORDER == 6 or ORDER == 12
    REST_K: tl.constexpr = MOMENTS and REST and HAS_P
    REST_Q: tl.constexpr = MOMENTS and REST and HAS_C
    # of the first order dM is the only moment that dk sees
    REST_M: tl.constexpr = DIVIDE and ORDER == 1 and dtype != tl.float32
    LOW: tl.constexpr = REST_Q or REST_M
    LOW_K: tl.constexpr = REST_K
    rm = begin(V1, V2, F1, F2, REST_M, False, False)
    APART: tl.constexpr = PREC != "ieee"  # tensor cores cut off the small numbers that they add to large ones
    rp = begin(F1, F2, V1, V2, REST_K and APART, False, False)
    rc = begin(F1, F2, V1, V2, REST_Q and APART, False, False)
    # sums of features with their rests are elementwise
    EXACT_Q: tl.constexpr = tl.float32 if LOW else dtype
    EXACT_K: tl.constexpr = tl.float32 if LOW_K else dtype
    ONES: tl.constexpr = SPARE and F2 > 0 and F1 + F2 > D and not LOW and not LOW_K and dtype != tl.float32
    CROSS: tl.constexpr = ORDER == 3 or ORDER >= 5
    DOT_Q: tl.constexpr = SUM_Q and not (ONES and ORDER > 2)
    DOT_K: tl.constexpr = SUM_K and not (ONES and ORDER > 1)
    DOT_V: tl.constexpr = SUM_V and not ONES
    ONE_TURN: tl.constexpr = F1 > 64 or (F2 > 0 and (ORDER < 5 or not SPARE))
    THREE: tl.constexpr = DOT_Q and DOT_K and DOT_V and not (LOW or LOW_K) and dtype != tl.float32
    JOINED: tl.constexpr = THREE and F1 > 64 and F2 == 0 and F1 == V1 and V2 == 0  # three sums in the registers of one
    MASKED: tl.constexpr = F2 > 0 and len(hi) == 3
    # pointers, which take fewer registers than products of strides
    MOVING: tl.constexpr = (F1 > 64 and ORDER > 3) or MASKED
    HERE: tl.constexpr = F2 > 0 or MOVING
    sq = begin_total(EXACT_Q, BN, F1, F2, DOT_Q and not JOINED)
    sk = begin_total(EXACT_K, BN, F1, F2, DOT_K and not JOINED)
    sv = begin_total(dtype, BN, V1, V2, DOT_V and not JOINED)
    joined, none = begin_total(dtype, BN, F1, F2, JOINED)
    sg = begin_total(dtype, BN, V1, V2, SUM_G)
    hq = zero_tile(BN, F1, F2, dtype)
    hk = hq
    rk = hq
    lq = hq
    tv = zero_tile(BN, V1, V2, dtype)
    i = tl.arange(0, BN)
    zero = tl.full([], 0, tl.int64)
    tiles = tl.cdiv(hi[0] - lo, BN)
    qp = q + (zero + lo) * qn
    kp = k + (zero + lo) * kn
    vp = v + (zero + lo - BN) * vn
    # addresses that are kept from turn to turn would fill registers
    for t in tl.range(0, tiles + 1, num_stages=STAGES, disable_licm=HERE):
        start = lo + t * BN
        live = alive(start + i, hi)
        j = anew(i, start, HERE or (F1 <= 64 and NORM and (ORDER < 5 or ORDER == 8 or ORDER == 9) and not GRAD))
        late = start - BN
        there = alive(tl.maximum(late + i, 0), hi) & (t > 0)
        if KEEP and MASKED:  # before more tokens take registers
            keep_features(keep, zero + late, j, there, hq, hk, QUERIES, KEYS, D, F1, F2)
        if QUERIES:
            xq = load_rows(qp if MOVING else q + (zero + start) * qn, j, qn, live, D, F1, F2, False)
        if DOT_Q and not LOW and not JOINED:
            sq = add_total(sq, hq, F2, ONE_TURN)
        if DOT_K and not LOW_K and not JOINED:
            sk = add_total(sk, hk, F2, ONE_TURN)
        if KEYS:
            xk = load_rows(kp if MOVING else k + (zero + start) * kn, j, kn, live, D, F1, F2, False)
        if MOMENTS:
            tv = load_rows(vp if MOVING else v + (zero + late) * vn, j, vn, there, DV, V1, V2, False)
            mm = add_moments(mm, hq, hk, tv, i, i, ORDER, F2, V2, False, PREC)
        if JOINED:
            turn, none = add_together(tl.zeros([F1, 16], tl.float32), none, hq, 0, F2)
            turn, none = add_together(turn, none, hk, 1, F2)
            turn, none = add_together(turn, none, tv, 2, F2)
            joined += turn
        elif DOT_V:
            sv = add_total(sv, tv, V2, ONE_TURN)
        if REST_K and APART:
            rp = outer4(rp, rk, tv, i, F2, V2, False, PREC)
        elif REST_K:
            mm = (outer4(mm[0], rk, tv, i, F2, V2, False, PREC), mm[1], mm[2], mm[3], mm[4])
        if REST_Q and APART:
            rc = outer4(rc, lq, tv, i, F2, V2, False, PREC)
        elif REST_Q:
            mm = (mm[0], mm[1], outer4(mm[2], lq, tv, i, F2, V2, False, PREC), mm[3], mm[4])
        if GRAD:
            tg = load_rows(g + (zero + late) * gn, j, gn, there, DV, V1, V2, False)
            dq = hq
        if DIVIDE:
            over, total, inverse = divide(hq, lq, tg, there, m, m1, vbar, eps, LOW, V1, V2, F2, PREC)
            put_ratio(ratio, late + i, there, inverse, total * inverse)
            dm1 = add_sum(dm1, (over[0] * total[:, None], over[1] * total[:, None]), F2)
            over = (over[0] * unit, over[1] * unit)
            dq = (over[0].to(dtype), over[1].to(dtype))
        if GRAD:
            dm = outer4(dm, tg, dq, i, V2, F2, False, PREC)
        if REST_M:
            over = (over[0] - dq[0].to(tl.float32), over[1] - dq[1].to(tl.float32))
            rest_q = (over[0].to(dtype), over[1].to(dtype))
            rm = outer4(rm, tg, rest_q, i, V2, F2, False, PREC)
        if MOVING:
            qp += (zero + BN) * qn
            kp += (zero + BN) * kn
            vp += (zero + BN) * vn
        if KEEP and not MASKED:
            keep_features(keep, zero + late, j, there, hq, hk, QUERIES, KEYS, D, F1, F2)
        if QUERIES:
            fq, hq, rest = phi_and_rest(xq, live, FMAP, D, F1, F2)
            if LOW:
                lq = rest
        if KEYS:
            fk, hk, lk = phi_and_rest(xk, live, FMAP, D, F1, F2)
        if ONES:
            hq = (hq[0], ones_column(hq[1], live, D - F1))
            hk = (hk[0], ones_column(hk[1], live, D - F1))
        if LOW_K and KEYS:
            rk = lk
        if SUM_K and LOW_K:
            sk = add_total(sk, fk, F2)
        if SUM_Q and LOW:
            sq = add_total(sq, fq, F2)
        if SUM_G:
            sg = add_total(sg, tg, V2)
    dm = end(dm, V2, GRAD)
    if REST_M:
        dm = add4(dm, end(rm, V2, True), V2, F2)
    mp, ms, mc, mr, mw = end_moments(mm, ORDER, F2, MOMENTS)
    if REST_K and APART:
        mp = add4(mp, end(rp, F2, True), F2, V2)
    if REST_Q and APART:
        mc = add4(mc, end(rc, F2, True), F2, V2)
    sq = end_total(sq, EXACT_Q, F1, F2, DOT_Q and not JOINED)
    sk = end_total(sk, EXACT_K, F1, F2, DOT_K and not JOINED)
    sv = end_total(sv, dtype, V1, V2, DOT_V and not JOINED)
    if JOINED:
        sq = end_together(joined, none, 0, F2)
        sk = end_together(joined, none, 1, F2)
        sv = end_together(joined, none, 2, V2)
    if ONES and SUM_V:
        sv = column_of(trans4(mc if ORDER == 2 or ORDER == 6 else mp), D - F1, False)
    if ONES and SUM_K and ORDER > 1:
        sk = column_of(mr if CROSS else ms, D - F1, True)
    if ONES and SUM_Q and ORDER > 2:
        sq = column_of(trans4(mr) if CROSS else mw, D - F1, True)
    sums = (sq, sk, sv)
    return (
        (mp, ms, mc, mr, mw), sums, scale4(dm, 1.0 / unit), end_sum(dm1, F1, F2, DIVIDE),
        end_total(sg, dtype, V1, V2, SUM_G),
    )  # fmt: skip


@triton.jit
def feature_moments(
    q, k, v, qn, kn, vn, hi, keep, ORDER: tl.constexpr, NORM: tl.constexpr, KEEP: tl.constexpr, FMAP: tl.constexpr,
    D: tl.constexpr, F1: tl.constexpr, F2: tl.constexpr, BN: tl.constexpr, PREC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Return ((P, S, C, R, W), the sums that the order needs) of `sum_features` over all tokens of a head; values have
    as many channels as keys."""
    row = zeros2(F1, F2)
    m, sums, _, _, _ = sum_features(
        q, k, v, q, qn, kn, vn, qn, 0, hi, zeros4(1, 0, 1, 0), row, row, 0.0, keep, q, ORDER, True, 1, 0, False, NORM,
        KEEP, False, FMAP, D, F1, F2, D, F1, F2, BN, PREC, STAGES,
    )  # fmt: skip
    return m, sums


@triton.jit
def moments_apart(
    q, k, v, qn, kn, vn, hi, keep, ORDER: tl.constexpr, NORM: tl.constexpr, KEEP: tl.constexpr, FMAP: tl.constexpr,
    D: tl.constexpr, F1: tl.constexpr, F2: tl.constexpr, BN: tl.constexpr, PREC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute `feature_moments` of hla2 or hla3 in two passes with separate accumulators: S (and P) over keys, then C
    (or W) over queries. Every tensor is read in one pass only."""
    a, s = feature_moments(
        q, k, v, qn, kn, vn, hi, keep, 8 if ORDER == 2 else 11, NORM, KEEP, FMAP, D, F1, F2, BN, PREC, STAGES
    )
    b, t = feature_moments(
        q, k, v, qn, kn, vn, hi, keep, 9 if ORDER == 2 else 7, NORM, KEEP, FMAP, D, F1, F2, BN, PREC, STAGES
    )
    if ORDER == 2:
        out = ((b[0], a[1], b[2], b[3], b[4]), (t[0], s[1], t[2]))
    else:
        out = ((a[0], a[1], a[2], a[3], b[4]), (t[0], s[1], s[2]))
    return out
