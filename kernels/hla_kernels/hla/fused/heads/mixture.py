"""`polynomial` of the tokens as they are, one program a head (or one for each of four products): `digits`.

64 channels of up to 512 tokens: the forward keeps nothing, the backward sums all again. Longer heads and 72 channels:
the forward keeps the moments to the digits of float32, the backward sums dM alone. Tokens are written by
`split.apply_grads`.
"""

import triton
import triton.language as tl

from ..loops import read_out, span, sum_gradient, sum_moments
from ..tiles import add4, cast4, scale4, trans4, zeros2
from . import NO_SPECIALIZE, load_coefficients, of_head, own_head, store_coefficients
from .digits import (
    DM,
    REST_DM,
    RESTS,
    C,
    P,
    R,
    S,
    W,
    first_products,
    load,
    mixed_gradient,
    product,
    put_digits,
    put_left,
    put_weight,
    second_products,
    total,
)
from .halves import half, put_matrix


@triton.jit
def store_units(to, u):
    """Write the units of P, S, C, R, W."""
    for i in tl.static_range(5):
        tl.store(to + i, u[i])


@triton.jit
def load_units(at):
    """Inverse of `store_units`."""
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4)


@triton.jit
def put_moment(to, a, DIGITS: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr):
    """Write a moment in float16, DIGITS: what is left of it too, and return its unit."""
    if DIGITS:
        unit = put_digits(to, a, RESTS, D1, D2)
    else:
        hat, unit = half(a, D2, D2)
        put_matrix(to, hat, D1, D2)
    return unit


@triton.jit
def put_moments(
    to, units, m, s, ORDER: tl.constexpr, DIGITS: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr
):  # fmt: skip
    """`put_moment` of the moments times s and their units: all (ORDER 5), P and S (11), C and W (12) or R (10)."""
    AREA: tl.constexpr = (D1 + D2) * (D1 + D2)
    if ORDER == 5 or ORDER == 11:
        tl.store(units, put_moment(to + P * AREA, scale4(m[0], s), DIGITS, D1, D2))
        tl.store(units + 1, put_moment(to + S * AREA, scale4(m[1], s), DIGITS, D1, D2))
    if ORDER == 5 or ORDER == 12:
        tl.store(units + 4, put_moment(to + W * AREA, scale4(m[4], s), DIGITS, D1, D2))
        tl.store(units + 2, put_moment(to + C * AREA, scale4(m[2], s), DIGITS, D1, D2))
    if ORDER == 5 or ORDER == 10:
        tl.store(units + 3, put_moment(to + R * AREA, scale4(m[3], s), DIGITS, D1, D2))


