"""Kernels of two neighbouring heads a program (`loops.pairs`): la, hla2 and ahla of the tokens as they are.

The forward of first order keeps its operator M, padded, [B * H, AREA], that of the others the factors of it (`duo`)
[B * H, 2, D, D] with units [B * H, 4], and M [B * H, D, D] where the backward is one of pairs too; the backward sums dM
alone over q and the gradients of o. Weights are kept as M is, one of first order, two of the others.
"""

import triton
import triton.language as tl

from ..loops import longest, means
from ..loops.pairs import alone, pair_factors, pair_outer, pair_product, place_pair, together, turn
from ..tiles import cast4
from . import at_head
from .duo import get_pair, half_own, natural_pair, operator_of, put_moment, put_natural, put_weights
from .halves import put_matrix

NO_SPECIALIZE = ["qs", "ks", "vs", "os", "gs", "dqs", "dks", "dvs", "N", "H", "PARTS", "chunk", "scale"]


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def forward_pairs(
    q, k, v, o, matrix, qs, ks, vs, os, N, H, scale, ALIGN: tl.constexpr, D: tl.constexpr, D1: tl.constexpr,
    AREA: tl.constexpr, SAVE: tl.constexpr, BN: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """o = q M of two heads. SAVE: what a backward reads."""
    at, h, head, lo, hi = place_pair(H, 1, N, longest(N), 1)
    _, scale = means(N, head, scale)
    q = at_head(q, qs, at, h, ALIGN)
    k = at_head(k, ks, at, h, ALIGN)
    v = at_head(v, vs, at, h, ALIGN)
    qn, kn, vn = qs[1] * ALIGN, ks[1] * ALIGN, vs[1] * ALIGN
    matrix += head * AREA
    p, _ = pair_outer(k, v, kn, vn, lo, hi, D, D1, BN)
    a, b = two_matrices(p, scale, q.dtype.element_ty, D, D1)
    if SAVE:
        put_matrix(matrix, a, D1, 2 * (D - D1))
        put_matrix(matrix + AREA, b, D1, 2 * (D - D1))
    m = together(a, b)
    o = at_head(o, os, at, h, ALIGN)
    pair_product(q, m, q, m, o, qn, qn, os[1] * ALIGN, lo, hi, False, 0, D, D1, BO)


@triton.jit
def two_matrices(m, scale, dtype: tl.constexpr, D: tl.constexpr, D1: tl.constexpr):
    """Sums of two heads times scale in a dtype."""
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
    k, v, g, dq, kn, vn, gn, on, lo, hi, matrix, w, PART: tl.constexpr, ORDER: tl.constexpr, COUNT: tl.constexpr,
    D: tl.constexpr, D1: tl.constexpr, AREA: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr = None,
):  # fmt: skip
    """dq = g M', + v WC' of hla2, + k WR' of ahla."""
    m = turn(get_weight(matrix, 0, ORDER, 1, D, D1, AREA))
    if ORDER == 1:
        pair_product(g, m, g, m, dq, gn, gn, on, lo, hi, False, PART, D, D1, BN, STAGES)
    elif ORDER == 2:
        u = get_weight(w, 0, ORDER, COUNT, D, D1, AREA)
        pair_product(g, m, v, u, dq, gn, vn, on, lo, hi, True, PART, D, D1, BN, STAGES)
    else:
        u = turn(get_weight(w, 1, ORDER, COUNT, D, D1, AREA))
        pair_product(g, m, k, u, dq, gn, kn, on, lo, hi, True, PART, D, D1, BN, STAGES)


@triton.jit
def key_gradient(
    q, k, v, dk, qn, kn, vn, on, lo, hi, w, PART: tl.constexpr, ORDER: tl.constexpr, COUNT: tl.constexpr,
    D: tl.constexpr, D1: tl.constexpr, AREA: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr = None,
):  # fmt: skip
    """dk = v WP', k WS of hla2; + q WR of ahla."""
    m = get_weight(w, 1 if ORDER == 2 else 0, ORDER, COUNT, D, D1, AREA)
    if ORDER == 2:
        pair_product(k, m, k, m, dk, kn, kn, on, lo, hi, False, PART, D, D1, BN, STAGES)
    else:
        if ORDER == 1:
            pair_product(v, m, v, m, dk, vn, vn, on, lo, hi, False, PART, D, D1, BN, STAGES)
        else:
            u = get_weight(w, 1, ORDER, COUNT, D, D1, AREA)
            pair_product(v, m, q, u, dk, vn, qn, on, lo, hi, True, PART, D, D1, BN, STAGES)


