"""Kernels `hla_apply` (o = q M of one part of a head) and `hla_reduce_readout` (the gradient of M)."""

import triton
import triton.language as tl

from ..algebra import cast_operator
from ..heads import at_head, ratio_of
from ..loops import end_pairs, longest, place, read_out, span, sum_divided, sum_gradient, sum_ratio, upto
from ..tiles import axpy2, cast4, load4, load_vec, store4, store_vec, vecmat, zeros2

NO_SPECIALIZE = ["qs", "os", "gs", "N", "H", "PARTS", "chunk", "heads", "eps"]


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def hla_apply(
    q, o, state, matrix, qs, os, N, H, PARTS, chunk, eps, NORM: tl.constexpr, CENTER: tl.constexpr, MEAN: tl.constexpr,
    ALIGN: tl.constexpr, F: tl.constexpr, V: tl.constexpr, L: tl.constexpr, BN: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Compute o = q M for one part of one head; matrix [B * H, F, V] has the dtype of the tokens, or float32."""
    b, h, part = place(H, PARTS)
    at, N, _ = span(N, b, b * H + h, 0.0)
    head = (b * H + h).to(tl.int64)
    state += head * L.K
    lo = part * chunk
    m = load4(matrix + head * F.D * V.D, F, V, V.D, 1)
    read, unit = cast_operator(m, q.dtype.element_ty, NORM, F, V)
    m1 = zeros2(F)
    row = zeros2(V)
    n = N[1]
    if NORM:
        m1 = load_vec(state + L.M1, F)
        row = load_vec(state + L.ROW, V)
    if MEAN:
        row = axpy2(row, 1.0 / n, load_vec(state + L.SUM_V, V), V)
    if CENTER == "qk":
        mean = axpy2(m1, -1.0 / n, load_vec(state + L.SUM_Q, F), F)
        row = axpy2(row, unit, vecmat(mean, read, F, V), V)
    read_out(
        at_head(q, qs, at, h, ALIGN), at_head(o, os, at, h, ALIGN), qs[1] * ALIGN, os[1] * ALIGN, lo,
        upto(lo + chunk, N), read, m1, row, eps, NORM, MEAN or CENTER == "qk", F, V, BN, PREC, unit,
    )  # fmt: skip


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def hla_reduce_readout(
    q, g, state, matrix, ratio, out, qs, gs, N, H, PARTS, chunk, heads, eps, ORDER: tl.constexpr, NORM: tl.constexpr,
    SUMS: tl.constexpr, ALIGN: tl.constexpr, F: tl.constexpr, V: tl.constexpr, L: tl.constexpr, BN: tl.constexpr,
    PREC: tl.constexpr, TURNED: tl.constexpr, DIVIDED: tl.constexpr,
):  # fmt: skip
    """Compute partial dM' [V, F] (TURNED: dM [F, V]) and sum g [V] of one part of one head in out [PARTS, B * H, KG].
    Normalised: the gradient of m1 [F] for centred v instead of sum g, and ratio [B * H, N, 2] (DIVIDED: it is an
    input)."""
    b, h, part = place(H, PARTS)
    most = longest(N)
    at, N, _ = span(N, b, b * H + h, 0.0)
    head = (b * H + h).to(tl.int64)
    lo = part * chunk
    vbar = zeros2(V)
    if NORM:
        m1 = load_vec(state + head * L.K + L.M1, F)
    q = at_head(q, qs, at, h, ALIGN)
    g = at_head(g, gs, at, h, ALIGN)
    qn, gn = qs[1] * ALIGN, gs[1] * ALIGN
    hi = upto(lo + chunk, N)
    ratio = ratio_of(ratio, head, most, NORM)
    if not NORM:
        dm, sg = sum_gradient(q, g, qn, gn, lo, hi, SUMS, F, V, BN, PREC)
    elif DIVIDED:
        dm, dm1 = sum_divided(q, g, qn, gn, lo, hi, m1, ratio, F, V, BN, PREC)
    else:
        vbar = load_vec(state + head * L.K + L.ROW, V)
        m = cast4(load4(matrix + head * F.D * V.D, F, V, V.D, 1), q.dtype.element_ty)
        dm, dm1 = sum_ratio(q, g, q, qn, gn, qn, lo, hi, m, m1, vbar, eps, ratio, ORDER, False, F, V, BN, PREC)
        dm1 = end_pairs(dm1, F)
    out += (part.to(tl.int64) * heads + head) * L.KG
    store4(out, dm, V, F, 1 if TURNED else F.D, V.D if TURNED else 1)
    if NORM:  # adds the gradient of m1 through the anchor a = vbar - mean v of M, since dM' is available here
        vbar = load_vec(state + head * L.K + L.ROW, V)
        a = axpy2(vbar, -1.0 / N[1], load_vec(state + head * L.K + L.SUM_V, V), V)
        store_vec(out + V.D * F.D, axpy2(dm1, -1.0, vecmat(a, dm, V, F), F), F)
    if SUMS and not NORM:
        store_vec(out + V.D * F.D + F.D, sg, V)
