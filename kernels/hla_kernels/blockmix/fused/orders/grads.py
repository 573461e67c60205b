"""Gradients of the tokens of a higher order, through the read-out and through the moments."""

import triton
import triton.language as tl

from ....hla.fused.algebra import largest
from ....hla.fused.loops.vectors import as_row
from ....hla.fused.tiles import (
    add4,
    axpy2,
    cast4,
    load4,
    load_rows,
    load_vec,
    power_of_two,
    scale4,
    store_rows,
    trans4,
    vecmat,
    zero_rows,
)
from ..features import add_rows, angles_at, digits, turn
from ..geometry import at_head, box, keep_of, place, scale_of, tile
from ..tokens import NO_SPECIALIZE, add_vector, by_operator, load_operator, times


@triton.jit
def load_left(ptr, dtype: tl.constexpr, BOTH: tl.constexpr, D: tl.constexpr, F1: tl.constexpr, F2: tl.constexpr):
    """Return (left factor [F, F] in the dtype of the tokens, its unit), as `load_operator`; BOTH: with its transpose
    added."""
    m = load4(ptr, D, F1, F2, D, F1, F2, D, 1)
    if BOTH:
        m = add4(m, load4(ptr, D, F1, F2, D, F1, F2, 1, D), F2, F2)
    unit = 1.0
    if dtype == tl.float16:
        unit = power_of_two(largest(m, F2, F2))
        m = scale4(m, 1.0 / unit)
    return cast4(m, dtype), unit


@triton.jit
def anchored_row(
    vector, anchor, w, unit, ANCHOR: tl.constexpr, D: tl.constexpr, F1: tl.constexpr, F2: tl.constexpr,
    DV: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr,
):  # fmt: skip
    """Return dx - a dX' for the vectors at pointers and w = dX' in its unit."""
    row = load_vec(vector, D, F1, F2)
    if ANCHOR:
        row = axpy2(row, -unit, vecmat(load_vec(anchor, DV, V1, V2), w, V2, F2), F2)
    return row


