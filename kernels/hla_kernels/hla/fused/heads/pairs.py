"""Kernels of two neighbouring heads a program (`loops.pairs`).

Of higher orders, moments and dM' are kept as float16 numbers in units of their own, powers of two in which the largest
one of a matrix is about 8 (`halves`), so that the D x D algebra of `factors` reads its operands where the tensor cores
want them. First order needs none: its moment is the operator, its dM' the weights.
"""

import triton
import triton.language as tl

from ..algebra import largest
from ..loops import longest, means
from ..loops.pairs import (
    alone,
    load_two,
    pair_gradient,
    pair_moments,
    pair_product,
    place_pair,
    store_one,
    store_two,
    together,
    turn,
)
from ..maps import power_of_two
from ..tiles import cast4
from . import at_head

NO_SPECIALIZE = ["qs", "ks", "vs", "os", "gs", "dqs", "dks", "dvs", "N", "H", "PARTS", "chunk", "scale"]


@triton.jit
def store_factor(factors, units, m, scale, SECOND: tl.constexpr, D: tl.constexpr, D1: tl.constexpr):
    """The first or the second matrix times scale as a factor [D, D], and its unit."""
    own = alone(m, scale, SECOND, D, D1)
    unit = power_of_two(0.125 * largest(own, 16, 16))
    store_one(factors, own, 1.0 / unit, SECOND, D, D1, D, 1)
    tl.store(units, unit)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def reduce_pairs(
    q, k, v, factors, units, qs, ks, vs, N, H, scale, ORDER: tl.constexpr, ALIGN: tl.constexpr, D: tl.constexpr,
    D1: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The moments (C, S) or (P, R) of two heads: factors [B * H, 2, D, D], units [B * H, 4]."""
    at, h, head, lo, hi = place_pair(H, 1, N, longest(N), 1)
    _, scale = means(N, head, scale)
    x, y = pair_moments(
        at_head(q, qs, at, h, ALIGN), at_head(k, ks, at, h, ALIGN), at_head(v, vs, at, h, ALIGN), qs[1] * ALIGN,
        ks[1] * ALIGN, vs[1] * ALIGN, lo, hi, ORDER, D, D1, BN,
    )  # fmt: skip
    factors += head * 2 * D * D
    units += head * 4
    store_factor(factors, units, x, scale, False, D, D1)
    store_factor(factors + 2 * D * D, units + 4, x, scale, True, D, D1)
    store_factor(factors + D * D, units + 1, y, scale, False, D, D1)
    store_factor(factors + 3 * D * D, units + 5, y, scale, True, D, D1)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def readout_pairs(
    q, g, weights, gradient, units, qs, gs, N, H, scale, ORDER: tl.constexpr, ALIGN: tl.constexpr, D: tl.constexpr,
    D1: tl.constexpr, KW: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """dM' of two heads as factors: gradient [B * H, D, D], the last of units [B * H, 4]; of first order the weights
    [B * H, KW]."""
    at, h, head, lo, hi = place_pair(H, 1, N, longest(N), 1)
    _, scale = means(N, head, scale)
    dm = pair_gradient(
        at_head(q, qs, at, h, ALIGN), at_head(g, gs, at, h, ALIGN), qs[1] * ALIGN, gs[1] * ALIGN, lo, hi, D, D1, BN
    )
    if ORDER == 1:
        store_two(weights + head * KW, KW, dm, scale, D, D1, D, 1)
    else:
        gradient += head * D * D
        units += head * 4 + 3
        store_factor(gradient, units, dm, 1.0, False, D, D1)
        store_factor(gradient + D * D, units + 4, dm, 1.0, True, D, D1)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def apply_pairs(
    q, o, matrix, qs, os, N, H, PARTS, chunk, ALIGN: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """`split.apply` of two heads: o = q M."""
    at, h, head, lo, hi = place_pair(H, PARTS, N, chunk, 1)
    pair_product(
        at_head(q, qs, at, h, ALIGN), at_head(o, os, at, h, ALIGN), load_two(matrix + head * D * D, D * D, D, D1),
        qs[1] * ALIGN, os[1] * ALIGN, lo, hi, D, D1, BN,
    )  # fmt: skip


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def forward_pairs(
    q, k, v, o, matrix, qs, ks, vs, os, N, H, scale, ALIGN: tl.constexpr, D: tl.constexpr, D1: tl.constexpr,
    SAVE: tl.constexpr, BN: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """`head_forward` of first order of two heads. SAVE: the operators [B * H, D, D], for a backward."""
    at, h, head, lo, hi = place_pair(H, 1, N, longest(N), 1)
    _, scale = means(N, head, scale)
    q = at_head(q, qs, at, h, ALIGN)
    qn = qs[1] * ALIGN
    dtype: tl.constexpr = q.dtype.element_ty
    m, _ = pair_moments(
        q, at_head(k, ks, at, h, ALIGN), at_head(v, vs, at, h, ALIGN), qn, ks[1] * ALIGN, vs[1] * ALIGN, lo, hi, 1, D,
        D1, BN,
    )  # fmt: skip
    m = together(cast4(alone(m, scale, False, D, D1), dtype), cast4(alone(m, scale, True, D, D1), dtype))
    if SAVE:
        store_two(matrix + head * D * D, D * D, m, 1.0, D, D1, D, 1)
    pair_product(q, at_head(o, os, at, h, ALIGN), m, qn, os[1] * ALIGN, lo, hi, D, D1, BO)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def grads_pairs(
    k, v, g, dq, dk, dv, matrix, weights, ks, vs, gs, dqs, dks, dvs, N, H, PARTS, chunk, ALIGN: tl.constexpr,
    D: tl.constexpr, D1: tl.constexpr, KW: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """`split.apply_grads` of first order of two heads: neighbouring programs write dq = g M', dk = v WP', dv = k WP."""
    at, h, head, lo, hi = place_pair(H, PARTS, N, chunk, 3)
    matrix += head * D * D
    weights += head * KW
    part = tl.program_id(0) % 3
    if part == 0:
        m = turn(load_two(matrix, D * D, D, D1))
        g = at_head(g, gs, at, h, ALIGN)
        pair_product(g, at_head(dq, dqs, at, h, ALIGN), m, gs[1] * ALIGN, dqs[1] * ALIGN, lo, hi, D, D1, BN)
    elif part == 1:
        w = load_two(weights, KW, D, D1)
        v = at_head(v, vs, at, h, ALIGN)
        pair_product(v, at_head(dk, dks, at, h, ALIGN), w, vs[1] * ALIGN, dks[1] * ALIGN, lo, hi, D, D1, BN)
    else:
        w = turn(load_two(weights, KW, D, D1))
        k = at_head(k, ks, at, h, ALIGN)
        pair_product(k, at_head(dv, dvs, at, h, ALIGN), w, ks[1] * ALIGN, dvs[1] * ALIGN, lo, hi, D, D1, BN)
