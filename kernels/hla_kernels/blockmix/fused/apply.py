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
    NORM: tl.constexpr, TURN: tl.constexpr, EXACT: tl.constexpr, ALIGN: tl.constexpr, F: tl.constexpr, V: tl.constexpr,
    BN: tl.constexpr, PREC: tl.constexpr,
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
    cos = angles_at(cos, bh, H, HT, 0, F.D)
    sin = angles_at(sin, bh, H, HT, 0, F.D)
    at = (block * BH + bh).to(tl.int64)
    dtype: tl.constexpr = q.dtype.element_ty
    w, unit = load_operator(mixed + at * F.D * V.D, dtype, 1, F, V)
    wt = trans4(w[0])
    if NORM:
        z = columns(load_vec(mixed_vector + at * F.D, F), dtype, F, EXACT)
        inverses += bh.to(tl.int64) * N
    hi = tl.minimum((part + 1) * chunk, b[0])
    for start in range(part * chunk, hi, BN):
        tokens, live = tile(start, hi, b, keep, BN)
        f = load_rows(q, tokens, qs[1] * ALIGN, live, F, False)
        t = turn(f, cos, sin, tokens, live, HT, False, TURN, F)
        y = add_rows(zero_rows(BN, V), t, wt, dtype, digits(dtype, TURN > 0, False), F, V, PREC)
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
        if NORM and TURN == 0:
            y = axpy2(y, (1.0 - eps * inverse)[:, None], as_row(load_anchor(anchor, shift, bh, at, V)), V)
        store_rows(o, tokens, os[1] * ALIGN, live, y, V)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def query_rows(
    q, g, dq, inverses, totals, keep, anchor, shift, cos, sin, mixed, mixed_vector, qs, gs, dqs, GEO, N, H, BH, M, HT,
    chunk, eps, NORM: tl.constexpr, TURN: tl.constexpr, EXACT: tl.constexpr, ALIGN: tl.constexpr, F: tl.constexpr,
    V: tl.constexpr, FINE: tl.constexpr, BN: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Compute d loss / d den [B * H, N] of the ratio, for the sums over queries, and dq unless it is None. FINE: from
    operators in two digits."""
    bh, block, part = place(BH, M)
    b = box(GEO, block)
    q = at_head(q, qs, bh, H, 1, ALIGN)
    g = at_head(g, gs, bh, H, 1, ALIGN)
    keep = keep_of(keep, bh, H, N)
    cos = angles_at(cos, bh, H, HT, 0, F.D)
    sin = angles_at(sin, bh, H, HT, 0, F.D)
    dtype: tl.constexpr = q.dtype.element_ty
    ANCHOR: tl.constexpr = TURN == 0
    DIGITS: tl.constexpr = digits(dtype, FINE or EXACT, EXACT)
    at = (block * BH + bh).to(tl.int64)
    w, unit = load_operator(mixed + at * F.D * V.D, dtype, DIGITS, F, V)
    a = anchor
    if ANCHOR:
        a = columns(load_anchor(anchor, shift, bh, at, V), dtype, V, EXACT)
    inverses += bh.to(tl.int64) * N
    totals += bh.to(tl.int64) * N
    hi = tl.minimum((part + 1) * chunk, b[0])
    for start in range(part * chunk, hi, BN):
        tokens, live = tile(start, hi, b, keep, BN)
        tg = load_rows(g, tokens, gs[1] * ALIGN, live, V, False)
        f = load_rows(q, tokens, qs[1] * ALIGN, live, F, False)
        t = turn(f, cos, sin, tokens, live, HT, False, TURN, F)
        gt = times(by_operator(tg, w, DIGITS, V, F, PREC), unit, F)
        inverse = tl.load(inverses + tokens, mask=live, other=0.0)
        total = total_grad(t, tg, gt, inverse, a, eps, ANCHOR, F, V)
        tl.store(totals + tokens, total, mask=live)
        if dq is not None:
            gq = turn(times(gt, inverse[:, None], F), cos, sin, tokens, live, HT, True, TURN, F)
            gq = add_vector(gq, total, mixed_vector + at * F.D, F)
            to = at_head(dq, dqs, bh, H, 1, ALIGN)
            store_rows(to, tokens, dqs[1] * ALIGN, live, gq, F)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def key_grads(
    k, v, dk, dv, keep, scales, anchor, cos, sin, matrix, vector, ks, vs, dks, dvs, GEO, N, H, BH, M, G, HT, chunk,
    scale, NORM: tl.constexpr, TURN: tl.constexpr, EXACT: tl.constexpr, ALIGN: tl.constexpr, F: tl.constexpr,
    V: tl.constexpr, FINE: tl.constexpr, BN: tl.constexpr, PREC: tl.constexpr,
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
    cos = angles_at(cos, bh, H, HT, 0, F.D)
    sin = angles_at(sin, bh, H, HT, 0, F.D)
    at = (block * BH + bh).to(tl.int64)
    dtype: tl.constexpr = k.dtype.element_ty
    DIGITS: tl.constexpr = digits(dtype, TURN > 0, False)
    OF_P: tl.constexpr = digits(dtype, FINE, False)
    w, unit = load_operator(matrix + at * F.D * V.D, dtype, OF_P, F, V)
    s = scale_of(scales, scale, bh, H)
    if NORM:
        row = load_vec(vector + at * F.D, F)
        if TURN == 0:
            a = load_vec(anchor + bh * V.D, V)
            back = vecmat(a, w[0], V, F)
            if OF_P > 1:
                back = axpy2(back, 1.0, vecmat(a, w[1], V, F), F)
            row = axpy2(row, -unit, back, F)
    hi = tl.minimum((part + 1) * chunk, b[0])
    for start in range(part * chunk, hi, BN):
        tokens, live = tile(start, hi, b, keep, BN)
        tv = load_rows(v, tokens, vs[1] * ALIGN, live, V, False)
        f = load_rows(k, tokens, ks[1] * ALIGN, live, F, False)
        t = turn(f, cos, sin, tokens, live, HT, False, TURN, F)
        gv = add_rows(zero_rows(BN, V), t, trans4(w[0]), dtype, DIGITS, F, V, PREC)
        gv = times(gv, s * unit, V)
        store_rows(dv, tokens, dvs[1] * ALIGN, live, gv, V)
        gk = times(by_operator(tv, w, OF_P, V, F, PREC), s * unit, F)
        gk = turn(gk, cos, sin, tokens, live, HT, True, TURN, F)
        if NORM:
            gk = axpy2(gk, s, as_row(row), F)
        store_rows(dk, tokens, dks[1] * ALIGN, live, gk, F)
