"""Weights of the token gradients of `polynomial`, and the gradient of its coefficients.

They come from what a forward kept. With Z = dM P', which the weights need:  dc = (tr Z, <S, dM C'>, <R, Z>, <W, S Z>).
"""

import triton
import triton.language as tl

from ...loops import sum_gradient
from ...tiles import add4, cast4, load4, rank1, scale4, store4, trans4
from .. import NO_SPECIALIZE, load_coefficients, of_head, own_head, store_coefficients
from ..halves import get_matrix, half, put_matrix
from . import PREC
from .kept import load_units, put_rows
from .matrices import (
    C,
    P,
    R,
    S,
    T,
    W,
    beside_ones,
    inner,
    load,
    product,
    put_key_row,
    put_query_row,
    put_weight,
    symmetric,
    trace,
)


@triton.jit
def through(room, a, F: tl.constexpr):
    """Return a matrix of several blocks by way of memory: some of it is a left factor."""
    if F.D2 > 0:
        put_matrix(room, a, F)
        tl.debug_barrier()  # every thread reads what others wrote
        a = get_matrix(room, F)
    return a


@triton.jit
def put_turned(to, a, dtype: tl.constexpr, F: tl.constexpr):
    """Write a' [D, D]."""
    store4(to, cast4(a, dtype), F, F, 1, F.D)


