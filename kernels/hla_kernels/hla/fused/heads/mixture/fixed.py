"""`polynomial` without feature map and with fixed coefficients, one program per head (`halves`).

The forward keeps P, S, C, T = c1 I + c3 R + c4 S W and W in float16 and M, so that the backward sums dM alone and is
six products, each with a matrix that is read from memory on its left (the assembler that Triton 3.6 has is known to
corrupt others). 72 channels: `mixture.mixture_moments` and `mixture.mixture_operator` keep the same.
"""

import triton
import triton.language as tl

from ...algebra import scale_moments
from ...loops import read_out, sum_gradient
from ...tiles import add4, axpy2, cast4, load4, rank1, scale4, store4, trans4, zeros2
from .. import NO_SPECIALIZE, load_coefficients, of_head, own_head, stagger
from ..halves import get_matrix, half, put_matrix
from .digits import C, P, S, W, beside_ones, load, product, put_key_row, put_query_row, put_weight, symmetric
from .digits import R as T
from .kept import head_moments, load_units, put_rows, put_sums, store_units

PREC = tl.constexpr("tf32x3")  # of bfloat16 tokens: the sums of tensor cores as they are


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
def half1(x):
    """`half` of one block."""
    y, unit = half(one_block(x), 0, 0)
    return y[0], unit


@triton.jit
def light_operator(m, c, s, kept, units, SAVE: tl.constexpr, D: tl.constexpr):
    """M of `algebra.operator` of moments times s, of one block; S and T go to `kept`, SAVE: P, C, W and the units
    too."""
    AREA: tl.constexpr = D * D
    hs, us = half1(m[1][0] * s)
    put1(kept + S * AREA, hs, D)
    tl.debug_barrier()  # every thread reads what others wrote
    hs = get1(kept + S * AREA, D)
    hw, uw = half1(m[4][0] * s)
    if SAVE:
        put1(kept + W * AREA, hw, D)
    t = tl.dot(hs, hw) * (us * uw * c[3]) + m[3][0] * (s * c[2])
    if SAVE:
        i = tl.arange(0, D)
        t += tl.where(i[:, None] == i[None, :], c[0], 0.0)
    ht, ut = half1(t)
    put1(kept + T * AREA, ht, D)
    hc, uc = half1(m[2][0] * s)
    out = tl.dot(hs, hc) * (us * uc * c[1])
    if not SAVE:  # fewer registers than I in T
        out += m[0][0] * s * c[0]
    hp, up = half1(m[0][0] * s)
    if SAVE:
        put1(kept + C * AREA, hc, D)
        put1(kept + P * AREA, hp, D)
        store_units(units, (up, us, uc, ut, uw))
    tl.debug_barrier()
    return out + tl.dot(get1(kept + T * AREA, D), hp) * (ut * up)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def fixed_forward(
    q, k, v, o, kept, units, vectors, matrix, coefficients, qs, ks, vs, os, N, H, scale, CENTER: tl.constexpr,
    MEAN: tl.constexpr, OFF: tl.constexpr, K: tl.constexpr, ALIGN: tl.constexpr, D: tl.constexpr, F1: tl.constexpr,
    F2: tl.constexpr, KF: tl.constexpr, SAVE: tl.constexpr, BN: tl.constexpr, BO: tl.constexpr, DELAY: tl.constexpr,
    SLOTS: tl.constexpr,
):  # fmt: skip
    """Compute o = q M of one head of one block. SAVE: what the backward needs is kept; otherwise room for S and T."""
    pid = tl.program_id(0)
    stagger(pid, DELAY, SLOTS)
    head, h, at, N, scale = own_head(pid, N, H, scale)
    q, k, v, o, qn, kn, vn, on = of_head((q, k, v, o), (qs, ks, vs, os), at, h, ALIGN)
    SUMS: tl.constexpr = CENTER > 0 or MEAN
    m, sums = head_moments(q, k, v, qn, kn, vn, N, CENTER, MEAN, D, F1, F2, BN, PREC)
    zero = zeros2(F1, F2)
    row = zero
    if MEAN:
        row = axpy2(zero, 1.0 / N[1], sums[2], F2)
    if SUMS:
        m = scale_moments(m, sums, 1.0, N[1], 0.0, 5, CENTER, MEAN, False, F1, F2, F2)
    if SUMS and SAVE:
        put_sums(vectors + head * K, sums, 5, OFF, D, F1, F2)
    c = load_coefficients(coefficients, h, 5)
    m = one_block(light_operator(m, c, scale, kept + head * KF, units + head * 8, SAVE, D).to(q.dtype.element_ty))
    if SAVE:
        put_weight(matrix + head * D * D, m, q.dtype.element_ty, D, F1, F2)
    read_out(
        q, o, qn, on, 0, N, m, zero, row, row, 0.0, False, MEAN, 0, D, F1, F2, F1, F2, D, F1, F2, BO, PREC,
    )  # fmt: skip