@triton.jit
def value_gradient(
    q, k, dv, qn, kn, on, lo, hi, w, ORDER: tl.constexpr, COUNT: tl.constexpr, D: tl.constexpr, D1: tl.constexpr,
    AREA: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr = None,
):  # fmt: skip
    """dv = k WP, q WC of hla2."""
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
    """dq, dk, dv of first order of two heads. STAGES: of the passes that write."""
    at, h, head, lo, hi = place_pair(H, 1, N, longest(N), 1)
    _, scale = means(N, head, scale)
    q = at_head(q, qs, at, h, ALIGN)
    g = at_head(g, gs, at, h, ALIGN)
    qn, gn = qs[1] * ALIGN, gs[1] * ALIGN
    matrix += head * AREA
    dm, _ = pair_outer(g, q, gn, qn, lo, hi, D, D1, BN)
    a, b = two_matrices(dm, scale, q.dtype.element_ty, D, D1)
    w = together(a, b)
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
    q, g, weights, qs, gs, N, H, scale, ALIGN: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, AREA: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """WP' of first order of two heads, for `grads_pairs`."""
    at, h, head, lo, hi = place_pair(H, 1, N, longest(N), 1)
    _, scale = means(N, head, scale)
    q = at_head(q, qs, at, h, ALIGN)
    g = at_head(g, gs, at, h, ALIGN)
    weights += head * AREA
    dm, _ = pair_outer(g, q, gs[1] * ALIGN, qs[1] * ALIGN, lo, hi, D, D1, BN)
    a, b = two_matrices(dm, scale, q.dtype.element_ty, D, D1)
    put_matrix(weights, a, D1, 2 * (D - D1))
    put_matrix(weights + AREA, b, D1, 2 * (D - D1))


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def forward_higher(
    q, k, v, o, matrix, factors, units, qs, ks, vs, os, N, H, scale, ORDER: tl.constexpr, ALIGN: tl.constexpr,
    D: tl.constexpr, D1: tl.constexpr, SAVE: tl.constexpr, BN: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """o = q M of two heads of hla2 or ahla. SAVE: the operators too; the factors go through memory anyway."""
    at, h, head, lo, hi = place_pair(H, 1, N, longest(N), 1)
    _, scale = means(N, head, scale)
    q = at_head(q, qs, at, h, ALIGN)
    k = at_head(k, ks, at, h, ALIGN)
    v = at_head(v, vs, at, h, ALIGN)
    qn, kn, vn = qs[1] * ALIGN, ks[1] * ALIGN, vs[1] * ALIGN
    dtype: tl.constexpr = q.dtype.element_ty
    AREA: tl.constexpr = D * D
    factors += head * 2 * AREA
    units += head * 4
    x, y = pair_factors(q, k, v, qn, kn, vn, lo, hi, ORDER, D, D1, BN)
    put_moment(y[0], y[1], scale, factors + AREA, 2 * AREA, units + 1, ORDER == 3, D, D1)
    put_moment(x[0], x[1], scale, factors, 2 * AREA, units, False, D, D1)
    tl.debug_barrier()  # every thread reads what others wrote
    a = operator_of(factors, units, 0, dtype, D, D1)
    b = operator_of(factors + 2 * AREA, units + 4, 1, dtype, D, D1)
    if SAVE:
        matrix += head * AREA
        put_natural(matrix, a, 0, D, D1)
        put_natural(matrix + AREA, b, 1, D, D1)
    m = together(a, b)
    o = at_head(o, os, at, h, ALIGN)
    pair_product(q, m, q, m, o, qn, qn, os[1] * ALIGN, lo, hi, False, 0, D, D1, BO)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def weights_higher(
    q, g, factors, units, room, weights, qs, gs, N, H, scale, ORDER: tl.constexpr, ALIGN: tl.constexpr, D: tl.constexpr,
    D1: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The weights [B * H, 2, D, D] of two heads, WC', WS of hla2 or WP', WR' of ahla, for `grads_pairs`; room
    [B * H, D, D]."""
    at, h, head, lo, hi = place_pair(H, 1, N, longest(N), 1)
    _, scale = means(N, head, scale)
    q = at_head(q, qs, at, h, ALIGN)
    g = at_head(g, gs, at, h, ALIGN)
    AREA: tl.constexpr = D * D
    factors += head * 2 * AREA
    units += head * 4
    room += head * AREA
    weights += head * 2 * AREA
    dm, big = pair_outer(g, q, gs[1] * ALIGN, qs[1] * ALIGN, lo, hi, D, D1, BN)
    x, ua = half_own(dm, scale, big[0], False, D, D1)
    put_natural(room, x, 0, D, D1)
    x, ub = half_own(dm, scale, big[1], True, D, D1)
    put_natural(room + AREA, x, 1, D, D1)
    tl.debug_barrier()  # every thread reads what others wrote
    put_weights(weights, room, ua, factors, units, 0, ORDER, D, D1)
    put_weights(weights + 2 * AREA, room + AREA, ub, factors + 2 * AREA, units + 4, 1, ORDER, D, D1)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def grads_pairs(
    q, k, v, g, dq, dk, dv, matrix, weights, qs, ks, vs, gs, dqs, dks, dvs, N, H, PARTS, chunk, ORDER: tl.constexpr,
    ALIGN: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, AREA: tl.constexpr, COUNT: tl.constexpr,
    ROLES: tl.constexpr, BN: tl.constexpr, TWO: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    """dq, dk, dv of one part of two heads from its weights, by ROLES neighbouring programs: a gradient of two
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
    SIZE: tl.constexpr = AREA if ORDER == 1 else D * D
    matrix += head * SIZE
    w = weights + head * COUNT * SIZE
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
