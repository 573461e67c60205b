"""Kernels with one program per (batch, head), all passes over the tokens in one launch.

Here `linear_attention`, and what all of them share. Tokens are read again from the caches.

For many heads of few tokens. q, k, v, o, ... are [B, N, H, .] tensors given by strides (batch, token, head) in units
of ALIGN. Query head h reads key head h // G; gradients of k and v are written per query head (the host sums groups).
"""

import triton
import triton.language as tl

from ..algebra import affine, anchor, cast_operator, cast_weights, ones_moments, scale_moments
from ..loops import read_out, span, sum_moments, write_grads
from ..tiles import scale4, store4, store_vec, trans4, zeros2

NO_SPECIALIZE = [
    "qs", "ks", "vs", "os", "gs", "fqs", "fks", "dqs", "dks", "dvs", "N", "H", "G", "chunk", "scale", "eps",
]  # fmt: skip


@triton.jit
def at_head(ptr, strides, at, h, ALIGN: tl.constexpr):
    """Head h of token `at` = (batch, token), by strides of `spec.strides`; 64-bit, a tensor may have more than 2**31
    elements."""
    row = at[0].to(tl.int64) * (strides[0] // 2) + at[1] * strides[1]
    return ptr + (row + h.to(tl.int64) * (strides[2] // 2)) * ALIGN


@triton.jit
def load_coefficients(ptr, h, ORDER: tl.constexpr):
    """Return (c1, c2, c3, c4) of head h; ones for the orders that have none."""
    c = (1.0, 1.0, 1.0, 1.0)
    if ORDER == "polynomial":
        p = ptr + h * 4
        c = (
            tl.load(p).to(tl.float32), tl.load(p + 1).to(tl.float32), tl.load(p + 2).to(tl.float32),
            tl.load(p + 3).to(tl.float32),
        )  # fmt: skip
    return c


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def hla_head_forward(
    q, k, v, o, state, matrix, qs, ks, vs, os, N, H, G, scale, eps, NORM: tl.constexpr, ALIGN: tl.constexpr,
    F: tl.constexpr, V: tl.constexpr, L: tl.constexpr, SAVE: tl.constexpr, BN: tl.constexpr, BO: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    """o = q M of one head, M = s P; NORM: a ratio. SAVE: M and the vectors that `loops.first` reads."""
    pid = tl.program_id(0)
    h = pid % H
    at, N, scale = span(N, pid // H, pid, scale)
    q, qn = at_head(q, qs, at, h, ALIGN), qs[1] * ALIGN
    k, kn = at_head(k, ks, at, h // G, ALIGN), ks[1] * ALIGN
    v, vn = at_head(v, vs, at, h // G, ALIGN), vs[1] * ALIGN
    m1 = zeros2(F)
    row = zeros2(V)
    raw, sums, _ = sum_moments(
        q, k, v, q, qn, kn, vn, qn, 0, N, "linear_attention", "keys" if NORM else None, False, True, F, V, BN, PREC
    )
    m = scale_moments(raw, sums, scale, N[1], 0.0, "linear_attention", None, NORM, False, F, V)
    out = m[0]
    if NORM:
        m1, q1 = ones_moments(sums, scale, None, F)
        a = anchor(m, m1, q1, sums, "linear_attention", F, V)
        out, row = affine(out, m1, sums, a, N[1], F, V)
    out, unit = cast_operator(out, q.dtype.element_ty, NORM, F, V)
    if SAVE:
        store4(matrix + pid.to(tl.int64) * F.D * V.D, out, F, V, V.D, 1)
        to = state + pid.to(tl.int64) * L.K
        store_vec(to + L.M1, m1, F)
        store_vec(to + L.ROW, row, V)
    read_out(
        q, at_head(o, os, at, h, ALIGN), qn, os[1] * ALIGN, 0, N, out, m1, row, eps, NORM, False, F, V, BO, PREC, unit
    )


@triton.jit
def ratio_of(ratio, head, most, NORM: tl.constexpr):
    """1 / den and d loss / d den of a head's tokens [*, 2] of a buffer [B * H, most, 2]; a number without NORM."""
    out = most
    if NORM:
        out = ratio + head * 2 * most
    return out


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def hla_head_backward(
    q, k, v, g, dq, dk, dv, qs, ks, vs, gs, dqs, dks, dvs, N, H, G, scale, ALIGN: tl.constexpr, F: tl.constexpr,
    V: tl.constexpr, BN: tl.constexpr, BO: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """dq = s g P', dk = s v dM', dv = s k dM of one head without a ratio; P is summed again, together with dM."""
    pid = tl.program_id(0)
    h = pid % H
    at, N, scale = span(N, pid // H, pid, scale)
    q, qn = at_head(q, qs, at, h, ALIGN), qs[1] * ALIGN
    k, kn = at_head(k, ks, at, h // G, ALIGN), ks[1] * ALIGN
    v, vn = at_head(v, vs, at, h // G, ALIGN), vs[1] * ALIGN
    g, gn = at_head(g, gs, at, h, ALIGN), gs[1] * ALIGN
    m, _, dm = sum_moments(q, k, v, g, qn, kn, vn, gn, 0, N, "linear_attention", None, True, False, F, V, BN, PREC)
    mt, mt_unit = cast_operator(trans4(scale4(m[0], scale)), q.dtype.element_ty, False, V, F)
    dm = scale4(dm, scale)
    w, unit = cast_weights((dm, dm, dm, dm, dm), "linear_attention", q.dtype.element_ty, F, V)
    m1 = zeros2(F)
    write_grads(
        q, k, v, g, at_head(dq, dqs, at, h, ALIGN), at_head(dk, dks, at, h, ALIGN), at_head(dv, dvs, at, h, ALIGN), qn,
        kn, vn, gn, dqs[1] * ALIGN, dks[1] * ALIGN, dvs[1] * ALIGN, 0, N, mt, m1, 0, w, unit,
        (m1, m1, zeros2(V)), "qkv", "linear_attention", False, False, F, V, BO, PREC, mt_unit=mt_unit,
    )  # fmt: skip
