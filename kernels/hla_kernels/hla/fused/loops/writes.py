"""The passes that write the output and the gradients of the tokens of a head."""

import triton
import triton.language as tl

from ..tiles import axpy2, load_rows, load_vec, rowmul, store_rows, trans4, zero_rows
from .extent import alive, anew
from .stores import get_ratio, store_tokens
from .vectors import add_common, as_row, columns, ones_tile, reciprocal, stored_row, times_vector


@triton.jit
def read_out(
    q, o, qn, on, lo, hi, m, m1, row, eps, NORM: tl.constexpr, ROW: tl.constexpr, D: tl.constexpr, F1: tl.constexpr,
    F2: tl.constexpr, DV: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, BN: tl.constexpr, PREC: tl.constexpr,
    unit=1.0,
):  # fmt: skip
    """Write o = q m (+ row) or, normalised, (q m + den row) / (den + eps) for tokens lo..hi, den = q.m1: exact for any
    eps, unlike row - eps row / (den + eps). m is in units of `unit` unless normalised.

    Last tile first: it is the one still in L2.
    """
    cols = m1
    if NORM:
        cols = columns(m1, q.dtype.element_ty, F2)
    i = tl.arange(0, BN)
    zero = tl.full([], 0, tl.int64)
    tiles = tl.cdiv(hi[0] - lo, BN)
    for t in range(tiles):
        start = lo + (tiles - 1 - t) * BN
        live = alive(start + i, hi)
        j = anew(i, start, NORM and V2 > 0)
        tq = load_rows(q + (zero + start) * qn, j, qn, live, D, F1, F2, False)
        y = rowmul(zero_rows(BN, V1, V2), tq, m, F2, V2, PREC)
        if NORM:
            den = times_vector(tq, cols, F2)
            inverse = reciprocal(den + eps, live, q.dtype.element_ty)[:, None]
            y = axpy2(y, den[:, None], as_row(row), V2)
            y = (y[0] * inverse, y[1] * inverse)
        elif ROW:
            y = axpy2(in_units(y, unit, V2), 1.0, as_row(row), V2)
        else:
            y = in_units(y, unit, V2)
        store_tokens(o + (zero + start) * on, j, on, live, y, DV, V1, V2)


@triton.jit
def in_units(x, unit, D2: tl.constexpr):
    """x unit; a unit of 1.0 is a constant and costs nothing."""
    x2 = x[1]
    if D2 > 0:
        x2 = x[1] * unit
    return x[0] * unit, x2


@triton.jit
def add_row(
    x, row, ones, NORM: tl.constexpr, MATRIX: tl.constexpr, ROW: tl.constexpr, FD: tl.constexpr, F1: tl.constexpr,
    F2: tl.constexpr,
):  # fmt: skip
    """x + a row of F columns for every token: a MATRIX of `common_row`, or when normalised a pointer, read once a tile
    (it holds no registers then); x alone without one."""
    if MATRIX:
        x = add_common(x, row, ones, F2)
    elif NORM:
        x = axpy2(x, 1.0, as_row(load_vec(row, FD, F1, F2)), F2)
    elif ROW:
        x = axpy2(x, 1.0, as_row(row), F2)
    return x


@triton.jit
def add_product(acc, x, m, APART: tl.constexpr, K2: tl.constexpr, B2: tl.constexpr, PREC: tl.constexpr):
    """`tiles.rowmul`; APART: the product by itself, then the sum. A product that another one starts from is given to 8
    warps in another way than that one, and goes from one to the other through shared memory."""
    if APART and K2 == 0 and B2 == 0:
        o1 = acc[0] + tl.dot(x[0], m[0], input_precision=PREC, max_num_imprecise_acc=16)
        out = (o1, o1)
    else:
        out = rowmul(acc, x, m, K2, B2, PREC)
    return out


@triton.jit
def put(ptr, i, stride, live, x, ALONE: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr):
    """`store_tokens` where a program writes nothing else: several gradients leave no registers for whole rows."""
    if ALONE:
        store_tokens(ptr, i, stride, live, x, D, D1, D2)
    else:
        store_rows(ptr, i, stride, live, x, D, D1, D2)


