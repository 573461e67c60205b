"""The passes that write the output and the gradients of the tokens of a head."""

import triton
import triton.language as tl

from ..algebra import has
from ..tiles import axpy2, load_rows, load_vec, rowmul, store_rows, trans4, zero_rows
from .extent import alive, anew
from .stores import get_ratio, store_tokens
from .vectors import as_row, columns, reciprocal, times_vector


@triton.jit
def read_out(
    q, o, qn, on, lo, hi, m, m1, row, eps, NORM: tl.constexpr, ROW: tl.constexpr, F: tl.constexpr, V: tl.constexpr,
    BN: tl.constexpr, PREC: tl.constexpr, unit=1.0,
):  # fmt: skip
    """Write o = q m (+ row) or, normalised, (q m + den row) / (den + eps) for tokens lo..hi, den = q.m1: exact for any
    eps, unlike row - eps row / (den + eps). m is in units of `unit` unless normalised.

    Last tile first: it is the one still in L2.
    """
    cols = m1
    if NORM:
        cols = columns(m1, q.dtype.element_ty, F)
    i = tl.arange(0, BN)
    zero = tl.full([], 0, tl.int64)
    tiles = tl.cdiv(hi[0] - lo, BN)
    for t in range(tiles):
        start = lo + (tiles - 1 - t) * BN
        live = alive(start + i, hi)
        j = anew(i, start, NORM and V.D2 > 0)
        tq = load_rows(q + (zero + start) * qn, j, qn, live, F, False)
        y = rowmul(zero_rows(BN, V), tq, m, F, V, PREC)
        if NORM:
            den = times_vector(tq, cols, F)
            inverse = reciprocal(den + eps, live, q.dtype.element_ty)[:, None]
            y = axpy2(y, den[:, None], as_row(row), V)
            y = (y[0] * inverse, y[1] * inverse)
        elif ROW:
            y = axpy2(in_units(y, unit, V), 1.0, as_row(row), V)
        else:
            y = in_units(y, unit, V)
        store_tokens(o + (zero + start) * on, j, on, live, y, V)


@triton.jit
def in_units(x, unit, W: tl.constexpr):
    """x unit; a unit of 1.0 is a constant and costs nothing."""
    x2 = x[1]
    if W.D2 > 0:
        x2 = x[1] * unit
    return x[0] * unit, x2


@triton.jit
def add_row(x, row, NORM: tl.constexpr, ROW: tl.constexpr, F: tl.constexpr):
    """x + a row of F columns for every token, when normalised a pointer, read once a tile (it holds no registers then);
    x alone without one."""
    if NORM:
        x = axpy2(x, 1.0, as_row(load_vec(row, F)), F)
    elif ROW:
        x = axpy2(x, 1.0, as_row(row), F)
    return x


@triton.jit
def add_product(acc, x, m, APART: tl.constexpr, K: tl.constexpr, B: tl.constexpr, PREC: tl.constexpr):
    """`tiles.rowmul`; APART: the product by itself, then the sum. A product that another one starts from is given to 8
    warps in another way than that one, and goes from one to the other through shared memory."""
    if APART and K.D2 == 0 and B.D2 == 0:
        o1 = acc[0] + tl.dot(x[0], m[0], input_precision=PREC, max_num_imprecise_acc=16)
        out = (o1, o1)
    else:
        out = rowmul(acc, x, m, K, B, PREC)
    return out


@triton.jit
def put(ptr, i, stride, live, x, ALONE: tl.constexpr, W: tl.constexpr):
    """`store_tokens` where a program writes nothing else: several gradients leave no registers for whole rows."""
    if ALONE:
        store_tokens(ptr, i, stride, live, x, W)
    else:
        store_rows(ptr, i, stride, live, x, W)


