"""la, hla2, ahla and hla3 without feature map, two neighbouring heads per program (`loops.pairs`).

First order: the forward saves its operator M, padded, [B * H, AREA]. Higher orders: it saves the COUNT = 2 (hla3: 3)
factors of M (`duo`) [B * H, COUNT, D, D] with units [B * H, 4], and M [B * H, D, D] if the backward runs by pairs too.
The backward sums only dM, over q and the gradients of o. Weights are stored like M, one for first order, COUNT for
higher orders. Weights of ahla and hla3 do not fit for two heads: `split.apply_grads` writes their gradients.
"""

import triton
import triton.language as tl

from ..loops import longest, means
from ..loops.pairs import (
    alone,
    end_outer,
    largest_one,
    largest_two,
    pair_product,
    pair_sums,
    place_pair,
    together,
    turn,
)
from ..tiles import cast4
from . import of_head
from .duo import get_pair, natural_pair, operators, put_moment, put_natural, put_units, put_weights
from .halves import put_matrix

NO_SPECIALIZE = ["qs", "ks", "vs", "os", "gs", "dqs", "dks", "dvs", "N", "H", "PARTS", "chunk", "scale"]


@triton.jit
def own_pair(N, H, scale):
    """`place_pair` of a program that takes all tokens of two heads, and the scale of their moments."""
    at, h, head, lo, hi = place_pair(H, 1, N, longest(N), 1)
    _, scale = means(N, head, scale)
    return at, h, head, lo, hi, scale


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def forward_pairs(
    q, k, v, o, matrix, qs, ks, vs, os, N, H, scale, ALIGN: tl.constexpr, D: tl.constexpr, D1: tl.constexpr,
    AREA: tl.constexpr, SAVE: tl.constexpr, BN: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """Compute o = q M of two heads. SAVE: what a backward reads."""
    at, h, head, lo, hi, scale = own_pair(N, H, scale)
    q, k, v, qn, kn, vn = of_head((q, k, v), (qs, ks, vs), at, h, ALIGN)
    matrix += head * AREA
    p, _ = pair_sums(k, k, v, kn, kn, vn, lo, hi, 1, D, D1, BN)
    a, b = two_matrices(p, scale, q.dtype.element_ty, D, D1)
    if SAVE:
        put_matrix(matrix, a, D1, 2 * (D - D1))
        put_matrix(matrix + AREA, b, D1, 2 * (D - D1))
    m = together(a, b)
    o, on = of_head((o,), (os,), at, h, ALIGN)
    pair_product(q, m, q, m, o, qn, qn, on, lo, hi, False, 0, D, D1, BO)


@triton.jit
def two_matrices(m, scale, dtype: tl.constexpr, D: tl.constexpr, D1: tl.constexpr):
    """Sums of two heads before `end_outer` times scale in a dtype."""
    m = end_outer(m)
    return cast4(alone(m, scale, False, D, D1), dtype), cast4(alone(m, scale, True, D, D1), dtype)


@triton.jit
def get_weight(
    weights, I: tl.constexpr, ORDER: tl.constexpr, COUNT: tl.constexpr, D: tl.constexpr, D1: tl.constexpr,
    AREA: tl.constexpr,
):  # fmt: skip
    """One of the COUNT matrices of each head of a pair."""
    if ORDER == 1:
        out = get_pair(weights, AREA, D1, 2 * (D - D1))
    else:
        out = natural_pair(weights + I * D * D, COUNT * D * D, D, D1)
    return out


@triton.jit
def query_gradient(
    v, g, dq, vn, gn, on, lo, hi, matrix, w, PART: tl.constexpr, ORDER: tl.constexpr, COUNT: tl.constexpr,
    D: tl.constexpr, D1: tl.constexpr, AREA: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr = None,
):  # fmt: skip
    """Compute dq = g M', + v WC' of hla2."""
    m = turn(get_weight(matrix, 0, ORDER, 1, D, D1, AREA))
    if ORDER == 1:
        pair_product(g, m, g, m, dq, gn, gn, on, lo, hi, False, PART, D, D1, BN, STAGES)
    else:
        u = get_weight(w, 0, ORDER, COUNT, D, D1, AREA)
        pair_product(g, m, v, u, dq, gn, vn, on, lo, hi, True, PART, D, D1, BN, STAGES)


@triton.jit
def key_gradient(
    k, v, dk, kn, vn, on, lo, hi, w, ORDER: tl.constexpr, COUNT: tl.constexpr, D: tl.constexpr, D1: tl.constexpr,
    AREA: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr = None,
):  # fmt: skip
    """Compute dk = v WP', k WS of hla2."""
    m = get_weight(w, 1 if ORDER == 2 else 0, ORDER, COUNT, D, D1, AREA)
    if ORDER == 2:
        pair_product(k, m, k, m, dk, kn, kn, on, lo, hi, False, 0, D, D1, BN, STAGES)
    else:
        pair_product(v, m, v, m, dk, vn, vn, on, lo, hi, False, 0, D, D1, BN, STAGES)


@triton.jit
def value_gradient(
    q, k, dv, qn, kn, on, lo, hi, w, ORDER: tl.constexpr, COUNT: tl.constexpr, D: tl.constexpr, D1: tl.constexpr,
    AREA: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr = None,
):  # fmt: skip
    """Compute dv = k WP, q WC of hla2."""
    m = turn(get_weight(w, 0, ORDER, COUNT, D, D1, AREA))
    if ORDER == 2:
        pair_product(q, m, q, m, dv, qn, qn, on, lo, hi, False, 0, D, D1, BN, STAGES)
    else:
        pair_product(k, m, k, m, dv, kn, kn, on, lo, hi, False, 0, D, D1, BN, STAGES)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def backward_pairs(
    q, k, v, g, dq, dk, dv, matrix, qs, ks, vs, gs, dqs, dks, dvs, N, H, scale, ALIGN: tl.constexpr, D: tl.constexpr,
    D1: tl.constexpr, AREA: tl.constexpr, BN: tl.constexpr, BO: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute dq, dk, dv of first order of two heads. STAGES: of the passes that write."""
    at, h, head, lo, hi, scale = own_pair(N, H, scale)
    q, g, qn, gn = of_head((q, g), (qs, gs), at, h, ALIGN)
    matrix += head * AREA
    dm, _ = pair_sums(g, g, q, gn, gn, qn, lo, hi, 1, D, D1, BN)
    a, b = two_matrices(dm, scale, q.dtype.element_ty, D, D1)
    w = together(a, b)
    m = turn(get_pair(matrix, AREA, D1, 2 * (D - D1)))
    k, v, kn, vn = of_head((k, v), (ks, vs), at, h, ALIGN)
    dq, dk, dv, dqn, dkn, dvn = of_head((dq, dk, dv), (dqs, dks, dvs), at, h, ALIGN)
    pair_product(g, m, g, m, dq, gn, gn, dqn, lo, hi, False, 0, D, D1, BO, STAGES)
    pair_product(v, w, v, w, dk, vn, vn, dkn, lo, hi, False, 0, D, D1, BO, STAGES)
    w = turn(w)
    pair_product(k, w, k, w, dv, kn, kn, dvn, lo, hi, False, 0, D, D1, BO, STAGES)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def weights_pairs(
    q, g, weights, qs, gs, N, H, scale, ALIGN: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, AREA: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """Compute WP' of first order of two heads, for `grads_pairs`."""
    at, h, head, lo, hi, scale = own_pair(N, H, scale)
    q, g, qn, gn = of_head((q, g), (qs, gs), at, h, ALIGN)
    weights += head * AREA
    dm, _ = pair_sums(g, g, q, gn, gn, qn, lo, hi, 1, D, D1, BN)
    a, b = two_matrices(dm, scale, q.dtype.element_ty, D, D1)
    put_matrix(weights, a, D1, 2 * (D - D1))
    put_matrix(weights + AREA, b, D1, 2 * (D - D1))


@triton.jit
def put_factor(m, scale, to, units, COUNT: tl.constexpr, SQUARE: tl.constexpr, D: tl.constexpr, D1: tl.constexpr):
    """One of COUNT factors of two heads and its units."""
    put_units(units, put_moment(m, largest_one(m, D, D1), scale, to, COUNT * D * D, SQUARE, D, D1))


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def forward_higher(
    q, k, v, o, matrix, factors, units, room, qs, ks, vs, os, N, H, scale, ORDER: tl.constexpr, ALIGN: tl.constexpr,
    D: tl.constexpr, D1: tl.constexpr, COUNT: tl.constexpr, SAVE: tl.constexpr, BN: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """o = q M of two heads of higher order. SAVE: the operators too; the COUNT factors go through memory anyway, room
    [B * H, D, D] of hla3."""
    at, h, head, lo, hi, scale = own_pair(N, H, scale)
    q, k, v, qn, kn, vn = of_head((q, k, v), (qs, ks, vs), at, h, ALIGN)
    AREA: tl.constexpr = D * D
    factors += head * COUNT * AREA
    units += head * 4
    x, y = pair_sums(q, k, v, qn, kn, vn, lo, hi, ORDER, D, D1, BN)
    if ORDER == 4:  # no registers for the largest numbers of both at once
        put_factor(x, scale, factors, units, COUNT, False, D, D1)
        put_factor(y, scale, factors + AREA, units + 1, COUNT, True, D, D1)
        x, _ = pair_sums(q, q, q, qn, qn, qn, lo, hi, 5, D, D1, BN)
        put_factor(x, scale, factors + 2 * AREA, units + 2, COUNT, True, D, D1)
    else:
        x_big, y_big = largest_two(x, y, D, D1)
        put_units(units + 1, put_moment(y, y_big, scale, factors + AREA, COUNT * AREA, ORDER == 2, D, D1))
        put_units(units, put_moment(x, x_big, scale, factors, COUNT * AREA, False, D, D1))
    tl.debug_barrier()  # every thread reads what others wrote
    a, b = operators(factors, units, room + head * AREA, q.dtype.element_ty, ORDER, D, D1)
    if SAVE:
        matrix += head * AREA
        put_natural(matrix, a, 0, D, D1)
        put_natural(matrix + AREA, b, 1, D, D1)
    m = together(a, b)
    o, on = of_head((o,), (os,), at, h, ALIGN)
    pair_product(q, m, q, m, o, qn, qn, on, lo, hi, False, 0, D, D1, BO)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def weights_higher(
    q, g, factors, units, room, weights, qs, gs, N, H, scale, ORDER: tl.constexpr, ALIGN: tl.constexpr, D: tl.constexpr,
    D1: tl.constexpr, COUNT: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Compute the weights [B * H, COUNT, D, D] of two heads (`duo.put_weights`), for what writes gradients; room
    [B * H, 1 or of hla3 3, D, D]."""
    at, h, head, lo, hi, scale = own_pair(N, H, scale)
    q, g, qn, gn = of_head((q, g), (qs, gs), at, h, ALIGN)
    STEP: tl.constexpr = COUNT * D * D
    ROOM: tl.constexpr = 3 * D * D if ORDER == 4 else D * D
    factors += head * STEP
    units += head * 4
    room += head * ROOM
    weights += head * STEP
    dm, _ = pair_sums(g, g, q, gn, gn, qn, lo, hi, 1, D, D1, BN)
    ua, ub = put_moment(dm, largest_one(dm, D, D1), scale, room, ROOM, False, D, D1)
    tl.debug_barrier()  # every thread reads what others wrote
    put_weights(weights, room, ua, factors, units, 0, ORDER, D, D1)
    put_weights(weights + STEP, room + ROOM, ub, factors + STEP, units + 4, 1, ORDER, D, D1)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def grads_pairs(
    q, k, v, g, dq, dk, dv, matrix, weights, qs, ks, vs, gs, dqs, dks, dvs, N, H, PARTS, chunk, ORDER: tl.constexpr,
    ALIGN: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, AREA: tl.constexpr, COUNT: tl.constexpr,
    ROLES: tl.constexpr, BN: tl.constexpr, TWO: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    """dq, dk, dv of one part of two heads of first order or of hla2 from its weights, by ROLES neighbouring programs:
    dq of hla2, a sum of two products, by two of them."""
    at, h, head, lo, hi = place_pair(H, PARTS, N, chunk, ROLES)
    q, k, v, g, qn, kn, vn, gn = of_head((q, k, v, g), (qs, ks, vs, gs), at, h, ALIGN)
    dq, dk, dv, dqn, dkn, dvn = of_head((dq, dk, dv), (dqs, dks, dvs), at, h, ALIGN)
    SIZE: tl.constexpr = AREA if ORDER == 1 else D * D
    matrix += head * SIZE
    w = weights + head * COUNT * SIZE
    role = tl.program_id(0) % ROLES
    CUT: tl.constexpr = 1 if ORDER > 1 else 0
    FIRST: tl.constexpr = TWO if CUT else ONE
    if role == 0:
        query_gradient(v, g, dq, vn, gn, dqn, lo, hi, matrix, w, CUT, ORDER, COUNT, D, D1, AREA, BN, FIRST)
    elif role == ROLES - 1:
        value_gradient(q, k, dv, qn, kn, dvn, lo, hi, w, ORDER, COUNT, D, D1, AREA, BN, ONE)
    elif CUT and role == 1:
        query_gradient(v, g, dq, vn, gn, dqn, lo, hi, matrix, w, 2, ORDER, COUNT, D, D1, AREA, BN, FIRST)
    else:
        key_gradient(k, v, dk, kn, vn, dkn, lo, hi, w, ORDER, COUNT, D, D1, AREA, BN, ONE)