@triton.jit
def write_grads(
    q, k, v, g, dq, dk, dv, qn, kn, vn, gn, dqn, dkn, dvn, lo, hi, mt, m1, ratio, w, unit, rows, PART: tl.constexpr,
    ORDER: tl.constexpr, NORM: tl.constexpr, ROW: tl.constexpr, D: tl.constexpr, F1: tl.constexpr, F2: tl.constexpr,
    DV: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, FD: tl.constexpr, BN: tl.constexpr, PREC: tl.constexpr,
    STAGES: tl.constexpr = None, TILED: tl.constexpr = True, mt_unit=1.0,
):  # fmt: skip
    """dq = read-out + k WR + q WW + v WC', dk = k WS + q WR' + v WP', dv = k WP + q WC, plus rows; w = (WP', WS, WC',
    WR', WW) in units of `unit`, mt in units of `mt_unit`.

    NORM: 1 / den and d loss / d den of every token are read from ratio [*, 2]; m1 and the rows are
    pointers then.

    PART 0: all three, 1: dq, 2: dk and dv, 3: dk, 4: dv (what a part does not use is not loaded).
    STAGES: stages of the loop, if different from the kernel's. TILED: rows of a ratio are
    products with a tile of ones.
    """
    ALONE: tl.constexpr = PART == 1 or PART >= 3
    dtype: tl.constexpr = q.dtype.element_ty
    APART: tl.constexpr = ORDER < 5 and F1 > 64 and V1 > 64 and dtype != tl.float32
    MATRIX: tl.constexpr = TILED and NORM and F1 <= 64 and V1 <= 64 and dtype == tl.bfloat16
    # addresses of operands would stay in registers from turn to turn: 80 of them and more
    HERE: tl.constexpr = F2 > 0 and (NORM or ORDER == 5)
    row_q, row_k, row_v = rows
    ones = q
    if MATRIX:
        row_q = stored_row(rows[0], FD, F1, F2)
        row_k = stored_row(rows[1], FD, F1, F2)
        row_v = stored_row(rows[2], DV, V1, V2)
        ones = ones_tile(q, BN)
    i = anew(tl.arange(0, BN), hi[0], F2 > 0 and ROW and ORDER == 4 and not NORM)  # nor from the pass before
    zero = tl.full([], 0, tl.int64)
    tiles = tl.cdiv(hi[0] - lo, BN)
    for t in tl.range(tiles, num_stages=STAGES, disable_licm=HERE):
        start = lo + (tiles - 1 - t) * BN
        j = anew(i, start, F2 > 0 and (ROW or ORDER == 3))
        live = alive(start + j, hi)
        tq = load_rows(q + (zero + start) * qn, j, qn, live, D, F1, F2, False)
        tk = load_rows(k + (zero + start) * kn, j, kn, live, D, F1, F2, False)
        tv = load_rows(v + (zero + start) * vn, j, vn, live, DV, V1, V2, False)
        tg = load_rows(g + (zero + start) * gn, j, gn, live, DV, V1, V2, False)
        if PART == 0 or PART == 2 or PART == 4:
            gv = zero_rows(BN, V1, V2)
            if ORDER != 2:
                gv = rowmul(gv, tk, trans4(w[0]), F2, V2, PREC)
            if ORDER == 2 or ORDER == 5:
                gv = rowmul(gv, tq, trans4(w[2]), F2, V2, PREC)
            gv = in_units(gv, unit, V2)
            if not NORM:
                gv = add_row(gv, row_v, ones, NORM, MATRIX, ROW, DV, V1, V2)
            put(dv + (zero + start) * dvn, j, dvn, live, gv, ALONE, DV, V1, V2)
        if PART == 0 or PART == 2 or PART == 3:
            gk = zero_rows(BN, F1, F2)
            if ORDER != 2:
                gk = rowmul(gk, tv, w[0], V2, F2, PREC)
            if ORDER == 2 or ORDER >= 4:
                gk = add_product(gk, tk, w[1], APART and ORDER != 2, F2, F2, PREC)
            if ORDER == 3 or ORDER == 5:
                gk = add_product(gk, tq, w[3], APART, F2, F2, PREC)
            gk = add_row(in_units(gk, unit, F2), row_k, ones, NORM, MATRIX, ROW, FD, F1, F2)
            put(dk + (zero + start) * dkn, j, dkn, live, gk, ALONE, D, F1, F2)
        if PART < 2:
            gq = rowmul(zero_rows(BN, F1, F2), tg, mt, V2, F2, PREC)
            if NORM:
                inverse, total = get_ratio(ratio, start + i, live)
                gq = (gq[0] * inverse[:, None], gq[1] * inverse[:, None])
                gq = axpy2(gq, total[:, None], as_row(load_vec(m1, FD, F1, F2)), F2)
            gq = in_units(gq, mt_unit / unit, F2)
            if ORDER == 2 or ORDER == 5:
                gq = add_product(gq, tv, w[2], APART, V2, F2, PREC)
            if ORDER == 3 or ORDER == 5:
                gq = add_product(gq, tk, trans4(w[3]), APART, F2, F2, PREC)
            if ORDER >= 4:
                gq = add_product(gq, tq, w[4], APART, F2, F2, PREC)
            gq = add_row(in_units(gq, unit, F2), row_q, ones, NORM, MATRIX, ROW, FD, F1, F2)
            put(dq + (zero + start) * dqn, j, dqn, live, gq, ALONE, D, F1, F2)