@triton.jit
def write_grads(
    q, k, v, g, dq, dk, dv, qn, kn, vn, gn, dqn, dkn, dvn, lo, hi, mt, m1, ratio, w, unit, rows, PART: tl.constexpr,
    ORDER: tl.constexpr, NORM: tl.constexpr, ROW: tl.constexpr, F: tl.constexpr, V: tl.constexpr, BN: tl.constexpr,
    PREC: tl.constexpr, mt_unit=1.0,
):  # fmt: skip
    """dq = read-out + k WR + q WW + v WC', dk = k WS + q WR' + v WP', dv = k WP + q WC, plus rows; w = (WP', WS, WC',
    WR', WW) in units of `unit`, mt in units of `mt_unit`.

    NORM: 1 / den and d loss / d den of every token are read from ratio [*, 2]; m1 and the rows are
    pointers then.

    PART: which gradients, "qkv", "q", "kv", "k" or "v" (what a part does not use is not loaded).
    """
    ALONE: tl.constexpr = PART == "q" or PART == "k" or PART == "v"
    dtype: tl.constexpr = q.dtype.element_ty
    APART: tl.constexpr = ORDER != "polynomial" and F.D1 > 64 and V.D1 > 64 and dtype != tl.float32
    # addresses of operands would stay in registers from turn to turn: 80 of them and more
    HERE: tl.constexpr = F.D2 > 0 and (NORM or ORDER == "polynomial")
    row_q, row_k, row_v = rows
    i = anew(tl.arange(0, BN), hi[0], F.D2 > 0 and ROW and ORDER == "hla3" and not NORM)  # nor from the pass before
    zero = tl.full([], 0, tl.int64)
    tiles = tl.cdiv(hi[0] - lo, BN)
    for t in tl.range(tiles, disable_licm=HERE):
        start = lo + (tiles - 1 - t) * BN
        j = anew(i, start, F.D2 > 0 and (ROW or ORDER == "ahla"))
        live = alive(start + j, hi)
        tq = load_rows(q + (zero + start) * qn, j, qn, live, F, False)
        tk = load_rows(k + (zero + start) * kn, j, kn, live, F, False)
        tv = load_rows(v + (zero + start) * vn, j, vn, live, V, False)
        tg = load_rows(g + (zero + start) * gn, j, gn, live, V, False)
        if PART == "qkv" or PART == "kv" or PART == "v":
            gv = zero_rows(BN, V)
            if has("P", ORDER):
                gv = rowmul(gv, tk, trans4(w[0]), F, V, PREC)
            if has("C", ORDER):
                gv = rowmul(gv, tq, trans4(w[2]), F, V, PREC)
            gv = in_units(gv, unit, V)
            if not NORM:
                gv = add_row(gv, row_v, NORM, ROW, V)
            put(dv + (zero + start) * dvn, j, dvn, live, gv, ALONE, V)
        if PART == "qkv" or PART == "kv" or PART == "k":
            gk = zero_rows(BN, F)
            if has("P", ORDER):
                gk = rowmul(gk, tv, w[0], V, F, PREC)
            if has("S", ORDER):
                gk = add_product(gk, tk, w[1], APART and has("P", ORDER), F, F, PREC)
            if has("R", ORDER):
                gk = add_product(gk, tq, w[3], APART, F, F, PREC)
            gk = add_row(in_units(gk, unit, F), row_k, NORM, ROW, F)
            put(dk + (zero + start) * dkn, j, dkn, live, gk, ALONE, F)
        if PART == "qkv" or PART == "q":
            gq = rowmul(zero_rows(BN, F), tg, mt, V, F, PREC)
            if NORM:
                inverse, total = get_ratio(ratio, start + i, live)
                gq = (gq[0] * inverse[:, None], gq[1] * inverse[:, None])
                gq = axpy2(gq, total[:, None], as_row(load_vec(m1, F)), F)
            gq = in_units(gq, mt_unit / unit, F)
            if has("C", ORDER):
                gq = add_product(gq, tv, w[2], APART, V, F, PREC)
            if has("R", ORDER):
                gq = add_product(gq, tk, trans4(w[3]), APART, F, F, PREC)
            if has("W", ORDER):
                gq = add_product(gq, tq, w[4], APART, F, F, PREC)
            gq = add_row(in_units(gq, unit, F), row_q, NORM, ROW, F)
            put(dq + (zero + start) * dqn, j, dqn, live, gq, ALONE, F)
