"""`polynomial` without feature map, plain or with centred keys, one program per head (`digits`).

Or one program for each of four products.

64 channels of up to 512 tokens: the forward keeps nothing, the backward sums all again. Longer heads and 72 channels:
the forward keeps the moments to the digits of float32, the backward sums dM alone. Tokens are written by
`split.apply_grads`.

    digits  matrices to the digits of float32, and what is made of them     fixed   coefficients that need no gradient
    kept    what is kept of a head                                          ratios  the operator of a ratio of features

A ratio keeps its moments and its operator always; its backward has dM of `split.reduce_readout`.
"""

import triton
import triton.language as tl

from ...loops import span, sum_features, sum_gradient, sum_moments
from ...tiles import add4, cast4, load4, scale4, trans4, zeros2, zeros4
from .. import NO_SPECIALIZE, load_coefficients, of_head, own_head, stagger, store_coefficients
from .digits import (
    DM,
    REST_DM,
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
)
from .kept import has_moment, load_units, put_moments, put_rows, put_scaled, scaled


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


@triton.jit
def part_moments(
    q, k, v, qn, kn, vn, kept, units, vectors, N, scale, ORDER: tl.constexpr, CENTER: tl.constexpr, MEAN: tl.constexpr,
    FMAP: tl.constexpr, OFF: tl.constexpr, DIGITS: tl.constexpr, D: tl.constexpr, F1: tl.constexpr, F2: tl.constexpr,
    BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sum and keep the moments of an order of `begin_moments`; of features (FMAP) to 16 bits, or without DIGITS P and C
    alone."""
    SUMS: tl.constexpr = 2 if CENTER > 0 or MEAN else 0
    PREC: tl.constexpr = "ieee" if DIGITS else "tf32x3"
    if FMAP == 0:
        m, sums, _, _ = sum_moments(
            q, k, v, q, qn, kn, vn, qn, 0, N, ORDER, SUMS, False, False, D, F1, F2, D, F1, F2, BN, PREC
        )
    else:
        z = zeros2(F1, F2)
        m, sums, _, _, _ = sum_features(
            q, k, v, q, qn, kn, vn, qn, 0, N, zeros4(1, 0, 1, 0), z, z, 0.0, (q, k, 0, 0), q, ORDER, True, ORDER != 10,
            2 if DIGITS else 1, False, True, False, False, FMAP, D, F1, F2, F1, F2, D, F1, F2, BN, PREC, STAGES,
        )  # fmt: skip
    u = put_moments(kept, m, vectors, sums, N[1], scale, ORDER, CENTER, MEAN, OFF, DIGITS, D, F1, F2)
    for i in tl.static_range(5):
        if has_moment(i, ORDER):
            tl.store(units + i, u[i])


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def mixture_moments(
    q, k, v, kept, units, vectors, qs, ks, vs, N, H, scale, CENTER: tl.constexpr, MEAN: tl.constexpr,
    FMAP: tl.constexpr, OFF: tl.constexpr, K: tl.constexpr, ALIGN: tl.constexpr, D: tl.constexpr, F1: tl.constexpr,
    F2: tl.constexpr, KF: tl.constexpr, DIGITS: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute the moments of one head by three programs, each of which reads two of q, k, v: P and S, C and W, R."""
    pid = tl.program_id(0) // 3
    role = tl.program_id(0) % 3
    head, h, at, N, scale = own_head(pid, N, H, scale)
    q, k, v, qn, kn, vn = of_head((q, k, v), (qs, ks, vs), at, h, ALIGN)
    kept += head * KF
    units += head * 8
    vectors += head * K
    for part in tl.static_range(3):
        if role == part:
            part_moments(
                q, k, v, qn, kn, vn, kept, units, vectors, N, scale, 11 if part == 0 else 12 if part == 1 else 10,
                CENTER, MEAN, FMAP, OFF, DIGITS, D, F1, F2, BN, STAGES,
            )  # fmt: skip


@triton.jit(do_not_specialize=["H"])
def mixture_operator(
    kept, units, room, matrix, coefficients, H, D: tl.constexpr, F1: tl.constexpr, F2: tl.constexpr, KF: tl.constexpr,
    KR: tl.constexpr, DIGITS: tl.constexpr,
):  # fmt: skip
    """Compute M of every head; room: memory for a matrix. Without DIGITS the left factor of P overwrites R."""
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
    q, g, kept, units, room, more, matrix, weights, rows, grads, vectors, coefficients, dcoefficients, qs, gs, N, H,
    scale, CENTER: tl.constexpr, MEAN: tl.constexpr, OFF: tl.constexpr, K: tl.constexpr, KG: tl.constexpr,
    ALIGN: tl.constexpr, D: tl.constexpr, F1: tl.constexpr, F2: tl.constexpr, KF: tl.constexpr, KR: tl.constexpr,
    WOFF: tl.constexpr, KW: tl.constexpr, WHOLE: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """dM, and WHOLE: the operator, the weights and d coefficients of one head; otherwise what `mixture_products` starts
    from, of which more [B * H, 4] are the units. Of a ratio dM is in grads [B * H, KG], of `split.reduce_readout`."""
    pid = tl.program_id(0)
    head, h, at, N, scale = own_head(pid, N, H, scale)
    side = None
    rows += head * 3 * D
    if grads is None:
        q, g, qn, gn = of_head((q, g), (qs, gs), at, h, ALIGN)
        dm, sg = sum_gradient(q, g, qn, gn, 0, N, MEAN, D, F1, F2, D, F1, F2, BN, "ieee")
        if CENTER > 0 or MEAN:
            put_rows(rows, sg, N[1], MEAN, D, F1, F2)
        dm = trans4(dm)
    else:
        grads += head * KG
        side = (vectors + head * K, grads, rows, N[1])
        dm = load4(grads, D, F1, F2, D, F1, F2, D, 1)
    kept += head * KF
    room += head * KR
    weights += head * KW
    um = put_digits(room, dm, REST_DM, F1, F2)
    u = load_units(units + head * 8)
    c = load_coefficients(coefficients, h, 5)
    dtype: tl.constexpr = q.dtype.element_ty
    if WHOLE:
        dc = mixed_gradient(
            kept, room, matrix + head * D * D, weights, dm, dm, um, u, c, scale, side, True, OFF, WOFF, D, F1, F2, dtype
        )
        store_coefficients(dcoefficients, pid, dc)
    else:
        tl.debug_barrier()  # every thread reads what others wrote
        dc1, dc3, dc4, uz, ut = first_products(
            kept, room, weights, dm, dm, um, u, c, scale, side, True, OFF, WOFF, D, F1, F2, dtype
        )
        more += head * 4
        tl.store(more, um)
        tl.store(more + 1, uz)
        tl.store(more + 2, ut)
        store_coefficients(dcoefficients, pid * 5, (dc1, 0.0, dc3, dc4))


@triton.jit(do_not_specialize=["N", "H", "scale"])
def mixture_products(
    kept, units, room, more, matrix, weights, rows, grads, vectors, coefficients, dcoefficients, N, H, scale,
    OFF: tl.constexpr, K: tl.constexpr, KG: tl.constexpr, D: tl.constexpr, F1: tl.constexpr, F2: tl.constexpr,
    KF: tl.constexpr, KR: tl.constexpr, WOFF: tl.constexpr, KW: tl.constexpr,
):  # fmt: skip
    """`second_products` of a head by four programs."""
    pid = tl.program_id(0) // 4
    head = pid.to(tl.int64)
    _, N, scale = span(N, pid // H, pid, scale)
    u = load_units(units + head * 8)
    more += head * 4
    um, uz, ut = tl.load(more), tl.load(more + 1), tl.load(more + 2)
    c = load_coefficients(coefficients, pid % H, 5)
    part = tl.program_id(0) % 4
    side = None
    if grads is not None:
        side = (vectors + head * K, grads + head * KG, rows + head * 3 * D, N[1])
    for PART in tl.static_range(4):
        if part == PART:
            dc2, dc4 = second_products(
                kept + head * KF, room + head * KR, matrix + head * D * D, weights + head * KW, um, uz, ut, u, c, scale,
                side, PART, OFF, WOFF, D, F1, F2, weights.dtype.element_ty,
            )  # fmt: skip
            store_coefficients(dcoefficients, pid * 5 + 1 + PART, (0.0, dc2, 0.0, dc4))


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def mixture_backward(
    q, k, v, g, kept, room, vectors, matrix, weights, rows, coefficients, dcoefficients, qs, ks, vs, gs, N, H, scale,
    CENTER: tl.constexpr, MEAN: tl.constexpr, OFF: tl.constexpr, K: tl.constexpr, ALIGN: tl.constexpr, D: tl.constexpr,
    F1: tl.constexpr, F2: tl.constexpr, KF: tl.constexpr, KR: tl.constexpr, WOFF: tl.constexpr, KW: tl.constexpr,
    BN: tl.constexpr, DELAY: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """The operator, the weights and d coefficients of one head, of its tokens alone, which are read twice: three sums
    to the digits of float32 are what fits in registers."""
    pid = tl.program_id(0)
    stagger(pid, DELAY, SLOTS)
    head, h, at, N, scale = own_head(pid, N, H, scale)
    q, k, v, g, qn, kn, vn, gn = of_head((q, k, v, g), (qs, ks, vs, gs), at, h, ALIGN)
    kept += head * KF
    AREA: tl.constexpr = (F1 + F2) * (F1 + F2)
    SUMS: tl.constexpr = 2 if CENTER > 0 or MEAN else 0
    vectors += head * K
    m, sums, _, _ = sum_moments(
        q, k, v, g, qn, kn, vn, gn, 0, N, 4, SUMS, False, False, D, F1, F2, D, F1, F2, BN, "ieee"
    )  # fmt: skip
    up, us, _, _, uw = put_moments(kept, m, vectors, sums, N[1], scale, 4, CENTER, MEAN, OFF, True, D, F1, F2)
    m, _, dm, sg = sum_moments(
        q, k, v, g, qn, kn, vn, gn, 0, N, 6, 3 if MEAN else 0, True, False, D, F1, F2, D, F1, F2, BN, "ieee"
    )  # fmt: skip
    if SUMS:
        put_rows(rows + head * 3 * D, sg, N[1], MEAN, D, F1, F2)
    dm = trans4(dm)
    room += head * KR
    um = put_digits(room + DM * AREA, dm, REST_DM, F1, F2)
    uc = put_scaled(kept, m, vectors, sums, N[1], scale, 2, 6, CENTER, MEAN, OFF, True, D, F1, F2)
    r = scaled(m, vectors, sums, N[1], scale, 3, True, CENTER, MEAN, OFF, D, F1, F2)
    c = load_coefficients(coefficients, h, 5)
    matrix += head * D * D
    weights += head * KW
    dc = mixed_gradient(
        kept, room, matrix, weights, dm, r, um, (up, us, uc, 1.0, uw), c, scale, None, False, OFF, WOFF, D, F1, F2,
        q.dtype.element_ty,
    )  # fmt: skip
    store_coefficients(dcoefficients, pid, dc)
