"""`polynomial` by one program per head, or one for each of three or four products.

Factors are float16. The forward keeps P, S, C, R, W and T = c1 I + c3 R + c4 S W in float16, and M, so that the
backward sums dM alone and is six products, each with a matrix that is read from memory on its left (the assembler that
Triton 3.6 has is known to corrupt others). Without a ratio 64 channels are one launch a direction before the tokens,
which `split.apply_grads` writes; 72 channels and a ratio have their moments and their operator apart, and a ratio dM
of `split.reduce_readout`.

    matrices  products of a head's matrices       weights  the weights of the token gradients, d coefficients
    kept      what is kept of a head              ratios   the operator of a ratio
"""

import triton
import triton.language as tl

from ...algebra import scale_moments
from ...loops import read_out, sum_moments
from ...tiles import add4, axpy2, cast4, scale4, zeros2
from .. import NO_SPECIALIZE, load_coefficients, of_head, own_head, stagger
from ..halves import half
from .kept import head_moments, load_units, put_moments, put_sums, store_units
from .matrices import C, P, R, S, T, W, load, product, put_left, put_weight

PREC = tl.constexpr("tf32x3")  # of bfloat16 tokens: the sums of tensor cores as they are


@triton.jit
def part_moments(
    q, k, v, qn, kn, vn, kept, units, vectors, N, scale, ORDER: tl.constexpr, CENTER: tl.constexpr, MEAN: tl.constexpr,
    L: tl.constexpr, F: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Sum and keep the moments of an order of `begin_moments`."""
    SUMS: tl.constexpr = 2 if CENTER > 0 or MEAN else 0
    m, sums, _ = sum_moments(q, k, v, q, qn, kn, vn, qn, 0, N, ORDER, SUMS, False, False, F, F, BN, PREC)
    put_moments(kept, units, m, vectors, sums, N[1], scale, ORDER, CENTER, MEAN, L, F)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def mixture_moments(
    q, k, v, kept, units, vectors, qs, ks, vs, N, H, scale, CENTER: tl.constexpr, MEAN: tl.constexpr, L: tl.constexpr,
    ALIGN: tl.constexpr, F: tl.constexpr, KF: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Compute the moments of one head by three programs, each of which reads two of q, k, v: P and S, C and W, R."""
    pid = tl.program_id(0) // 3
    role = tl.program_id(0) % 3
    head, h, at, N, scale = own_head(pid, N, H, scale)
    q, k, v, qn, kn, vn = of_head((q, k, v), (qs, ks, vs), at, h, ALIGN)
    kept += head * KF
    units += head * 8
    vectors += head * L.K
    for part in tl.static_range(3):
        if role == part:
            part_moments(
                q, k, v, qn, kn, vn, kept, units, vectors, N, scale, 11 if part == 0 else 12 if part == 1 else 10,
                CENTER, MEAN, L, F, BN,
            )  # fmt: skip


@triton.jit(do_not_specialize=["H"])
def mixture_operator(kept, units, matrix, coefficients, H, F: tl.constexpr, KF: tl.constexpr):
    """Compute T and M = T P + c2 S C of every head from its moments."""
    head = tl.program_id(0).to(tl.int64)
    units += head * 8
    kept += head * KF
    c = load_coefficients(coefficients, tl.program_id(0) % H, 5)
    up, us, uc, ur, uw, _ = load_units(units)
    hs = load(kept, S, F)
    t = scale4(product(hs, load(kept, W, F), F), us * uw)
    ut = put_left(kept + T * (F.D1 + F.D2) * (F.D1 + F.D2), t, scale4(cast4(load(kept, R, F), tl.float32), ur), c, F)
    x = scale4(product(hs, load(kept, C, F), F), us * uc * c[1])
    tl.debug_barrier()  # every thread reads what others wrote
    m = add4(scale4(product(load(kept, T, F), load(kept, P, F), F), ut * up), x, F, F)
    put_weight(matrix + head * F.D * F.D, m, matrix.dtype.element_ty, F)
    tl.store(units + T, ut)


@triton.jit
def one_block(x):
    """Return a matrix of one block as `tiles` has it."""
    return x, x, x, x


@triton.jit
def put1(to, x, D: tl.constexpr):
    """Write a matrix of one block [D, D]."""
    i = tl.arange(0, D)
    tl.store(to + i[:, None] * D + i[None, :], x.to(to.dtype.element_ty))


@triton.jit
def get1(at, D: tl.constexpr):
    """Inverse of `put1`."""
    i = tl.arange(0, D)
    return tl.load(at + i[:, None] * D + i[None, :])


@triton.jit
def half1(x, F: tl.constexpr):
    """`half` of one block."""
    y, unit = half(one_block(x), F, F)
    return y[0], unit


@triton.jit
def light_operator(m, c, s, kept, units, SAVE: tl.constexpr, F: tl.constexpr):
    """M of `algebra.operator` of moments times s, of one block; S and T go to `kept`, SAVE: P, C, R, W and the units
    too."""
    AREA: tl.constexpr = F.D * F.D
    hs, us = half1(m[1][0] * s, F)
    put1(kept + S * AREA, hs, F.D)
    tl.debug_barrier()  # every thread reads what others wrote
    hs = get1(kept + S * AREA, F.D)
    hw, uw = half1(m[4][0] * s, F)
    ur = 1.0
    if SAVE:
        put1(kept + W * AREA, hw, F.D)
        hr, ur = half1(m[3][0] * s, F)
        put1(kept + R * AREA, hr, F.D)
    t = tl.dot(hs, hw) * (us * uw * c[3]) + m[3][0] * (s * c[2])
    if SAVE:
        i = tl.arange(0, F.D)
        t += tl.where(i[:, None] == i[None, :], c[0], 0.0)
    ht, ut = half1(t, F)
    put1(kept + T * AREA, ht, F.D)
    hc, uc = half1(m[2][0] * s, F)
    out = tl.dot(hs, hc) * (us * uc * c[1])
    if not SAVE:  # fewer registers than I in T
        out += m[0][0] * s * c[0]
    hp, up = half1(m[0][0] * s, F)
    if SAVE:
        put1(kept + C * AREA, hc, F.D)
        put1(kept + P * AREA, hp, F.D)
        store_units(units, (up, us, uc, ur, uw, ut))
    tl.debug_barrier()
    return out + tl.dot(get1(kept + T * AREA, F.D), hp) * (ut * up)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def mixture_forward(
    q, k, v, o, kept, units, vectors, matrix, coefficients, qs, ks, vs, os, N, H, scale, CENTER: tl.constexpr,
    MEAN: tl.constexpr, L: tl.constexpr, ALIGN: tl.constexpr, F: tl.constexpr, KF: tl.constexpr, SAVE: tl.constexpr,
    BN: tl.constexpr, BO: tl.constexpr, DELAY: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Compute o = q M of one head of one block. SAVE: what the backward needs is kept; otherwise room for S and T."""
    pid = tl.program_id(0)
    stagger(pid, DELAY, SLOTS)
    head, h, at, N, scale = own_head(pid, N, H, scale)
    q, k, v, o, qn, kn, vn, on = of_head((q, k, v, o), (qs, ks, vs, os), at, h, ALIGN)
    SUMS: tl.constexpr = CENTER > 0 or MEAN
    m, sums = head_moments(q, k, v, qn, kn, vn, N, CENTER, MEAN, F, BN, PREC)
    zero = zeros2(F)
    row = zero
    if MEAN:
        row = axpy2(zero, 1.0 / N[1], sums[2], F)
    if SUMS:
        m = scale_moments(m, sums, 1.0, N[1], 0.0, 5, CENTER, MEAN, False, F, F)
    if SUMS and SAVE:
        put_sums(vectors + head * L.K, sums, 5, L, F)
    c = load_coefficients(coefficients, h, 5)
    m = one_block(light_operator(m, c, scale, kept + head * KF, units + head * 8, SAVE, F).to(q.dtype.element_ty))
    if SAVE:
        put_weight(matrix + head * F.D * F.D, m, q.dtype.element_ty, F)
    read_out(q, o, qn, on, 0, N, m, zero, row, 0.0, False, MEAN, F, F, BO, PREC)
