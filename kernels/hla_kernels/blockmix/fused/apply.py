"""Kernels that multiply tokens by the matrix of their block: the output, and dk with dv."""

import triton
import triton.language as tl

from ...hla.fused.loops.vectors import as_row, columns, times_vector
from ...hla.fused.tiles import axpy2, load_rows, load_vec, store_rows, trans4, vecmat, zero_rows
from .features import add_rows, angles_at, digits, turn
from .geometry import at_head, box, keep_of, place, scale_of, tile
from .tokens import (
    NO_SPECIALIZE,
    add_vector,
    by_operator,
    load_anchor,
    load_operator,
    times,
    total_grad,
)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def read_out(
    q, o, inverses, keep, anchor, shift, cos, sin, mixed, mixed_vector, qs, os, GEO, N, H, BH, M, HT, chunk, eps,
    NORM: tl.constexpr, TURN: tl.constexpr, EXACT: tl.constexpr, ALIGN: tl.constexpr, D: tl.constexpr, F1: tl.constexpr,
    F2: tl.constexpr, DV: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, BN: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Compute o = phi(q) P~ of the query's block, with rotated phi.

    NORM: divided by den = phi(q).z~ + eps, with unrotated phi, plus a (1 - eps / den) for the anchor a; 1 / den
    [B * H, N] is stored for the backward, in float16 as 0 for queries without features.
    """
    bh, block, part = place(BH, M)
    b = box(GEO, block)
    q = at_head(q, qs, bh, H, 1, ALIGN)
    o = at_head(o, os, bh, H, 1, ALIGN)
    keep = keep_of(keep, bh, H, N)
    cos = angles_at(cos, bh, H, HT, 0, D)
    sin = angles_at(sin, bh, H, HT, 0, D)
    at = (block * BH + bh).to(tl.int64)
    dtype: tl.constexpr = q.dtype.element_ty
    w, unit = load_operator(mixed + at * D * DV, dtype, 1, D, F1, F2, DV, V1, V2)
    wt = trans4(w[0])
    if NORM:
        z = columns(load_vec(mixed_vector + at * D, D, F1, F2), dtype, F2, EXACT)
        inverses += bh.to(tl.int64) * N
    hi = tl.minimum((part + 1) * chunk, b[0])
    for start in range(part * chunk, hi, BN):
        tokens, live = tile(start, hi, b, keep, BN)
        f = load_rows(q, tokens, qs[1] * ALIGN, live, D, F1, F2, False)
        t = turn(f, cos, sin, tokens, live, HT, False, TURN, D, F1, F2)
        y = add_rows(zero_rows(BN, V1, V2), t, wt, dtype, digits(dtype, TURN > 0, False), F2, V2, PREC)
        factor = unit
        if NORM:
            den = times_vector(f, z, F2)
            inverse = 1.0 / tl.where(live, den + eps, 1.0)
            kept = inverse
            if dtype == tl.float16:  # 1 / eps would leave its range, and no map passes gradients of features that are 0
                kept = tl.where(den == 0.0, 0.0, inverse)
            tl.store(inverses + tokens, kept, mask=live)
            factor = (inverse * unit)[:, None]
        y = times(y, factor, V2)
        if NORM and TURN == 0:
            y = axpy2(y, (1.0 - eps * inverse)[:, None], as_row(load_anchor(anchor, shift, bh, at, DV, V1, V2)), V2)
        store_rows(o, tokens, os[1] * ALIGN, live, y, DV, V1, V2)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def query_rows(
    q, g, dq, inverses, totals, keep, anchor, shift, cos, sin, mixed, mixed_vector, qs, gs, dqs, GEO, N, H, BH, M, HT,
    chunk, eps, NORM: tl.constexpr, TURN: tl.constexpr, EXACT: tl.constexpr, ALIGN: tl.constexpr, D: tl.constexpr,
    F1: tl.constexpr, F2: tl.constexpr, DV: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, FINE: tl.constexpr,
    BN: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Compute d loss / d den [B * H, N] of the ratio, for the sums over queries, and dq unless it is None. FINE: from
    operators in two digits."""
    bh, block, part = place(BH, M)
    b = box(GEO, block)
    q = at_head(q, qs, bh, H, 1, ALIGN)
    g = at_head(g, gs, bh, H, 1, ALIGN)
    keep = keep_of(keep, bh, H, N)
    cos = angles_at(cos, bh, H, HT, 0, D)
    sin = angles_at(sin, bh, H, HT, 0, D)
    dtype: tl.constexpr = q.dtype.element_ty
    ANCHOR: tl.constexpr = TURN == 0
    DIGITS: tl.constexpr = digits(dtype, FINE or EXACT, EXACT)
    at = (block * BH + bh).to(tl.int64)
    w, unit = load_operator(mixed + at * D * DV, dtype, DIGITS, D, F1, F2, DV, V1, V2)
    a = anchor
    if ANCHOR:
        a = columns(load_anchor(anchor, shift, bh, at, DV, V1, V2), dtype, V2, EXACT)
    inverses += bh.to(tl.int64) * N
    totals += bh.to(tl.int64) * N
    hi = tl.minimum((part + 1) * chunk, b[0])
    for start in range(part * chunk, hi, BN):
        tokens, live = tile(start, hi, b, keep, BN)
        tg = load_rows(g, tokens, gs[1] * ALIGN, live, DV, V1, V2, False)
        f = load_rows(q, tokens, qs[1] * ALIGN, live, D, F1, F2, False)
        t = turn(f, cos, sin, tokens, live, HT, False, TURN, D, F1, F2)
        gt = times(by_operator(tg, w, DIGITS, V2, F1, F2, PREC), unit, F2)
        inverse = tl.load(inverses + tokens, mask=live, other=0.0)
        total = total_grad(t, tg, gt, inverse, a, eps, ANCHOR, F2, V2)
        tl.store(totals + tokens, total, mask=live)
        if dq is not None:
            gq = turn(times(gt, inverse[:, None], F2), cos, sin, tokens, live, HT, True, TURN, D, F1, F2)
            gq = add_vector(gq, total, mixed_vector + at * D, D, F1, F2)
            to = at_head(dq, dqs, bh, H, 1, ALIGN)
            store_rows(to, tokens, dqs[1] * ALIGN, live, gq, D, F1, F2)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def key_grads(
    k, v, dk, dv, keep, scales, anchor, cos, sin, matrix, vector, ks, vs, dks, dvs, GEO, N, H, BH, M, G, HT, chunk,
    scale, NORM: tl.constexpr, TURN: tl.constexpr, EXACT: tl.constexpr, ALIGN: tl.constexpr, D: tl.constexpr,
    F1: tl.constexpr, F2: tl.constexpr, DV: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, FINE: tl.constexpr,
    BN: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Compute dv = s phi(k) dP and dk = s (v dP' (NORM: + dz - anchor dP')) for the key's block, with rotated phi and
    dP. FINE: dk from dP in two digits."""
    bh, block, part = place(BH, M)
    b = box(GEO, block)
    k = at_head(k, ks, bh, H, G, ALIGN)
    v = at_head(v, vs, bh, H, G, ALIGN)
    dk = at_head(dk, dks, bh, H, 1, ALIGN)
    dv = at_head(dv, dvs, bh, H, 1, ALIGN)
    keep = keep_of(keep, bh, H, N)
    cos = angles_at(cos, bh, H, HT, 0, D)
    sin = angles_at(sin, bh, H, HT, 0, D)
    at = (block * BH + bh).to(tl.int64)
    dtype: tl.constexpr = k.dtype.element_ty
    DIGITS: tl.constexpr = digits(dtype, TURN > 0, False)
    OF_P: tl.constexpr = digits(dtype, FINE, False)
    w, unit = load_operator(matrix + at * D * DV, dtype, OF_P, D, F1, F2, DV, V1, V2)
    s = scale_of(scales, scale, bh, H)
    if NORM:
        row = load_vec(vector + at * D, D, F1, F2)
        if TURN == 0:
            a = load_vec(anchor + bh * DV, DV, V1, V2)
            back = vecmat(a, w[0], V2, F2)
            if OF_P > 1:
                back = axpy2(back, 1.0, vecmat(a, w[1], V2, F2), F2)
            row = axpy2(row, -unit, back, F2)
    hi = tl.minimum((part + 1) * chunk, b[0])
    for start in range(part * chunk, hi, BN):
        tokens, live = tile(start, hi, b, keep, BN)
        tv = load_rows(v, tokens, vs[1] * ALIGN, live, DV, V1, V2, False)
        f = load_rows(k, tokens, ks[1] * ALIGN, live, D, F1, F2, False)
        t = turn(f, cos, sin, tokens, live, HT, False, TURN, D, F1, F2)
        gv = add_rows(zero_rows(BN, V1, V2), t, trans4(w[0]), dtype, DIGITS, F2, V2, PREC)
        gv = times(gv, s * unit, V2)
        store_rows(dv, tokens, dvs[1] * ALIGN, live, gv, DV, V1, V2)
        gk = times(by_operator(tv, w, OF_P, V2, F1, F2, PREC), s * unit, F2)
        gk = turn(gk, cos, sin, tokens, live, HT, True, TURN, D, F1, F2)
        if NORM:
            gk = axpy2(gk, s, as_row(row), F2)
        store_rows(dk, tokens, dks[1] * ALIGN, live, gk, D, F1, F2)