@triton.jit
def through(room, a, D1: tl.constexpr, D2: tl.constexpr):
    """Return a matrix of several blocks by way of memory: some of it is a left factor."""
    if D2 > 0:
        put_matrix(room, a, D1, D2)
        tl.debug_barrier()  # every thread reads what others wrote
        a = get_matrix(room, D1, D2)
    return a


@triton.jit
def put_turned(to, a, dtype: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr):
    """Write a' [D, D]."""
    store4(to, cast4(a, dtype), D, D1, D2, D, D1, D2, 1, D)


@triton.jit
def key_gradient(
    kept, room, weights, dm, u, c, s, side, OFF: tl.constexpr, WOFF: tl.constexpr, D: tl.constexpr, D1: tl.constexpr,
    D2: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Write WR' for dM' [V, F]; returns dM' and Z' = P dM' in float16 and their units. Several blocks are in `room`
    then. side as in `digits.first_products`."""
    dm, um = half(dm, D2, D2)
    dm = through(room, dm, D1, D2)
    z = scale4(product(load(kept, P, D1, D2), dm, D2), um * u[0])
    if side is not None:
        p1, _, d1 = beside_ones(side, s, OFF, D, D1, D2)
        z = rank1(z, p1, d1, D2, D2)
    put_weight(weights + WOFF[3], scale4(z, s * c[2]), dtype, D, D1, D2)
    z, uz = half(z, D2, D2)
    return dm, um, through(room + (D1 + D2) * (D1 + D2), z, D1, D2), uz


@triton.jit
def weight(
    kept, weights, dm, um, z, uz, u, c, s, side, PART: tl.constexpr, OFF: tl.constexpr, WOFF: tl.constexpr,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Write WP' (PART 0), WC' (1), WW (2) or WS (3) of `algebra.weights`; of a ratio, with the first two, the rows
    too."""
    _, us, uc, ut, uw = u
    if PART == 0:
        x = scale4(product(trans4(load(kept, T, D1, D2)), trans4(dm), D2), s * um * ut)
        put_turned(weights + WOFF[0], x, dtype, D, D1, D2)
        if side is not None:
            put_key_row(side, weights + WOFF[0], load(kept, T, D1, D2), s * ut, OFF, D, D1, D2)
    elif PART == 1:
        x = scale4(product(load(kept, S, D1, D2), trans4(dm), D2), s * c[1] * us * um)
        put_turned(weights + WOFF[2], x, dtype, D, D1, D2)
        if side is not None:
            put_query_row(side, weights + WOFF[2], load(kept, S, D1, D2), s * us * c[1], OFF, D, D1, D2)
    elif PART == 2:
        x = scale4(product(load(kept, S, D1, D2), trans4(z), D2), s * c[3] * us * uz)
        put_weight(weights + WOFF[4], symmetric(x, D2), dtype, D, D1, D2)
    else:
        x = scale4(product(load(kept, W, D1, D2), z, D2), s * c[3] * uw * uz)
        if side is not None:
            _, q1, d1 = beside_ones(side, s, OFF, D, D1, D2)
            x = rank1(x, axpy2(zeros2(D1, D2), s * c[1], q1, D2), d1, D2, D2)
        x = add4(x, scale4(product(load(kept, C, D1, D2), dm, D2), s * c[1] * uc * um), D2, D2)
        put_weight(weights + WOFF[1], symmetric(x, D2), dtype, D, D1, D2)


@triton.jit
def all_weights(
    kept, units, room, weights, dm, c, s, side, OFF: tl.constexpr, WOFF: tl.constexpr, D: tl.constexpr,
    D1: tl.constexpr, D2: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Write all five for dM' [V, F]."""
    u = load_units(units)
    dm, um, z, uz = key_gradient(kept, room, weights, dm, u, c, s, side, OFF, WOFF, D, D1, D2, dtype)
    for part in tl.static_range(4):
        weight(kept, weights, dm, um, z, uz, u, c, s, side, part, OFF, WOFF, D, D1, D2, dtype)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def fixed_weights(
    q, g, kept, units, room, weights, rows, grads, vectors, coefficients, qs, gs, N, H, scale, CENTER: tl.constexpr,
    MEAN: tl.constexpr, OFF: tl.constexpr, K: tl.constexpr, KG: tl.constexpr, ALIGN: tl.constexpr, D: tl.constexpr,
    F1: tl.constexpr, F2: tl.constexpr, KF: tl.constexpr, KR: tl.constexpr, WOFF: tl.constexpr, KW: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """The weights of the gradients of the tokens of one head; of several blocks WR', and what `fixed_products` starts
    from. grads as in `mixture.mixture_weights`."""
    pid = tl.program_id(0)
    head, h, at, N, scale = own_head(pid, N, H, scale)
    side = None
    rows += head * 3 * D
    if grads is None:
        q, g, qn, gn = of_head((q, g), (qs, gs), at, h, ALIGN)
        dm, sg = sum_gradient(q, g, qn, gn, 0, N, MEAN, D, F1, F2, D, F1, F2, BN, PREC)
        if CENTER > 0 or MEAN:
            put_rows(rows, sg, N[1], MEAN, D, F1, F2)
    else:
        grads += head * KG
        side = (vectors + head * K, grads, rows, N[1])
        dm = load4(grads, D, F1, F2, D, F1, F2, 1, D)
    kept += head * KF
    units += head * 8
    room += head * KR
    weights += head * KW
    c = load_coefficients(coefficients, h, 5)
    if F2 == 0:
        all_weights(kept, units, room, weights, dm, c, scale, side, OFF, WOFF, D, F1, F2, q.dtype.element_ty)
    else:
        u = load_units(units)
        _, um, _, uz = key_gradient(
            kept, room, weights, dm, u, c, scale, side, OFF, WOFF, D, F1, F2, q.dtype.element_ty
        )
        tl.store(units + 5, um)
        tl.store(units + 6, uz)


@triton.jit(do_not_specialize=["N", "H", "scale"])
def fixed_products(
    kept, units, room, weights, rows, grads, vectors, coefficients, N, H, scale, OFF: tl.constexpr, K: tl.constexpr,
    KG: tl.constexpr, D: tl.constexpr, F1: tl.constexpr, F2: tl.constexpr, KF: tl.constexpr, KR: tl.constexpr,
    WOFF: tl.constexpr, KW: tl.constexpr,
):  # fmt: skip
    """Compute the other four weights of a head by four programs, whose registers one would not have."""
    pid = tl.program_id(0) // 4
    head, _, _, N, scale = own_head(pid, N, H, scale)
    units += head * 8
    room += head * KR
    u = load_units(units)
    c = load_coefficients(coefficients, pid % H, 5)
    um, uz = tl.load(units + 5), tl.load(units + 6)
    part = tl.program_id(0) % 4
    side = None
    if grads is not None:
        side = (vectors + head * K, grads + head * KG, rows + head * 3 * D, N[1])
    for PART in tl.static_range(4):
        if part == PART:
            weight(
                kept + head * KF, weights + head * KW, load(room, 0, F1, F2), um, load(room, 1, F1, F2), uz, u, c,
                scale, side, PART, OFF, WOFF, D, F1, F2, weights.dtype.element_ty,
            )  # fmt: skip
