"""`polynomial` of the tokens as they are, 64 channels, without a backward: one program a head.

Digits of float32 are what d coefficients need; the output is rounded to bf16 and does without. Left factors of the
D x D products are read from memory as they are: assemblers overwrite one that was computed in registers while a product
still reads it.
"""

import triton
import triton.language as tl

from ..loops import read_out, span, sum_moments
from ..tiles import zeros2
from . import NO_SPECIALIZE, at_head, load_coefficients
from .halves import half


@triton.jit
def put(to, x, D: tl.constexpr):
    """Write a matrix [D, D]."""
    i = tl.arange(0, D)
    tl.store(to + i[:, None] * D + i[None, :], x.to(to.dtype.element_ty))


@triton.jit
def get(at, D: tl.constexpr):
    """Inverse of `put`."""
    i = tl.arange(0, D)
    return tl.load(at + i[:, None] * D + i[None, :])


@triton.jit
def half1(x):
    """`half` of one block."""
    y, unit = half((x, x, x, x), 0, 0)
    return y[0], unit


@triton.jit
def mixed_operator(m, c, s, to, D: tl.constexpr):
    """M of `algebra.operator` from float16 factors; room for two [2, D, D]."""
    hs, us = half1(m[1][0] * s)
    put(to, hs, D)
    tl.debug_barrier()  # every thread reads what others wrote
    hs = get(to, D)
    hw, uw = half1(m[4][0] * s)
    t = tl.dot(hs, hw)
    ht, ut = half1(t * (us * uw * c[3]) + m[3][0] * s * c[2])
    put(to + D * D, ht, D)
    hc, uc = half1(m[2][0] * s)
    out = tl.dot(hs, hc) * (us * uc * c[1]) + m[0][0] * s * c[0]
    hp, up = half1(m[0][0] * s)
    tl.debug_barrier()
    return out + tl.dot(get(to + D * D, D), hp) * (ut * up)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def mixture_forward(
    q, k, v, o, factors, coefficients, qs, ks, vs, os, N, H, G, scale, ALIGN: tl.constexpr, D: tl.constexpr,
    BN: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """o = q M of one head; factors [B * H, 2, D, D] is room."""
    pid = tl.program_id(0)
    b = pid // H
    h = pid % H
    at, N, scale = span(N, b, pid, scale)
    q = at_head(q, qs, at, h, ALIGN)
    k = at_head(k, ks, at, h // G, ALIGN)
    v = at_head(v, vs, at, h // G, ALIGN)
    o = at_head(o, os, at, h, ALIGN)
    qn, kn, vn = qs[1] * ALIGN, ks[1] * ALIGN, vs[1] * ALIGN
    m, _, _, _ = sum_moments(q, k, v, q, qn, kn, vn, qn, 0, N, 5, False, False, True, D, D, 0, D, D, 0, BN, "tf32x3")
    factors += pid.to(tl.int64) * 2 * D * D
    m = mixed_operator(m, load_coefficients(coefficients, h, 5), scale, factors, D).to(q.dtype.element_ty)
    x = zeros2(D, 0)
    read_out(
        q, o, qn, os[1] * ALIGN, 0, N, (m, m, m, m), x, x, x, 0.0, False, False, 0, D, D, 0, D, 0, D, D, 0, BO,
        "tf32x3",
    )  # fmt: skip
