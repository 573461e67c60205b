"""Kernels of two neighbouring heads a program (`loops.pairs`): la, hla2 and ahla of the tokens as they are.

The forward keeps its operator M and the two factors of it (`duo`; first order has none), so that the backward sums dM
alone over q and the gradients of o. Buffers: matrix [B * H, AREA], factors [B * H, 2, AREA], units [B * H, 4], of
which two are used, weights [B * H, COUNT, AREA] (2, of first order 1) and room [B * H, AREA].
"""

import triton
import triton.language as tl

from ..loops import longest, means
from ..loops.pairs import alone, pair_gradient, pair_moments, pair_product, place_pair, together, turn
from ..tiles import cast4
from . import at_head
from .duo import get_pair, put_operators, two_weights
from .halves import put_matrix

NO_SPECIALIZE = ["qs", "ks", "vs", "os", "gs", "dqs", "dks", "dvs", "N", "H", "PARTS", "chunk", "scale"]


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def forward_pairs(
    q, k, v, o, matrix, factors, units, qs, ks, vs, os, N, H, scale, ORDER: tl.constexpr, ALIGN: tl.constexpr,
    D: tl.constexpr, D1: tl.constexpr, AREA: tl.constexpr, SAVE: tl.constexpr, BN: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """o = q M of two heads. SAVE: what a backward reads."""
    at, h, head, lo, hi = place_pair(H, 1, N, longest(N), 1)
    _, scale = means(N, head, scale)
    q = at_head(q, qs, at, h, ALIGN)
    k = at_head(k, ks, at, h, ALIGN)
    v = at_head(v, vs, at, h, ALIGN)
    qn, kn, vn = qs[1] * ALIGN, ks[1] * ALIGN, vs[1] * ALIGN
    D2: tl.constexpr = 2 * (D - D1)
    dtype: tl.constexpr = q.dtype.element_ty
    matrix += head * AREA
    x, y, big = pair_moments(q, k, v, qn, kn, vn, lo, hi, ORDER, D, D1, BN)
    if ORDER == 1:
        a = cast4(alone(x, scale, False, D, D1), dtype)
        b = cast4(alone(x, scale, True, D, D1), dtype)
        if SAVE:
            put_matrix(matrix, a, D1, D2)
            put_matrix(matrix + AREA, b, D1, D2)
        m = together(a, b)
    else:
        put_operators(x, y, big, scale, matrix, factors + head * 2 * AREA, units + head * 4, SAVE, dtype, D, D1, AREA)
        tl.debug_barrier()  # every thread reads what others wrote
        m = get_pair(matrix, AREA, D1, D2)
    o = at_head(o, os, at, h, ALIGN)
    pair_product(q, m, q, m, o, qn, qn, os[1] * ALIGN, lo, hi, False, 0, D, D1, BO)


@triton.jit
def get_weight(weights, I: tl.constexpr, COUNT: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, AREA: tl.constexpr):
    """One of the COUNT weights of each head of a pair."""
    return get_pair(weights + I * AREA, COUNT * AREA, D1, 2 * (D - D1))


@triton.jit
def query_gradient(
    k, v, g, dq, kn, vn, gn, on, lo, hi, matrix, w, PART: tl.constexpr, ORDER: tl.constexpr, COUNT: tl.constexpr,
    D: tl.constexpr, D1: tl.constexpr, AREA: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr = None,
):  # fmt: skip
    """dq = g M', + v WC' of hla2, + k WR' of ahla."""
    m = turn(get_pair(matrix, AREA, D1, 2 * (D - D1)))
    if ORDER == 1:
        pair_product(g, m, g, m, dq, gn, gn, on, lo, hi, False, PART, D, D1, BN, STAGES)
    elif ORDER == 2:
        u = get_weight(w, 0, COUNT, D, D1, AREA)
        pair_product(g, m, v, u, dq, gn, vn, on, lo, hi, True, PART, D, D1, BN, STAGES)
    else:
        u = turn(get_weight(w, 1, COUNT, D, D1, AREA))
        pair_product(g, m, k, u, dq, gn, kn, on, lo, hi, True, PART, D, D1, BN, STAGES)


@triton.jit
def key_gradient(
    q, k, v, dk, qn, kn, vn, on, lo, hi, w, PART: tl.constexpr, ORDER: tl.constexpr, COUNT: tl.constexpr,
    D: tl.constexpr, D1: tl.constexpr, AREA: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr = None,
):  # fmt: skip
    """dk = v WP', k WS of hla2; + q WR of ahla."""
    if ORDER == 2:
        m = get_weight(w, 1, COUNT, D, D1, AREA)
        pair_product(k, m, k, m, dk, kn, kn, on, lo, hi, False, PART, D, D1, BN, STAGES)
    else:
        m = get_weight(w, 0, COUNT, D, D1, AREA)
        if ORDER == 1:
            pair_product(v, m, v, m, dk, vn, vn, on, lo, hi, False, PART, D, D1, BN, STAGES)
        else:
            u = get_weight(w, 1, COUNT, D, D1, AREA)
            pair_product(v, m, q, u, dk, vn, qn, on, lo, hi, True, PART, D, D1, BN, STAGES)


@triton.jit
def value_gradient(
    q, k, dv, qn, kn, on, lo, hi, w, ORDER: tl.constexpr, COUNT: tl.constexpr, D: tl.constexpr, D1: tl.constexpr,
    AREA: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr = None,
):  # fmt: skip
    """dv = k WP, q WC of hla2."""
    m = turn(get_weight(w, 0, COUNT, D, D1, AREA))
    if ORDER == 2:
        pair_product(q, m, q, m, dv, qn, qn, on, lo, hi, False, 0, D, D1, BN, STAGES)
    else:
        pair_product(k, m, k, m, dv, kn, kn, on, lo, hi, False, 0, D, D1, BN, STAGES)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def backward_pairs(
    q, k, v, g, dq, dk, dv, matrix, qs, ks, vs, gs, dqs, dks, dvs, N, H, scale, ALIGN: tl.constexpr, D: tl.constexpr,
    D1: tl.constexpr, AREA: tl.constexpr, BN: tl.constexpr, BO: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dq, dk, dv of first order of two heads. STAGES: of the passes that write."""
    at, h, head, lo, hi = place_pair(H, 1, N, longest(N), 1)
    _, scale = means(N, head, scale)
    q = at_head(q, qs, at, h, ALIGN)
    g = at_head(g, gs, at, h, ALIGN)
    qn, gn = qs[1] * ALIGN, gs[1] * ALIGN
    matrix += head * AREA
    dtype: tl.constexpr = q.dtype.element_ty
    dm, _ = pair_gradient(q, g, qn, gn, lo, hi, D, D1, BN)
    a = cast4(alone(dm, scale, False, D, D1), dtype)
    w = together(a, cast4(alone(dm, scale, True, D, D1), dtype))
    m = turn(get_pair(matrix, AREA, D1, 2 * (D - D1)))
    k = at_head(k, ks, at, h, ALIGN)
    v = at_head(v, vs, at, h, ALIGN)
    dq = at_head(dq, dqs, at, h, ALIGN)
    dk = at_head(dk, dks, at, h, ALIGN)
    dv = at_head(dv, dvs, at, h, ALIGN)
    kn, vn, dqn, dkn, dvn = ks[1] * ALIGN, vs[1] * ALIGN, dqs[1] * ALIGN, dks[1] * ALIGN, dvs[1] * ALIGN
    pair_product(g, m, g, m, dq, gn, gn, dqn, lo, hi, False, 0, D, D1, BO, STAGES)
    pair_product(v, w, v, w, dk, vn, vn, dkn, lo, hi, False, 0, D, D1, BO, STAGES)
    w = turn(w)
    pair_product(k, w, k, w, dv, kn, kn, dvn, lo, hi, False, 0, D, D1, BO, STAGES)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def weights_pairs(
    q, g, factors, units, room, weights, qs, gs, N, H, scale, ORDER: tl.constexpr, ALIGN: tl.constexpr, D: tl.constexpr,
    D1: tl.constexpr, AREA: tl.constexpr, COUNT: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The weights of two heads, for `grads_pairs`: `duo.put_weights`, of first order WP'."""
    at, h, head, lo, hi = place_pair(H, 1, N, longest(N), 1)
    _, scale = means(N, head, scale)
    q = at_head(q, qs, at, h, ALIGN)
    g = at_head(g, gs, at, h, ALIGN)
    qn, gn = qs[1] * ALIGN, gs[1] * ALIGN
    factors += head * 2 * AREA
    units += head * 4
    room += head * AREA
    weights += head * COUNT * AREA
    dtype: tl.constexpr = q.dtype.element_ty
    dm, big = pair_gradient(q, g, qn, gn, lo, hi, D, D1, BN)
    if ORDER == 1:
        put_matrix(weights, cast4(alone(dm, scale, False, D, D1), dtype), D1, 2 * (D - D1))
        put_matrix(weights + AREA, cast4(alone(dm, scale, True, D, D1), dtype), D1, 2 * (D - D1))
    else:
        two_weights(weights, room, dm, big, scale, factors, units, ORDER, dtype, D, D1, AREA)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def grads_pairs(
    q, k, v, g, dq, dk, dv, matrix, weights, qs, ks, vs, gs, dqs, dks, dvs, N, H, PARTS, chunk, ORDER: tl.constexpr,
    ALIGN: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, AREA: tl.constexpr, COUNT: tl.constexpr,
    ROLES: tl.constexpr, BN: tl.constexpr, TWO: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    """dq, dk, dv of one part of two heads from `weights_pairs`, by ROLES neighbouring programs: a gradient of two
    weights by two of them, a gradient of one weight by one."""
    at, h, head, lo, hi = place_pair(H, PARTS, N, chunk, ROLES)
    q = at_head(q, qs, at, h, ALIGN)
    k = at_head(k, ks, at, h, ALIGN)
    v = at_head(v, vs, at, h, ALIGN)
    g = at_head(g, gs, at, h, ALIGN)
    dq = at_head(dq, dqs, at, h, ALIGN)
    dk = at_head(dk, dks, at, h, ALIGN)
    dv = at_head(dv, dvs, at, h, ALIGN)
    qn, kn, vn, gn = qs[1] * ALIGN, ks[1] * ALIGN, vs[1] * ALIGN, gs[1] * ALIGN
    dqn, dkn, dvn = dqs[1] * ALIGN, dks[1] * ALIGN, dvs[1] * ALIGN
    matrix += head * AREA
    w = weights + head * COUNT * AREA
    role = tl.program_id(0) % ROLES
    CUT: tl.constexpr = 1 if ORDER > 1 else 0
    KEYS: tl.constexpr = 1 if ORDER > 2 else 0
    FIRST: tl.constexpr = TWO if CUT else ONE
    SECOND: tl.constexpr = TWO if KEYS else ONE
    if role == 0:
        query_gradient(k, v, g, dq, kn, vn, gn, dqn, lo, hi, matrix, w, CUT, ORDER, COUNT, D, D1, AREA, BN, FIRST)
    elif role == ROLES - 1:
        value_gradient(q, k, dv, qn, kn, dvn, lo, hi, w, ORDER, COUNT, D, D1, AREA, BN, ONE)
    elif CUT and role == 1:
        query_gradient(k, v, g, dq, kn, vn, gn, dqn, lo, hi, matrix, w, 2, ORDER, COUNT, D, D1, AREA, BN, FIRST)
    elif KEYS and role == 2:
        key_gradient(q, k, v, dk, qn, kn, vn, dkn, lo, hi, w, 2, ORDER, COUNT, D, D1, AREA, BN, SECOND)
    else:
        key_gradient(q, k, v, dk, qn, kn, vn, dkn, lo, hi, w, KEYS, ORDER, COUNT, D, D1, AREA, BN, SECOND)
