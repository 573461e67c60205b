"""The passes that write the output and the gradients of the tokens of a head."""

import triton
import triton.language as tl

from ..maps import is_shifted, load_features, phi, phi32, phi_grad
from ..tiles import (
    axpy2,
    load_rows,
    load_vec,
    rowmul,
    store_rows,
    trans4,
    zero_rows,
)  # fmt: skip
from .extent import alive
from .stores import store_tokens
from .vectors import as_row, columns, times_vector


@triton.jit
def read_out(
    q, o, qn, on, lo, hi, m, m1, row, base, eps, NORM: tl.constexpr, ROW: tl.constexpr, FMAP: tl.constexpr,
    D: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr, F1: tl.constexpr, F2: tl.constexpr, DV: tl.constexpr,
    V1: tl.constexpr, V2: tl.constexpr, BN: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Write o = q m (+ row) or, normalised, (q m + base) / (q.m1 + eps) + row for tokens lo..hi (`ratio_base`).

    Last tile first: it is the one still in L2.
    """
    cols = m1
    if NORM:
        cols = columns(m1, q.dtype.element_ty, F2)
    MAP: tl.constexpr = FMAP + 3 if (FMAP == 3 or FMAP == 4) and not NORM else FMAP
    i = tl.arange(0, BN)
    zero = tl.full([], 0, tl.int64)
    tiles = tl.cdiv(hi[0] - lo, BN)
    for t in range(tiles):
        start = lo + (tiles - 1 - t) * BN
        live = alive(start + i, hi)
        fq = load_features(q + (zero + start) * qn, i, qn, live, MAP, D, R1, R2, False)
        y = rowmul(zero_rows(BN, V1, V2), fq, m, F2, V2, PREC)
        if NORM:
            inverse = 1.0 / tl.where(live, times_vector(fq, cols, F2) + eps, 1.0)
            y = axpy2(y, 1.0, as_row(base), V2)
            y = axpy2(as_row(row), inverse[:, None], y, V2)
        elif ROW:
            y = axpy2(y, 1.0, as_row(row), V2)
        store_tokens(o + (zero + start) * on, i, on, live, y, DV, V1, V2)


@triton.jit
def in_units(x, unit, D2: tl.constexpr):
    """x unit; a unit of 1.0 is a constant and costs nothing."""
    x2 = x[1]
    if D2 > 0:
        x2 = x[1] * unit
    return x[0] * unit, x2


@triton.jit
def add_row(x, row, POINTER: tl.constexpr, ROW: tl.constexpr, FD: tl.constexpr, F1: tl.constexpr, F2: tl.constexpr):
    """x + a row of F columns for every token, which is a POINTER when normalised; x alone without one."""
    if POINTER:
        x = axpy2(x, 1.0, as_row(load_vec(row, FD, F1, F2)), F2)
    elif ROW:
        x = axpy2(x, 1.0, as_row(row), F2)
    return x


@triton.jit
def put(ptr, i, stride, live, x, ALONE: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr):
    """`store_tokens` where a program writes nothing else: several gradients leave no registers for whole rows."""
    if ALONE:
        store_tokens(ptr, i, stride, live, x, D, D1, D2)
    else:
        store_rows(ptr, i, stride, live, x, D, D1, D2)


@triton.jit
def write_grads(
    q, k, v, g, dq, dk, dv, qn, kn, vn, gn, dqn, dkn, dvn, lo, hi, mt, m1, ratio, w, unit, rows, more,
    PART: tl.constexpr, ORDER: tl.constexpr, NORM: tl.constexpr, ROW: tl.constexpr, FMAP: tl.constexpr,
    D: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr, F1: tl.constexpr, F2: tl.constexpr, DV: tl.constexpr,
    V1: tl.constexpr, V2: tl.constexpr, FD: tl.constexpr, BN: tl.constexpr, PREC: tl.constexpr,
    STAGES: tl.constexpr = None,
):  # fmt: skip
    """dq = read-out + k WR + q WW + v WC', dk = k WS + q WR' + v WP', dv = k WP + q WC, plus rows; w = (WP', WS, WC',
    WR', WW) in units of `unit`.

    NORM: 1 / den and d loss / d den of every token are read from ratio = (pointer, room of a row); m1 and the rows are
    pointers then: read once a tile they hold no registers. more: rows of `algebra.centre_softmax`.

    PART 0: all three, 1: dq, 2: dk and dv, 3: dk, 4: dv (what a part does not use is not loaded). STAGES: of the loop,
    if not those of the kernel.
    """
    SOFTMAX: tl.constexpr = FMAP == 3 or FMAP == 4
    MAP: tl.constexpr = FMAP + 3 if SOFTMAX and not NORM else FMAP
    ALONE: tl.constexpr = PART == 1 or PART >= 3
    i = tl.arange(0, BN)
    zero = tl.full([], 0, tl.int64)
    tiles = tl.cdiv(hi[0] - lo, BN)
    for t in tl.range(tiles, num_stages=STAGES):
        start = lo + (tiles - 1 - t) * BN
        live = alive(start + i, hi)
        rq = load_rows(q + (zero + start) * qn, i, qn, live, D, R1, R2, False)
        rk = load_rows(k + (zero + start) * kn, i, kn, live, D, R1, R2, False)
        tv = load_rows(v + (zero + start) * vn, i, vn, live, DV, V1, V2, False)
        tg = load_rows(g + (zero + start) * gn, i, gn, live, DV, V1, V2, False)
        fq = phi(rq, live, MAP, D, R1, R2)
        fk = phi(rk, live, MAP, D, R1, R2)
        if PART == 0 or PART == 2 or PART == 4:
            gv = zero_rows(BN, V1, V2)
            if ORDER != 2:
                gv = rowmul(gv, fk, trans4(w[0]), F2, V2, PREC)
            if ORDER == 2 or ORDER == 5:
                gv = rowmul(gv, fq, trans4(w[2]), F2, V2, PREC)
            gv = in_units(gv, unit, V2)
            if not NORM or is_shifted(FMAP):
                gv = add_row(gv, rows[2], NORM, ROW, DV, V1, V2)
            if SOFTMAX:
                gv = axpy2(gv, 1.0, as_row(more[2]), V2)
            put(dv + (zero + start) * dvn, i, dvn, live, gv, ALONE, DV, V1, V2)
        if PART == 0 or PART == 2 or PART == 3:
            gk = zero_rows(BN, F1, F2)
            if ORDER != 2:
                gk = rowmul(gk, tv, w[0], V2, F2, PREC)
            if ORDER == 2 or ORDER >= 4:
                gk = rowmul(gk, fk, w[1], F2, F2, PREC)
            if ORDER == 3 or ORDER == 5:
                gk = rowmul(gk, fq, w[3], F2, F2, PREC)
            gk = add_row(in_units(gk, unit, F2), rows[1], NORM, ROW, FD, F1, F2)
            if SOFTMAX:
                gk = axpy2(gk, 1.0, as_row(more[1]), F2)
            pk = phi32(rk, live, FMAP, D, R1, R2) if SOFTMAX else fk
            put(dk + (zero + start) * dkn, i, dkn, live, phi_grad(pk, gk, FMAP, R2), ALONE, D, R1, R2)
        if PART < 2:
            gq = rowmul(zero_rows(BN, F1, F2), tg, mt, V2, F2, PREC)
            if NORM:
                inverse = tl.load(ratio[0] + start + i, mask=live, other=0.0)[:, None]
                total = tl.load(ratio[0] + ratio[1] + start + i, mask=live, other=0.0)[:, None]
                gq = axpy2((gq[0] * inverse, gq[1] * inverse), total, as_row(load_vec(m1, FD, F1, F2)), F2)
            gq = in_units(gq, 1.0 / unit, F2)
            if ORDER == 2 or ORDER == 5:
                gq = rowmul(gq, tv, w[2], V2, F2, PREC)
            if ORDER == 3 or ORDER == 5:
                gq = rowmul(gq, fk, trans4(w[3]), F2, F2, PREC)
            if ORDER >= 4:
                gq = rowmul(gq, fq, w[4], F2, F2, PREC)
            gq = add_row(in_units(gq, unit, F2), rows[0], NORM, ROW, FD, F1, F2)
            if SOFTMAX:
                gq = axpy2(gq, 1.0, as_row(more[0]), F2)
            pq = phi32(rq, live, FMAP, D, R1, R2) if SOFTMAX else fq
            put(dq + (zero + start) * dqn, i, dqn, live, phi_grad(pq, gq, FMAP, R2), ALONE, D, R1, R2)
