"""Gradients of the first-order ratio o = q M / q.m1, in two passes over tokens.

The pass over queries computes dq (`ratio.sum_ratio`) and sums dM and dm1. The pass over keys reads these sums:
dv = s k dM, dk = s (v dM' + dm1'). Every token is read once (queries of wide heads twice, see `wide`).
"""

import triton
import triton.language as tl

from ..algebra import cast_weights
from ..heads import at_head
from ..tiles import (
    axpy2,
    cast4,
    load4,
    load_rows,
    load_vec,
    rowmul,
    scale4,
    store4,
    store_vec,
    trans4,
    vecmat,
    zero_rows,
)
from .extent import alive, longest, place, span, upto
from .ratio import sum_ratio
from .stores import store_tokens
from .vectors import add_common, common_row, end_pairs, ones_tile
from .wide import divide_queries, sum_divided
from .writes import in_units

NO_SPECIALIZE = [
    "qs", "ks", "vs", "gs", "dqs", "dks", "dvs", "N", "H", "G", "PARTS", "chunk", "heads", "scale", "eps",
]  # fmt: skip


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def hla_query_grads(
    q, g, dq, state, matrix, ratio, out, qs, gs, dqs, N, H, PARTS, chunk, heads, eps, ALIGN: tl.constexpr,
    F: tl.constexpr, V: tl.constexpr, L: tl.constexpr, BN: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Compute dq, and partial dM' [V, F] and dm1 [F] in out [PARTS, B * H, V F + F], of one part of one head.

    Only the sums if `hla_divide_grads` has written dq and ratio [B * H, N, 2]."""
    b, h, part = place(H, PARTS)
    most = longest(N)
    at, N, _ = span(N, b, b * H + h, 0.0)
    head = (b * H + h).to(tl.int64)
    lo = part * chunk
    q = at_head(q, qs, at, h, ALIGN)
    g = at_head(g, gs, at, h, ALIGN)
    qn, gn = qs[1] * ALIGN, gs[1] * ALIGN
    state += head * L.K
    hi = upto(lo + chunk, N)
    m1 = load_vec(state + L.M1, F)
    if ratio is not None:
        dm, dm1 = sum_divided(q, g, qn, gn, lo, hi, m1, ratio + head * 2 * most, F, V, BN, PREC)
    else:
        m = cast4(load4(matrix + head * F.D * V.D, F, V, V.D, 1), q.dtype.element_ty)
        dm, dm1 = sum_ratio(
            q, g, at_head(dq, dqs, at, h, ALIGN), qn, gn, dqs[1] * ALIGN, lo, hi, m, m1,
            load_vec(state + L.ROW, V), eps, q, "linear_attention", True, F, V, BN, PREC,
        )  # fmt: skip
        dm1 = end_pairs(dm1, F)
    out += (part * heads + b * H + h).to(tl.int64) * (V.D * F.D + F.D)
    store4(out, dm, V, F, F.D, 1)
    store_vec(out + V.D * F.D, dm1, F)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def hla_divide_grads(
    q, g, dq, state, matrix, ratio, qs, gs, dqs, N, H, PARTS, chunk, eps, ALIGN: tl.constexpr, F: tl.constexpr,
    V: tl.constexpr, L: tl.constexpr, BN: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Compute ratio [B * H, N, 2] of one part of one head, and dq unless it is None."""
    b, h, part = place(H, PARTS)
    most = longest(N)
    at, N, _ = span(N, b, b * H + h, 0.0)
    head = (b * H + h).to(tl.int64)
    lo = part * chunk
    m = cast4(load4(matrix + head * F.D * V.D, F, V, V.D, 1), q.dtype.element_ty)
    to = q
    if dq is not None:
        to = at_head(dq, dqs, at, h, ALIGN)
    state += head * L.K
    divide_queries(
        at_head(q, qs, at, h, ALIGN), at_head(g, gs, at, h, ALIGN), to, qs[1] * ALIGN, gs[1] * ALIGN, dqs[1] * ALIGN,
        lo, upto(lo + chunk, N), m, state + L.M1, load_vec(state + L.ROW, V), eps,
        ratio + head * 2 * most, dq is not None, F, V, BN, PREC,
    )  # fmt: skip


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def hla_key_grads(
    k, v, dk, dv, state, grads, ks, vs, dks, dvs, N, H, G, PARTS, chunk, scale, ALIGN: tl.constexpr, F: tl.constexpr,
    V: tl.constexpr, L: tl.constexpr, BN: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv of one part of one head from the summed dM' and dm1 of `hla_query_grads`. The common part of v
    cancels exactly with the same rounded weights."""
    b, h, part = place(H, PARTS)
    at, N, scale = span(N, b, b * H + h, scale)
    head = (b * H + h).to(tl.int64)
    lo = part * chunk
    grads += head * (V.D * F.D + F.D)
    hi = upto(lo + chunk, N)
    k, kn = at_head(k, ks, at, h // G, ALIGN), ks[1] * ALIGN
    v, vn = at_head(v, vs, at, h // G, ALIGN), vs[1] * ALIGN
    dk, dkn = at_head(dk, dks, at, h, ALIGN), dks[1] * ALIGN
    dv, dvn = at_head(dv, dvs, at, h, ALIGN), dvs[1] * ALIGN
    row = load_vec(state + head * L.K + L.ROW, V)
    dm1 = load_vec(grads + V.D * F.D, F)
    dtype: tl.constexpr = k.dtype.element_ty
    w = scale4(load4(grads, V, F, F.D, 1), scale)
    w, unit = cast_weights((w, w, w, w, w), "linear_attention", dtype, F, V)
    w = w[0]
    scale = scale / unit
    common = (-row[0], -row[1])
    row_k = (dm1[0] * scale, dm1[1] * scale)
    row_k = axpy2(row_k, 1.0, vecmat(common, cast4(w, tl.float32), V, F), F)
    row_k = common_row(row_k, dtype, F)
    ones = ones_tile(k, BN)
    i = tl.arange(0, BN)
    zero = tl.full([], 0, tl.int64)
    tiles = tl.cdiv(hi[0] - lo, BN)
    for t in tl.range(tiles, disable_licm=F.D1 > 64):
        start = lo + (tiles - 1 - t) * BN
        live = alive(start + i, hi)
        tk = load_rows(k + (zero + start) * kn, i, kn, live, F, False)
        tv = load_rows(v + (zero + start) * vn, i, vn, live, V, False)
        gv = in_units(rowmul(zero_rows(BN, V), tk, trans4(w), F, V, PREC), unit, V)
        store_tokens(dv + (zero + start) * dvn, i, dvn, live, gv, V)
        gk = rowmul(add_common(zero_rows(BN, F), row_k, ones, F), tv, w, V, F, PREC)
        store_tokens(dk + (zero + start) * dkn, i, dkn, live, in_units(gk, unit, F), F)