@triton.jit
def plus(x, y, D2: tl.constexpr):
    """Return x + y."""
    x2 = x[1]
    if D2 > 0:
        x2 = x[1] + y[1]
    return x[0] + y[0], x2


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def query_products(
    q, g, other, dq, inverses, totals, keep, scales, anchor, cos, sin, operator, operator_vector, right, vector, left,
    qs, gs, vs, dqs, GEO, N, H, BH, M, G, HT, chunk, scale, HLA2: tl.constexpr, NORM: tl.constexpr, TURN: tl.constexpr,
    EXACT: tl.constexpr, ALIGN: tl.constexpr, D: tl.constexpr, F1: tl.constexpr, F2: tl.constexpr, DV: tl.constexpr,
    V1: tl.constexpr, V2: tl.constexpr, BN: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Compute dq: do O' (NORM: / den + total o), plus s k dR (other = k) or, HLA2, s (v dC' + dc - anchor dC')
    (other = v)."""
    bh, block, part = place(BH, M)
    b = box(GEO, block)
    q = at_head(q, qs, bh, H, 1, ALIGN)
    g = at_head(g, gs, bh, H, 1, ALIGN)
    other = at_head(other, vs, bh, H, G, ALIGN)
    dq = at_head(dq, dqs, bh, H, 1, ALIGN)
    keep = keep_of(keep, bh, H, N)
    cos = angles_at(cos, bh, H, HT, 0, D)
    sin = angles_at(sin, bh, H, HT, 0, D)
    dtype: tl.constexpr = q.dtype.element_ty
    DIGITS: tl.constexpr = digits(dtype, TURN > 0, False)
    at = (block * BH + bh).to(tl.int64)
    s = scale_of(scales, scale, bh, H)
    w, unit = load_operator(operator + at * D * DV, dtype, 1, D, F1, F2, DV, V1, V2)
    if HLA2:
        x, x_unit = load_operator(right + at * D * DV, dtype, 1, D, F1, F2, DV, V1, V2)
        if NORM:
            row = anchored_row(vector + at * D, anchor + bh * DV, x[0], x_unit, TURN == 0, D, F1, F2, DV, V1, V2)
    else:
        y, x_unit = load_left(left + at * D * D, dtype, False, D, F1, F2)
        y = trans4(y)
    if NORM:
        inverses += bh.to(tl.int64) * N
        totals += bh.to(tl.int64) * N
    hi = tl.minimum((part + 1) * chunk, b[0])
    for start in range(part * chunk, hi, BN):
        tokens, live = tile(start, hi, b, keep, BN)
        if HLA2:
            tv = load_rows(other, tokens, vs[1] * ALIGN, live, DV, V1, V2, False)
            more = by_operator(tv, x, 1, V2, F1, F2, PREC)
        else:
            t = load_rows(other, tokens, vs[1] * ALIGN, live, D, F1, F2, False)
            t = turn(t, cos, sin, tokens, live, HT, False, TURN, D, F1, F2)
            more = add_rows(zero_rows(BN, F1, F2), t, y, dtype, DIGITS, F2, F2, PREC)
        tg = load_rows(g, tokens, gs[1] * ALIGN, live, DV, V1, V2, False)
        gq = times(by_operator(tg, w, 1, V2, F1, F2, PREC), unit, F2)
        if NORM:
            gq = times(gq, tl.load(inverses + tokens, mask=live, other=0.0)[:, None], F2)
        gq = axpy2(gq, s * x_unit, more, F2)
        gq = turn(gq, cos, sin, tokens, live, HT, True, TURN, D, F1, F2)
        if NORM:
            total = tl.load(totals + tokens, mask=live, other=0.0)
            gq = add_vector(gq, total, operator_vector + at * D, D, F1, F2)
            if HLA2:
                gq = axpy2(gq, s, as_row(row), F2)
        store_rows(dq, tokens, dqs[1] * ALIGN, live, gq, D, F1, F2)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def key_products(
    q, k, v, dk, dv, keep, scales, anchor, cos, sin, right, vector, left, qs, ks, vs, dks, dvs, GEO, N, H, BH, M, G, HT,
    chunk, scale, PART: tl.constexpr, HLA2: tl.constexpr, NORM: tl.constexpr, TURN: tl.constexpr, EXACT: tl.constexpr,
    ALIGN: tl.constexpr, D: tl.constexpr, F1: tl.constexpr, F2: tl.constexpr, DV: tl.constexpr, V1: tl.constexpr,
    V2: tl.constexpr, BN: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Compute dk = s (q dR' + v dP' (NORM: + dz - anchor dP')) and dv = s k dP; HLA2: s k (dS + dS') and s q dC.

    PART 0: both, 1: dv, 2: dk.
    """
    bh, block, part = place(BH, M)
    b = box(GEO, block)
    q = at_head(q, qs, bh, H, 1, ALIGN)
    k = at_head(k, ks, bh, H, G, ALIGN)
    v = at_head(v, vs, bh, H, G, ALIGN)
    dk = at_head(dk, dks, bh, H, 1, ALIGN)
    dv = at_head(dv, dvs, bh, H, 1, ALIGN)
    keep = keep_of(keep, bh, H, N)
    cos = angles_at(cos, bh, H, HT, 0, D)
    sin = angles_at(sin, bh, H, HT, 0, D)
    dtype: tl.constexpr = k.dtype.element_ty
    DIGITS: tl.constexpr = digits(dtype, TURN > 0, False)
    at = (block * BH + bh).to(tl.int64)
    s = scale_of(scales, scale, bh, H)
    w, unit = load_operator(right + at * D * DV, dtype, 1, D, F1, F2, DV, V1, V2)
    y, y_unit = load_left(left + at * D * D, dtype, HLA2, D, F1, F2)
    if NORM and not HLA2:
        row = anchored_row(vector + at * D, anchor + bh * DV, w[0], unit, TURN == 0, D, F1, F2, DV, V1, V2)
    hi = tl.minimum((part + 1) * chunk, b[0])
    for start in range(part * chunk, hi, BN):
        tokens, live = tile(start, hi, b, keep, BN)
        tq = load_rows(q, tokens, qs[1] * ALIGN, live, D, F1, F2, False)
        tq = turn(tq, cos, sin, tokens, live, HT, False, TURN, D, F1, F2)
        f = load_rows(k, tokens, ks[1] * ALIGN, live, D, F1, F2, False)
        tk = turn(f, cos, sin, tokens, live, HT, False, TURN, D, F1, F2)
        if PART != 2:
            of_right = tq if HLA2 else tk
            gv = add_rows(zero_rows(BN, V1, V2), of_right, trans4(w[0]), dtype, DIGITS, F2, V2, PREC)
            store_rows(dv, tokens, dvs[1] * ALIGN, live, times(gv, s * unit, V2), DV, V1, V2)
        if PART != 1:
            of_left = tk if HLA2 else tq
            gk = times(add_rows(zero_rows(BN, F1, F2), of_left, y, dtype, DIGITS, F2, F2, PREC), s * y_unit, F2)
            if not HLA2:
                tv = load_rows(v, tokens, vs[1] * ALIGN, live, DV, V1, V2, False)
                gk = plus(gk, times(by_operator(tv, w, 1, V2, F1, F2, PREC), s * unit, F2), F2)
            gk = turn(gk, cos, sin, tokens, live, HT, True, TURN, D, F1, F2)
            if NORM and not HLA2:
                gk = axpy2(gk, s, as_row(row), F2)
            store_rows(dk, tokens, dks[1] * ALIGN, live, gk, D, F1, F2)
