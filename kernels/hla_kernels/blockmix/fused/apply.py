"""Kernels that multiply tokens by matrices of their block: the output, and the gradients of tokens."""

import triton
import triton.language as tl

from ...hla.fused.loops.settle import settled4
from ...hla.fused.loops.sums import end_sum
from ...hla.fused.loops.vectors import as_row, columns, times_vector
from ...hla.fused.tiles import (
    axpy2,
    load_rows,
    load_vec,
    outer4_begin,
    outer4_end,
    scale4,
    store4,
    store_rows,
    store_vec,
    trans4,
    zero_rows,
)
from .features import add_outer, add_rows, angles_at, digits, turn
from .geometry import at_head, keep_of, scale_of, tile, work
from .tokens import (
    NO_SPECIALIZE,
    add_vector,
    add_weighted,
    anchored_row,
    begin_weighted,
    by_operator,
    load_anchor,
    load_operator,
    times,
    total_grad,
    unit_of,
)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def blockmix_read_out(
    q, o, inverses, keep, anchor, shift, cos, sin, mixed, mixed_vector, qs, os, GEO, N, H, BH, M, G, HT, chunk, eps,
    NORM: tl.constexpr, TURN: tl.constexpr, EXACT: tl.constexpr, ALIGN: tl.constexpr, F: tl.constexpr, V: tl.constexpr,
    BN: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Compute o = phi(q) P~ of the query's block, with rotated phi.

    NORM: divided by den = phi(q).z~ + eps, with unrotated phi, plus a (1 - eps / den) for the anchor a; 1 / den
    [B * H, N] is stored for the backward, in float16 as 0 for queries without features.
    """
    bh, at, b, lo, hi = work(GEO, BH, M, chunk)
    keep = keep_of(keep, bh, H, N)
    q = at_head(q, qs, bh, H, 1, ALIGN)
    o = at_head(o, os, bh, H, 1, ALIGN)
    angles = angles_at(cos, sin, bh, H, HT, 0, F.D)
    dtype: tl.constexpr = q.dtype.element_ty
    w, unit = load_operator(mixed + at * F.D * V.D, dtype, 1, F, V)
    wt = trans4(w[0])
    if NORM:
        z = columns(load_vec(mixed_vector + at * F.D, F), dtype, F, EXACT)
        inverses += bh.to(tl.int64) * N
    for start in range(lo, hi, BN):
        tokens, live = tile(start, hi, b, keep, BN)
        f = load_rows(q, tokens, qs[1] * ALIGN, live, F, False)
        t = turn(f, angles, tokens, live, HT, False, TURN, F)
        y = add_rows(zero_rows(BN, V), t, wt, dtype, digits(dtype, TURN is not None, False), F, V, PREC)
        factor = unit
        if NORM:
            den = times_vector(f, z, F)
            inverse = 1.0 / tl.where(live, den + eps, 1.0)
            kept = inverse
            if dtype == tl.float16:  # 1 / eps would leave its range, and no map passes gradients of features that are 0
                kept = tl.where(den == 0.0, 0.0, inverse)
            tl.store(inverses + tokens, kept, mask=live)
            factor = (inverse * unit)[:, None]
        y = times(y, factor, V)
        if NORM and TURN is None:
            y = axpy2(y, (1.0 - eps * inverse)[:, None], as_row(load_anchor(anchor, shift, bh, at, V)), V)
        store_rows(o, tokens, os[1] * ALIGN, live, y, V)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def blockmix_query_grads(
    q, g, dq, inverses, totals, keep, anchor, shift, cos, sin, mixed, mixed_vector, matrix, vector, qs, gs, dqs, GEO, N,
    H, BH, M, G, HT, chunk, eps, NORM: tl.constexpr, TURN: tl.constexpr, EXACT: tl.constexpr, ALIGN: tl.constexpr,
    F: tl.constexpr, V: tl.constexpr, FINE: tl.constexpr, BN: tl.constexpr, SPLIT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Compute what is not None: dq; d loss / d den `totals` [B * H, N] of the ratio; and the gradients of the mixed
    moments, dP~' = Sum do phi(q)' (ratio: do phi(q)' / den, with the quotient in two digits) and dz~.

    FINE: dq from operators in two digits. SPLIT: number of programs that split the features of a head; F: the width of
    one program. 1 for the ratio, which needs all features.
    """
    bh, at, b, lo, hi = work(GEO, BH, M, chunk, SPLIT)
    keep = keep_of(keep, bh, H, N)
    first = tl.program_id(0) % SPLIT * F.D
    q = at_head(q, qs, bh, H, 1, ALIGN) + first
    g = at_head(g, gs, bh, H, 1, ALIGN)
    angles = angles_at(cos, sin, bh, H, HT, first, F.D * SPLIT)
    dtype: tl.constexpr = q.dtype.element_ty
    ANCHOR: tl.constexpr = NORM and TURN is None
    DIGITS: tl.constexpr = digits(dtype, NORM or TURN is not None, EXACT)
    OF_P: tl.constexpr = digits(dtype, FINE or (NORM and EXACT), NORM and EXACT)
    w, unit = load_operator(mixed + at * F.D * SPLIT * V.D + first, dtype, OF_P, F, V, SPLIT)
    a = anchor
    if ANCHOR:
        a = columns(load_anchor(anchor, shift, bh, at, V), dtype, V, EXACT)
    if dq is not None:
        dq = at_head(dq, dqs, bh, H, 1, ALIGN) + first
    if NORM:
        inverses += bh.to(tl.int64) * N
    if totals is not None:
        totals += bh.to(tl.int64) * N
    qn, gn, dqn = qs[1] * ALIGN, gs[1] * ALIGN, dqs[1] * ALIGN
    over = 1.0
    if matrix is not None:
        acc = outer4_begin(V, F, False, False)
        dz = begin_weighted(dtype, BN, F, NORM)
        if NORM:
            over = unit_of(inverses, lo, hi, b, keep, dtype, BN)
    for start in range(lo, hi, BN):
        tokens, live = tile(start, hi, b, keep, BN)
        tg = load_rows(g, tokens, gn, live, V, False)
        f = load_rows(q, tokens, qn, live, F, False)
        t = turn(f, angles, tokens, live, HT * SPLIT, False, TURN, F)
        gt = times(by_operator(tg, w, OF_P, V, F, PREC), unit, F)
        if NORM:
            inverse = tl.load(inverses + tokens, mask=live, other=0.0)
            total = total_grad(t, tg, gt, inverse, a, eps, ANCHOR, F, V)
            if totals is not None:
                tl.store(totals + tokens, total, mask=live)
            gt = times(gt, inverse[:, None], F)
            if matrix is not None:
                dz = add_weighted(dz, f, total, F, EXACT)
                t = times(t, inverse[:, None] * over, F)
        if dq is not None:
            gq = turn(gt, angles, tokens, live, HT * SPLIT, True, TURN, F)
            if NORM:
                gq = add_vector(gq, total, mixed_vector + at * F.D, F)
            store_rows(dq, tokens, dqn, live, gq, F)
        if matrix is not None:
            acc = settled4(add_outer(acc, tg, t, live, dtype, DIGITS, V, F, PREC), V, F)
    if matrix is not None:
        pid = (tl.program_id(0) // SPLIT).to(tl.int64)
        p = scale4(outer4_end(acc, V), 1.0 / over)
        store4(matrix + pid * F.D * SPLIT * V.D + first, p, V, F, F.D * SPLIT, 1)
        if NORM:
            store_vec(vector + pid * F.D, end_sum(dz, F, True), F)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def blockmix_token_grads(
    x, y, v, dx, dv, keep, scales, anchor, cos, sin, right, vector, left, xs, ys, vs, dxs, dvs, GEO, N, H, BH, M, G, HT,
    chunk, scale, GX, GY, BOTH: tl.constexpr, NORM: tl.constexpr, TURN: tl.constexpr, EXACT: tl.constexpr,
    ALIGN: tl.constexpr, F: tl.constexpr, V: tl.constexpr, FINE: tl.constexpr, BN: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Compute dx = s (x L' + v R' (NORM: + r - anchor R')) and dv = s y R from the gradients of the moments of a block,
    L' = `left`, R' = `right` and r = `vector`, with rotated features x and y. What is None is left out.

        la    y = k          R, r = dP, dz    dx = dk
        ahla  x = q, y = k   L = dR           dx = dk
        hla2  x = k, y = q   R = dC           dx = dk   BOTH: L = dS + dS', without v

    GX, GY heads share x, y. FINE: dx from R in two digits.
    """
    bh, at, b, lo, hi = work(GEO, BH, M, chunk)
    keep = keep_of(keep, bh, H, N)
    dtype: tl.constexpr = y.dtype.element_ty
    DIGITS: tl.constexpr = digits(dtype, TURN is not None, False)
    OF_P: tl.constexpr = digits(dtype, FINE, False)
    s = scale_of(scales, scale, bh, H)
    y = at_head(y, ys, bh, H, GY, ALIGN)
    w, unit = load_operator(right + at * F.D * V.D, dtype, OF_P, F, V)
    if x is not None:
        x = at_head(x, xs, bh, H, GX, ALIGN)
        m, m_unit = load_operator(left + at * F.D * F.D, dtype, 1, F, F, 1, BOTH)
    if v is not None:
        v = at_head(v, vs, bh, H, G, ALIGN)
        if NORM:
            row = anchored_row(vector + at * F.D, anchor + bh * V.D, w, unit, OF_P, TURN is None, F, V)
    if dx is not None:
        dx = at_head(dx, dxs, bh, H, 1, ALIGN)
    if dv is not None:
        dv = at_head(dv, dvs, bh, H, 1, ALIGN)
    angles = angles_at(cos, sin, bh, H, HT, 0, F.D)
    for start in range(lo, hi, BN):
        tokens, live = tile(start, hi, b, keep, BN)
        if x is None:
            tv = load_rows(v, tokens, vs[1] * ALIGN, live, V, False)
        else:
            tx = load_rows(x, tokens, xs[1] * ALIGN, live, F, False)
            tx = turn(tx, angles, tokens, live, HT, False, TURN, F)
        if dv is not None:
            ty = load_rows(y, tokens, ys[1] * ALIGN, live, F, False)
            ty = turn(ty, angles, tokens, live, HT, False, TURN, F)
            gv = add_rows(zero_rows(BN, V), ty, trans4(w[0]), dtype, DIGITS, F, V, PREC)
            store_rows(dv, tokens, dvs[1] * ALIGN, live, times(gv, s * unit, V), V)
        if dx is not None:
            if x is not None:
                g = times(add_rows(zero_rows(BN, F), tx, m[0], dtype, DIGITS, F, F, PREC), s * m_unit, F)
                if v is not None:
                    tv = load_rows(v, tokens, vs[1] * ALIGN, live, V, False)
                    g = axpy2(g, 1.0, times(by_operator(tv, w, OF_P, V, F, PREC), s * unit, F), F)
            else:
                g = times(by_operator(tv, w, OF_P, V, F, PREC), s * unit, F)
            g = turn(g, angles, tokens, live, HT, True, TURN, F)
            if NORM and v is not None:
                g = axpy2(g, s, as_row(row), F)
            store_rows(dx, tokens, dxs[1] * ALIGN, live, g, F)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def blockmix_query_products(
    g, other, dq, inverses, totals, keep, scales, anchor, cos, sin, operator, operator_vector, right, vector, left, gs,
    others, dqs, GEO, N, H, BH, M, G, HT, chunk, scale, ORDER: tl.constexpr, NORM: tl.constexpr, TURN: tl.constexpr,
    EXACT: tl.constexpr, ALIGN: tl.constexpr, F: tl.constexpr, V: tl.constexpr, BN: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Compute dq of a higher order: do O' (NORM: / den + total o), plus s k dR (ahla, other = k) or
    s (v dC' (NORM: + dc - anchor dC')) (hla2, other = v)."""
    bh, at, b, lo, hi = work(GEO, BH, M, chunk)
    keep = keep_of(keep, bh, H, N)
    g = at_head(g, gs, bh, H, 1, ALIGN)
    other = at_head(other, others, bh, H, G, ALIGN)
    dq = at_head(dq, dqs, bh, H, 1, ALIGN)
    angles = angles_at(cos, sin, bh, H, HT, 0, F.D)
    dtype: tl.constexpr = g.dtype.element_ty
    DIGITS: tl.constexpr = digits(dtype, TURN is not None, False)
    s = scale_of(scales, scale, bh, H)
    w, unit = load_operator(operator + at * F.D * V.D, dtype, 1, F, V)
    if ORDER == "hla2":
        x, x_unit = load_operator(right + at * F.D * V.D, dtype, 1, F, V)
        if NORM:
            row = anchored_row(vector + at * F.D, anchor + bh * V.D, x, x_unit, 1, TURN is None, F, V)
    else:
        y, x_unit = load_operator(left + at * F.D * F.D, dtype, 1, F, F)
        y = trans4(y[0])
    if NORM:
        inverses += bh.to(tl.int64) * N
        totals += bh.to(tl.int64) * N
    for start in range(lo, hi, BN):
        tokens, live = tile(start, hi, b, keep, BN)
        if ORDER == "hla2":
            tv = load_rows(other, tokens, others[1] * ALIGN, live, V, False)
            more = by_operator(tv, x, 1, V, F, PREC)
        else:
            t = load_rows(other, tokens, others[1] * ALIGN, live, F, False)
            t = turn(t, angles, tokens, live, HT, False, TURN, F)
            more = add_rows(zero_rows(BN, F), t, y, dtype, DIGITS, F, F, PREC)
        tg = load_rows(g, tokens, gs[1] * ALIGN, live, V, False)
        gq = times(by_operator(tg, w, 1, V, F, PREC), unit, F)
        if NORM:
            gq = times(gq, tl.load(inverses + tokens, mask=live, other=0.0)[:, None], F)
        gq = axpy2(gq, s * x_unit, more, F)
        gq = turn(gq, angles, tokens, live, HT, True, TURN, F)
        if NORM:
            gq = add_vector(gq, tl.load(totals + tokens, mask=live, other=0.0), operator_vector + at * F.D, F)
            if ORDER == "hla2":
                gq = axpy2(gq, s, as_row(row), F)
        store_rows(dq, tokens, dqs[1] * ALIGN, live, gq, F)