@triton.jit
def key_gradient(
    kept, room, weights, dm, u, c, s, side, LEARNED: tl.constexpr, L: tl.constexpr, F: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """Write WR' for dM' [V, F]; returns dM' and Z' = P dM' in float16, their units, and d coefficients 1 and 3. Several
    blocks are in `room` then. side as in `beside_ones`."""
    dm, um = half(dm, F, F)
    dm = through(room, dm, F)
    z = scale4(product(load(kept, P, F), dm, F), um * u[0])
    if side is not None:
        p1, _, d1 = beside_ones(side, s, L, F)
        z = rank1(z, p1, d1, F, F)
    dc1 = 0.0
    dc3 = 0.0
    if LEARNED:
        dc1 = trace(z, F)
        dc3 = inner(trans4(load(kept, R, F)), z, u[3], F)
    put_weight(weights + L.R, scale4(z, s * c[2]), dtype, F)
    z, uz = half(z, F, F)
    return dm, um, through(room + (F.D1 + F.D2) * (F.D1 + F.D2), z, F), uz, dc1, dc3


@triton.jit
def weight(
    kept, weights, dm, um, z, uz, u, c, s, side, PART: tl.constexpr, LEARNED: tl.constexpr, L: tl.constexpr,
    F: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Write WP' (PART 0), WC' (1), WW (2) or WS (3) of `algebra.weights`; of a ratio, with the first two, the rows
    too. Returns d coefficients 4 (PART 2) and 2 (PART 3)."""
    _, us, uc, _, uw, ut = u
    dc = 0.0
    if PART == 0:
        x = scale4(product(trans4(load(kept, T, F)), trans4(dm), F), s * um * ut)
        put_turned(weights + L.P, x, dtype, F)
        if side is not None:
            put_key_row(side, weights + L.P, load(kept, T, F), s * ut, L, F)
    elif PART == 1:
        x = scale4(product(load(kept, S, F), trans4(dm), F), s * c[1] * us * um)
        put_turned(weights + L.C, x, dtype, F)
        if side is not None:
            put_query_row(side, weights + L.C, load(kept, S, F), s * us * c[1], L, F)
    elif PART == 2:
        x = scale4(product(load(kept, S, F), trans4(z), F), us * uz)
        if LEARNED:
            dc = inner(load(kept, W, F), x, uw, F)
        put_weight(weights + L.W, symmetric(scale4(x, s * c[3]), F), dtype, F)
    else:
        y = scale4(product(load(kept, C, F), dm, F), uc * um)
        if side is not None:
            _, q1, d1 = beside_ones(side, s, L, F)
            y = rank1(y, q1, d1, F, F)
        if LEARNED:
            dc = inner(load(kept, S, F), y, us, F)
        x = scale4(product(load(kept, W, F), z, F), s * c[3] * uw * uz)
        put_weight(weights + L.S, symmetric(add4(x, scale4(y, s * c[1]), F, F), F), dtype, F)
    return dc


@triton.jit
def all_weights(
    kept, units, room, weights, dm, c, s, side, LEARNED: tl.constexpr, L: tl.constexpr, F: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """Write all five for dM' [V, F]; returns d coefficients."""
    u = load_units(units)
    dm, um, z, uz, dc1, dc3 = key_gradient(kept, room, weights, dm, u, c, s, side, LEARNED, L, F, dtype)
    weight(kept, weights, dm, um, z, uz, u, c, s, side, 0, LEARNED, L, F, dtype)
    weight(kept, weights, dm, um, z, uz, u, c, s, side, 1, LEARNED, L, F, dtype)
    dc4 = weight(kept, weights, dm, um, z, uz, u, c, s, side, 2, LEARNED, L, F, dtype)
    dc2 = weight(kept, weights, dm, um, z, uz, u, c, s, side, 3, LEARNED, L, F, dtype)
    return dc1, dc2, dc3, dc4


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def mixture_weights(
    q, g, kept, units, room, weights, rows, grads, vectors, coefficients, dcoefficients, qs, gs, N, H, scale,
    CENTER: tl.constexpr, MEAN: tl.constexpr, L: tl.constexpr, ALIGN: tl.constexpr, F: tl.constexpr, KF: tl.constexpr,
    KR: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The weights of the token gradients of one head, and unless dcoefficients is None its d coefficients; of several
    blocks WR', and what `mixture_products` starts from. Of a ratio dM is in grads [B * H, KG], of
    `split.reduce_readout`."""
    pid = tl.program_id(0)
    head, h, at, N, scale = own_head(pid, N, H, scale)
    side = None
    rows += head * 3 * F.D
    if grads is None:
        q, g, qn, gn = of_head((q, g), (qs, gs), at, h, ALIGN)
        dm, sg = sum_gradient(q, g, qn, gn, 0, N, MEAN, F, F, BN, PREC)
        if CENTER > 0 or MEAN:
            put_rows(rows, sg, N[1], MEAN, F)
    else:
        grads += head * L.KG
        side = (vectors + head * L.K, grads, rows, N[1])
        dm = load4(grads, F, F, 1, F.D)
    kept += head * KF
    units += head * 8
    room += head * KR
    weights += head * L.KW
    c = load_coefficients(coefficients, h, 5)
    LEARNED: tl.constexpr = dcoefficients is not None
    dtype: tl.constexpr = q.dtype.element_ty
    if F.D2 == 0:
        dc = all_weights(kept, units, room, weights, dm, c, scale, side, LEARNED, L, F, dtype)
        if LEARNED:
            store_coefficients(dcoefficients, pid, dc)
    else:
        u = load_units(units)
        _, um, _, uz, dc1, dc3 = key_gradient(kept, room, weights, dm, u, c, scale, side, LEARNED, L, F, dtype)
        tl.store(units + 6, um)
        tl.store(units + 7, uz)
        if LEARNED:
            store_coefficients(dcoefficients, pid * 3, (dc1, 0.0, dc3, 0.0))


@triton.jit(do_not_specialize=["N", "H", "scale"])
def mixture_products(
    kept, units, room, weights, rows, grads, vectors, coefficients, dcoefficients, N, H, scale, L: tl.constexpr,
    F: tl.constexpr, KF: tl.constexpr, KR: tl.constexpr,
):  # fmt: skip
    """Compute the other four weights of a head by four programs, whose registers one would not have."""
    pid = tl.program_id(0) // 4
    head, _, _, N, scale = own_head(pid, N, H, scale)
    units += head * 8
    room += head * KR
    u = load_units(units)
    c = load_coefficients(coefficients, pid % H, 5)
    um, uz = tl.load(units + 6), tl.load(units + 7)
    part = tl.program_id(0) % 4
    side = None
    if grads is not None:
        side = (vectors + head * L.K, grads + head * L.KG, rows + head * 3 * F.D, N[1])
    LEARNED: tl.constexpr = dcoefficients is not None
    for PART in tl.static_range(4):
        if part == PART:
            dc = weight(
                kept + head * KF, weights + head * L.KW, load(room, 0, F), um, load(room, 1, F), uz, u, c,
                scale, side, PART, LEARNED, L, F, weights.dtype.element_ty,
            )  # fmt: skip
            if LEARNED and PART == 2:
                store_coefficients(dcoefficients, pid * 3 + 1, (0.0, 0.0, 0.0, dc))
            if LEARNED and PART == 3:
                store_coefficients(dcoefficients, pid * 3 + 2, (0.0, dc, 0.0, 0.0))
