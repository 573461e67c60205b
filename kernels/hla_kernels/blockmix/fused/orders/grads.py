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
def load_left(ptr, dtype: tl.constexpr, BOTH: tl.constexpr, F: tl.constexpr):
    """Return (left factor [F, F] in the dtype of the tokens, its unit), as `load_operator`; BOTH: with its transpose
    added."""
    m = load4(ptr, F, F, F.D, 1)
    if BOTH:
        m = add4(m, load4(ptr, F, F, 1, F.D), F, F)
    unit = 1.0
    if dtype == tl.float16:
        unit = power_of_two(largest(m, F, F))
        m = scale4(m, 1.0 / unit)
    return cast4(m, dtype), unit


@triton.jit
def anchored_row(vector, anchor, w, unit, ANCHOR: tl.constexpr, F: tl.constexpr, V: tl.constexpr):
    """Return dx - a dX' for the vectors at pointers and w = dX' in its unit."""
    row = load_vec(vector, F)
    if ANCHOR:
        row = axpy2(row, -unit, vecmat(load_vec(anchor, V), w, V, F), F)
    return row


@triton.jit
def plus(x, y, W: tl.constexpr):
    """Return x + y."""
    x2 = x[1]
    if W.D2 > 0:
        x2 = x[1] + y[1]
    return x[0] + y[0], x2


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def query_products(
    q, g, other, dq, inverses, totals, keep, scales, anchor, cos, sin, operator, operator_vector, right, vector, left,
    qs, gs, vs, dqs, GEO, N, H, BH, M, G, HT, chunk, scale, HLA2: tl.constexpr, NORM: tl.constexpr, TURN: tl.constexpr,
    EXACT: tl.constexpr, ALIGN: tl.constexpr, F: tl.constexpr, V: tl.constexpr, BN: tl.constexpr, PREC: tl.constexpr,
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
    cos = angles_at(cos, bh, H, HT, 0, F.D)
    sin = angles_at(sin, bh, H, HT, 0, F.D)
    dtype: tl.constexpr = q.dtype.element_ty
    DIGITS: tl.constexpr = digits(dtype, TURN > 0, False)
    at = (block * BH + bh).to(tl.int64)
    s = scale_of(scales, scale, bh, H)
    w, unit = load_operator(operator + at * F.D * V.D, dtype, 1, F, V)
    if HLA2:
        x, x_unit = load_operator(right + at * F.D * V.D, dtype, 1, F, V)
        if NORM:
            row = anchored_row(vector + at * F.D, anchor + bh * V.D, x[0], x_unit, TURN == 0, F, V)
    else:
        y, x_unit = load_left(left + at * F.D * F.D, dtype, False, F)
        y = trans4(y)
    if NORM:
        inverses += bh.to(tl.int64) * N
        totals += bh.to(tl.int64) * N
    hi = tl.minimum((part + 1) * chunk, b[0])
    for start in range(part * chunk, hi, BN):
        tokens, live = tile(start, hi, b, keep, BN)
        if HLA2:
            tv = load_rows(other, tokens, vs[1] * ALIGN, live, V, False)
            more = by_operator(tv, x, 1, V, F, PREC)
        else:
            t = load_rows(other, tokens, vs[1] * ALIGN, live, F, False)
            t = turn(t, cos, sin, tokens, live, HT, False, TURN, F)
            more = add_rows(zero_rows(BN, F), t, y, dtype, DIGITS, F, F, PREC)
        tg = load_rows(g, tokens, gs[1] * ALIGN, live, V, False)
        gq = times(by_operator(tg, w, 1, V, F, PREC), unit, F)
        if NORM:
            gq = times(gq, tl.load(inverses + tokens, mask=live, other=0.0)[:, None], F)
        gq = axpy2(gq, s * x_unit, more, F)
        gq = turn(gq, cos, sin, tokens, live, HT, True, TURN, F)
        if NORM:
            total = tl.load(totals + tokens, mask=live, other=0.0)
            gq = add_vector(gq, total, operator_vector + at * F.D, F)
            if HLA2:
                gq = axpy2(gq, s, as_row(row), F)
        store_rows(dq, tokens, dqs[1] * ALIGN, live, gq, F)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def key_products(
    q, k, v, dk, dv, keep, scales, anchor, cos, sin, right, vector, left, qs, ks, vs, dks, dvs, GEO, N, H, BH, M, G, HT,
    chunk, scale, PART: tl.constexpr, HLA2: tl.constexpr, NORM: tl.constexpr, TURN: tl.constexpr, EXACT: tl.constexpr,
    ALIGN: tl.constexpr, F: tl.constexpr, V: tl.constexpr, BN: tl.constexpr, PREC: tl.constexpr,
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
    cos = angles_at(cos, bh, H, HT, 0, F.D)
    sin = angles_at(sin, bh, H, HT, 0, F.D)
    dtype: tl.constexpr = k.dtype.element_ty
    DIGITS: tl.constexpr = digits(dtype, TURN > 0, False)
    at = (block * BH + bh).to(tl.int64)
    s = scale_of(scales, scale, bh, H)
    w, unit = load_operator(right + at * F.D * V.D, dtype, 1, F, V)
    y, y_unit = load_left(left + at * F.D * F.D, dtype, HLA2, F)
    if NORM and not HLA2:
        row = anchored_row(vector + at * F.D, anchor + bh * V.D, w[0], unit, TURN == 0, F, V)
    hi = tl.minimum((part + 1) * chunk, b[0])
    for start in range(part * chunk, hi, BN):
        tokens, live = tile(start, hi, b, keep, BN)
        tq = load_rows(q, tokens, qs[1] * ALIGN, live, F, False)
        tq = turn(tq, cos, sin, tokens, live, HT, False, TURN, F)
        f = load_rows(k, tokens, ks[1] * ALIGN, live, F, False)
        tk = turn(f, cos, sin, tokens, live, HT, False, TURN, F)
        if PART != 2:
            of_right = tq if HLA2 else tk
            gv = add_rows(zero_rows(BN, V), of_right, trans4(w[0]), dtype, DIGITS, F, V, PREC)
            store_rows(dv, tokens, dvs[1] * ALIGN, live, times(gv, s * unit, V), V)
        if PART != 1:
            of_left = tk if HLA2 else tq
            gk = times(add_rows(zero_rows(BN, F), of_left, y, dtype, DIGITS, F, F, PREC), s * y_unit, F)
            if not HLA2:
                tv = load_rows(v, tokens, vs[1] * ALIGN, live, V, False)
                gk = plus(gk, times(by_operator(tv, w, 1, V, F, PREC), s * unit, F), F)
            gk = turn(gk, cos, sin, tokens, live, HT, True, TURN, F)
            if NORM and not HLA2:
                gk = axpy2(gk, s, as_row(row), F)
            store_rows(dk, tokens, dks[1] * ALIGN, live, gk, F)
