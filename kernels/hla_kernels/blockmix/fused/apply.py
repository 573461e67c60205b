"""The passes that write what each token reads from the matrix of its block: the output, and dk with dv."""

import triton
import triton.language as tl

from ...hla.fused.loops.writes import as_row
from ...hla.fused.maps import phi, phi_grad
from ...hla.fused.tiles import axpy2, load_rows, load_vec, rowmul, store_rows, trans4, vecmat, zero_rows
from .geometry import at_head, box, keep_of, place, scale_of, tile
from .tokens import NO_SPECIALIZE, load_operator, ratio_grad, times
from .vectors import columns, times_vector


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def read_out(
    q, o, inverses, keep, anchor, mixed, mixed_vector, qs, os, GEO, N, H, BH, M, chunk, eps, NORM: tl.constexpr,
    FMAP: tl.constexpr, ALIGN: tl.constexpr, D: tl.constexpr, F1: tl.constexpr, F2: tl.constexpr, DV: tl.constexpr,
    V1: tl.constexpr, V2: tl.constexpr, BN: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """o = phi(q) P~ of the query's block; NORM: over den = phi(q).z~ + eps, with the anchor put back: + a (1 - eps /
    den); 1 / den [B * H, N] is kept for the backward."""
    bh, block, part = place(BH, M)
    b = box(GEO, block)
    q = at_head(q, qs, bh, H, ALIGN)
    o = at_head(o, os, bh, H, ALIGN)
    keep = keep_of(keep, bh, H, N)
    at = (block * BH + bh).to(tl.int64)
    dtype: tl.constexpr = q.dtype.element_ty
    w, unit = load_operator(mixed + at * D * DV, dtype, D, F1, F2, DV, V1, V2)
    w = trans4(w)
    if NORM:
        z = columns(load_vec(mixed_vector + at * D, D, F1, F2), dtype, F2)
        a = anchor + bh * DV
        inverses += bh.to(tl.int64) * N
    hi = tl.minimum((part + 1) * chunk, b[0])
    for start in range(part * chunk, hi, BN):
        tokens, live = tile(start, hi, b, keep, BN)
        fq = phi(load_rows(q, tokens, qs[1] * ALIGN, live, D, F1, F2, False), live, FMAP, D, F1, F2)
        y = rowmul(zero_rows(BN, V1, V2), fq, w, F2, V2, PREC)
        factor = unit
        if NORM:
            inverse = 1.0 / tl.where(live, times_vector(fq, z, F2) + eps, 1.0)
            tl.store(inverses + tokens, inverse, mask=live)
            factor = (inverse * unit)[:, None]
        y = times(y, factor, V2)
        if NORM:
            y = axpy2(y, (1.0 - eps * inverse)[:, None], as_row(load_vec(a, DV, V1, V2)), V2)
        store_rows(o, tokens, os[1] * ALIGN, live, y, DV, V1, V2)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def query_rows(
    q, g, dq, inverses, totals, keep, anchor, mixed, mixed_vector, qs, gs, dqs, GEO, N, H, BH, M, chunk, eps,
    NORM: tl.constexpr, FMAP: tl.constexpr, ALIGN: tl.constexpr, D: tl.constexpr, F1: tl.constexpr, F2: tl.constexpr,
    DV: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, BN: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """dq of the ratio, and d loss / d den [B * H, N], which the sums over queries need."""
    bh, block, part = place(BH, M)
    b = box(GEO, block)
    q = at_head(q, qs, bh, H, ALIGN)
    g = at_head(g, gs, bh, H, ALIGN)
    dq = at_head(dq, dqs, bh, H, ALIGN)
    keep = keep_of(keep, bh, H, N)
    dtype: tl.constexpr = q.dtype.element_ty
    at = (block * BH + bh).to(tl.int64)
    w, unit = load_operator(mixed + at * D * DV, dtype, D, F1, F2, DV, V1, V2)
    z = mixed_vector + at * D
    a = columns(load_vec(anchor + bh * DV, DV, V1, V2), dtype, V2)
    inverses += bh.to(tl.int64) * N
    totals += bh.to(tl.int64) * N
    hi = tl.minimum((part + 1) * chunk, b[0])
    for start in range(part * chunk, hi, BN):
        tokens, live = tile(start, hi, b, keep, BN)
        tg = load_rows(g, tokens, gs[1] * ALIGN, live, DV, V1, V2, False)
        fq = phi(load_rows(q, tokens, qs[1] * ALIGN, live, D, F1, F2, False), live, FMAP, D, F1, F2)
        gq = times(rowmul(zero_rows(BN, F1, F2), tg, w, V2, F2, PREC), unit, F2)
        inverse = tl.load(inverses + tokens, mask=live, other=0.0)
        gq, total = ratio_grad(fq, tg, gq, inverse, z, a, eps, D, F1, F2, V2)
        tl.store(totals + tokens, total, mask=live)
        store_rows(dq, tokens, dqs[1] * ALIGN, live, phi_grad(fq, gq, FMAP, F2), D, F1, F2)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def key_grads(
    k, v, dk, dv, keep, scales, anchor, matrix, vector, ks, vs, dks, dvs, GEO, N, H, BH, M, chunk, scale,
    NORM: tl.constexpr, FMAP: tl.constexpr, ALIGN: tl.constexpr, D: tl.constexpr, F1: tl.constexpr, F2: tl.constexpr,
    DV: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, BN: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """dv = s phi(k) dP and dk = s (v dP' (NORM: + dz - anchor dP')) of the key's block."""
    bh, block, part = place(BH, M)
    b = box(GEO, block)
    k = at_head(k, ks, bh, H, ALIGN)
    v = at_head(v, vs, bh, H, ALIGN)
    dk = at_head(dk, dks, bh, H, ALIGN)
    dv = at_head(dv, dvs, bh, H, ALIGN)
    keep = keep_of(keep, bh, H, N)
    at = (block * BH + bh).to(tl.int64)
    w, unit = load_operator(matrix + at * D * DV, k.dtype.element_ty, D, F1, F2, DV, V1, V2)
    s = scale_of(scales, scale, bh, H)
    if NORM:
        back = vecmat(load_vec(anchor + bh * DV, DV, V1, V2), w, V2, F2)
        row = load_vec(vector + at * D, D, F1, F2)
        row = axpy2(row, -unit, back, F2)
    hi = tl.minimum((part + 1) * chunk, b[0])
    for start in range(part * chunk, hi, BN):
        tokens, live = tile(start, hi, b, keep, BN)
        tv = load_rows(v, tokens, vs[1] * ALIGN, live, DV, V1, V2, False)
        fk = phi(load_rows(k, tokens, ks[1] * ALIGN, live, D, F1, F2, False), live, FMAP, D, F1, F2)
        gv = rowmul(zero_rows(BN, V1, V2), fk, trans4(w), F2, V2, PREC)
        gv = times(gv, s * unit, V2)
        store_rows(dv, tokens, dvs[1] * ALIGN, live, gv, DV, V1, V2)
        gk = rowmul(zero_rows(BN, F1, F2), tv, w, V2, F2, PREC)
        gk = times(gk, s * unit, F2)
        if NORM:
            gk = axpy2(gk, s, as_row(row), F2)
        store_rows(dk, tokens, dks[1] * ALIGN, live, phi_grad(fk, gk, FMAP, F2), D, F1, F2)