@triton.jit
def mixed_operator(kept, room, u, c, D1: tl.constexpr, D2: tl.constexpr):
    """M of `algebra.operator` from float16 factors and the unit of the left factor of P, which is written to `room`."""
    up, us, uc, ur, uw = u
    hs = load(kept, S, D1, D2)
    t = scale4(product(hs, load(kept, W, D1, D2), D2), us * uw)
    ut = put_left(room, t, scale4(cast4(load(kept, R, D1, D2), tl.float32), ur), c, D1, D2)
    x = scale4(product(hs, load(kept, C, D1, D2), D2), us * uc * c[1])
    tl.debug_barrier()  # every thread reads what others wrote
    return add4(scale4(product(load(room, 0, D1, D2), load(kept, P, D1, D2), D2), ut * up), x, D2, D2), ut


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def mixture_forward(
    q, k, v, o, kept, units, room, coefficients, qs, ks, vs, os, N, H, scale, ALIGN: tl.constexpr, D: tl.constexpr,
    F1: tl.constexpr, F2: tl.constexpr, KF: tl.constexpr, BN: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """o = q M of one head, whose moments are kept; room for a matrix."""
    pid = tl.program_id(0)
    head, h, at, N, scale = own_head(pid, N, H, scale)
    q, k, v, o, qn, kn, vn, _ = of_head((q, k, v, o), (qs, ks, vs, os), at, h, ALIGN)
    m, _, _, _ = sum_moments(
        q, k, v, q, qn, kn, vn, qn, 0, N, 5, False, False, True, D, F1, F2, D, F1, F2, BN, "ieee"
    )  # fmt: skip
    kept += head * KF
    units += head * 8
    put_moments(kept, units, m, scale, 5, True, F1, F2)
    tl.debug_barrier()  # every thread reads what others wrote
    room += head * (F1 + F2) * (F1 + F2)
    m, _ = mixed_operator(kept, room, load_units(units), load_coefficients(coefficients, h, 5), F1, F2)
    x = zeros2(F1, F2)
    read_out(
        q, o, qn, os[1] * ALIGN, 0, N, cast4(m, q.dtype.element_ty), x, x, x, 0.0, False, False, 0, D, F1, F2, F1, F2,
        D, F1, F2, BO, "tf32x3",
    )  # fmt: skip


@triton.jit
def part_moments(
    q, k, v, qn, kn, vn, kept, units, N, scale, ORDER: tl.constexpr, DIGITS: tl.constexpr, D: tl.constexpr,
    F1: tl.constexpr, F2: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Sum and keep the moments of an order of `begin_moments`."""
    m, _, _, _ = sum_moments(
        q, k, v, q, qn, kn, vn, qn, 0, N, ORDER, False, False, False, D, F1, F2, D, F1, F2, BN,
        "ieee" if DIGITS else "tf32x3",
    )  # fmt: skip
    put_moments(kept, units, m, scale, ORDER, DIGITS, F1, F2)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def mixture_moments(
    q, k, v, kept, units, qs, ks, vs, N, H, scale, ALIGN: tl.constexpr, D: tl.constexpr, F1: tl.constexpr,
    F2: tl.constexpr, KF: tl.constexpr, DIGITS: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The moments of one head by three programs, each of which reads two of q, k, v: P and S, C and W, R."""
    pid = tl.program_id(0) // 3
    role = tl.program_id(0) % 3
    head, h, at, N, scale = own_head(pid, N, H, scale)
    q, k, v, qn, kn, vn = of_head((q, k, v), (qs, ks, vs), at, h, ALIGN)
    kept += head * KF
    units += head * 8
    if role == 0:
        part_moments(q, k, v, qn, kn, vn, kept, units, N, scale, 11, DIGITS, D, F1, F2, BN)
    elif role == 1:
        part_moments(q, k, v, qn, kn, vn, kept, units, N, scale, 12, DIGITS, D, F1, F2, BN)
    else:
        part_moments(q, k, v, qn, kn, vn, kept, units, N, scale, 10, DIGITS, D, F1, F2, BN)


@triton.jit(do_not_specialize=["H"])
def mixture_operator(
    kept, units, room, matrix, coefficients, H, D: tl.constexpr, F1: tl.constexpr, F2: tl.constexpr, KF: tl.constexpr,
    KR: tl.constexpr, DIGITS: tl.constexpr,
):  # fmt: skip
    """M of every head; room for a matrix, or without DIGITS the left factor of P in the place of R."""
    head = tl.program_id(0).to(tl.int64)
    units += head * 8
    m, ut = mixed_operator(
        kept + head * KF, room + head * KR, load_units(units),
        load_coefficients(coefficients, tl.program_id(0) % H, 5), F1, F2,
    )  # fmt: skip
    put_weight(matrix + head * D * D, m, matrix.dtype.element_ty, D, F1, F2)
    if not DIGITS:
        tl.store(units + 3, ut)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def mixture_weights(
    q, g, kept, units, room, more, matrix, weights, coefficients, dcoefficients, qs, gs, N, H, scale,
    ALIGN: tl.constexpr, D: tl.constexpr, F1: tl.constexpr, F2: tl.constexpr, KF: tl.constexpr, KR: tl.constexpr,
    WOFF: tl.constexpr, KW: tl.constexpr, WHOLE: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """dM, and WHOLE: the operator, the weights and d coefficients of one head; otherwise what `mixture_products` starts
    from, of which more [B * H, 4] are the units."""
    pid = tl.program_id(0)
    head, h, at, N, scale = own_head(pid, N, H, scale)
    q, g, qn, gn = of_head((q, g), (qs, gs), at, h, ALIGN)
    dm, _ = sum_gradient(q, g, qn, gn, 0, N, False, D, F1, F2, D, F1, F2, BN, "ieee")
    kept += head * KF
    room += head * KR
    weights += head * KW
    dm = trans4(dm)
    um = put_digits(room, dm, REST_DM, F1, F2)
    u = load_units(units + head * 8)
    c = load_coefficients(coefficients, h, 5)
    dtype: tl.constexpr = q.dtype.element_ty
    if WHOLE:
        dc = mixed_gradient(
            kept, room, matrix + head * D * D, weights, dm, dm, um, u, c, scale, True, WOFF, D, F1, F2, dtype
        )
        store_coefficients(dcoefficients, pid, dc)
    else:
        tl.debug_barrier()  # every thread reads what others wrote
        dc1, dc3, dc4, uz, ut = first_products(
            kept, room, weights, dm, dm, um, u, c, scale, True, WOFF, D, F1, F2, dtype
        )
        more += head * 4
        tl.store(more, um)
        tl.store(more + 1, uz)
        tl.store(more + 2, ut)
        store_coefficients(dcoefficients, pid * 5, (total(dc1, F2), 0.0, total(dc3, F2), total(dc4, F2)))


@triton.jit(do_not_specialize=["N", "H", "scale"])
def mixture_products(
    kept, units, room, more, matrix, weights, coefficients, dcoefficients, N, H, scale, D: tl.constexpr,
    F1: tl.constexpr, F2: tl.constexpr, KF: tl.constexpr, KR: tl.constexpr, WOFF: tl.constexpr, KW: tl.constexpr,
):  # fmt: skip
    """`second_products` of a head by four programs."""
    pid = tl.program_id(0) // 4
    head = pid.to(tl.int64)
    _, _, scale = span(N, pid // H, pid, scale)
    u = load_units(units + head * 8)
    more += head * 4
    um, uz, ut = tl.load(more), tl.load(more + 1), tl.load(more + 2)
    c = load_coefficients(coefficients, pid % H, 5)
    part = tl.program_id(0) % 4
    for PART in tl.static_range(4):
        if part == PART:
            dc2, dc4 = second_products(
                kept + head * KF, room + head * KR, matrix + head * D * D, weights + head * KW, um, uz, ut, u, c, scale,
                PART, WOFF, D, F1, F2, matrix.dtype.element_ty,
            )  # fmt: skip
            store_coefficients(dcoefficients, pid * 5 + 1 + PART, (0.0, total(dc2, F2), 0.0, total(dc4, F2)))


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def mixture_backward(
    q, k, v, g, kept, room, matrix, weights, coefficients, dcoefficients, qs, ks, vs, gs, N, H, scale,
    ALIGN: tl.constexpr, D: tl.constexpr, F1: tl.constexpr, F2: tl.constexpr, KF: tl.constexpr, KR: tl.constexpr,
    WOFF: tl.constexpr, KW: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The operator, the weights and d coefficients of one head, of its tokens alone, which are read twice: three sums
    to the digits of float32 are what fits in registers."""
    pid = tl.program_id(0)
    head, h, at, N, scale = own_head(pid, N, H, scale)
    q, k, v, g, qn, kn, vn, gn = of_head((q, k, v, g), (qs, ks, vs, gs), at, h, ALIGN)
    kept += head * KF
    room += head * KR
    matrix += head * D * D
    weights += head * KW
    c = load_coefficients(coefficients, h, 5)
    AREA: tl.constexpr = (F1 + F2) * (F1 + F2)
    m, _, _, _ = sum_moments(q, k, v, g, qn, kn, vn, gn, 0, N, 4, False, False, False, D, F1, F2, D, F1, F2, BN, "ieee")
    up = put_digits(kept + P * AREA, scale4(m[0], scale), RESTS, F1, F2)
    us = put_digits(kept + S * AREA, scale4(m[1], scale), RESTS, F1, F2)
    uw = put_digits(kept + W * AREA, scale4(m[4], scale), RESTS, F1, F2)
    m, _, dm, _ = sum_moments(q, k, v, g, qn, kn, vn, gn, 0, N, 6, False, True, False, D, F1, F2, D, F1, F2, BN, "ieee")
    dm = trans4(dm)
    um = put_digits(room + DM * AREA, dm, REST_DM, F1, F2)
    uc = put_digits(kept + C * AREA, scale4(m[2], scale), RESTS, F1, F2)
    dc = mixed_gradient(
        kept, room, matrix, weights, dm, scale4(m[3], scale), um, (up, us, uc, 1.0, uw), c, scale, False, WOFF, D, F1,
        F2, q.dtype.element_ty,
    )  # fmt: skip
    store_coefficients(dcoefficients, pid, dc)
