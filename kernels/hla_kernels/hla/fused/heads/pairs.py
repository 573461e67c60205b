"""First order, two neighbouring heads per program (`loops.pairs`).

The forward saves its operator M, padded to AREA = (D1 + 2 E)**2 numbers (whole sectors) with the channels of a second
head in the order of `loops.pairs`, [B * H, AREA]. The backward sums only dM, over q and the gradients of o; its weights
are stored like M.
"""

import triton
import triton.language as tl

from ..loops import longest, means
from ..loops.pairs import alone, end_outer, pair_product, pair_sums, place_pair, together, turn
from ..tiles import cast4
from . import of_head
from .halves import get_matrix, put_matrix

NO_SPECIALIZE = ["qs", "ks", "vs", "os", "gs", "dqs", "dks", "dvs", "N", "H", "PARTS", "chunk", "scale"]


@triton.jit
def own_pair(N, H, scale):
    """`place_pair` of a program that takes all tokens of two heads, and the scale of their moments."""
    at, h, head, lo, hi = place_pair(H, 1, N, longest(N), 1)
    _, scale = means(N, head, scale)
    return at, h, head, lo, hi, scale


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def forward_pairs(
    q, k, v, o, matrix, qs, ks, vs, os, N, H, scale, ALIGN: tl.constexpr, W: tl.constexpr, AREA: tl.constexpr,
    SAVE: tl.constexpr, BN: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """Compute o = q M of two heads. SAVE: what a backward reads."""
    at, h, head, lo, hi, scale = own_pair(N, H, scale)
    q, k, v, qn, kn, vn = of_head((q, k, v), (qs, ks, vs), at, h, ALIGN)
    matrix += head * AREA
    p = pair_sums(k, v, kn, vn, lo, hi, W, BN)
    a, b = two_matrices(p, scale, q.dtype.element_ty, W)
    if SAVE:
        put_matrix(matrix, a, W)
        put_matrix(matrix + AREA, b, W)
    m = together(a, b)
    o, on = of_head((o,), (os,), at, h, ALIGN)
    pair_product(q, m, o, qn, on, lo, hi, W, BO)


@triton.jit
def two_matrices(m, scale, dtype: tl.constexpr, W: tl.constexpr):
    """Sums of two heads before `end_outer` times scale in a dtype."""
    m = end_outer(m)
    return cast4(alone(m, scale, False, W), dtype), cast4(alone(m, scale, True, W), dtype)


@triton.jit
def get_pair(ptr, step, W: tl.constexpr):
    """Return the padded matrices of two heads, `step` numbers apart."""
    return together(get_matrix(ptr, W), get_matrix(ptr + step, W))


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def backward_pairs(
    q, k, v, g, dq, dk, dv, matrix, qs, ks, vs, gs, dqs, dks, dvs, N, H, scale, ALIGN: tl.constexpr, W: tl.constexpr,
    AREA: tl.constexpr, BN: tl.constexpr, BO: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute dq, dk, dv of first order of two heads. STAGES: of the passes that write."""
    at, h, head, lo, hi, scale = own_pair(N, H, scale)
    q, g, qn, gn = of_head((q, g), (qs, gs), at, h, ALIGN)
    matrix += head * AREA
    dm = pair_sums(g, q, gn, qn, lo, hi, W, BN)
    a, b = two_matrices(dm, scale, q.dtype.element_ty, W)
    w = together(a, b)
    m = turn(get_pair(matrix, AREA, W))
    k, v, kn, vn = of_head((k, v), (ks, vs), at, h, ALIGN)
    dq, dk, dv, dqn, dkn, dvn = of_head((dq, dk, dv), (dqs, dks, dvs), at, h, ALIGN)
    pair_product(g, m, dq, gn, dqn, lo, hi, W, BO, STAGES)
    pair_product(v, w, dk, vn, dkn, lo, hi, W, BO, STAGES)
    w = turn(w)
    pair_product(k, w, dv, kn, dvn, lo, hi, W, BO, STAGES)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def weights_pairs(
    q, g, weights, qs, gs, N, H, scale, ALIGN: tl.constexpr, W: tl.constexpr, AREA: tl.constexpr, BN: tl.constexpr
):
    """Compute WP' of first order of two heads, for `grads_pairs`."""
    at, h, head, lo, hi, scale = own_pair(N, H, scale)
    q, g, qn, gn = of_head((q, g), (qs, gs), at, h, ALIGN)
    weights += head * AREA
    dm = pair_sums(g, q, gn, qn, lo, hi, W, BN)
    a, b = two_matrices(dm, scale, q.dtype.element_ty, W)
    put_matrix(weights, a, W)
    put_matrix(weights + AREA, b, W)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def grads_pairs(
    q, k, v, g, dq, dk, dv, matrix, weights, qs, ks, vs, gs, dqs, dks, dvs, N, H, PARTS, chunk, ALIGN: tl.constexpr,
    W: tl.constexpr, AREA: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Compute dq = g M', dk = v WP' and dv = k WP of one part of two heads by three neighbouring programs."""
    at, h, head, lo, hi = place_pair(H, PARTS, N, chunk, 3)
    k, v, g, kn, vn, gn = of_head((k, v, g), (ks, vs, gs), at, h, ALIGN)
    dq, dk, dv, dqn, dkn, dvn = of_head((dq, dk, dv), (dqs, dks, dvs), at, h, ALIGN)
    matrix += head * AREA
    weights += head * AREA
    role = tl.program_id(0) % 3
    if role == 0:
        pair_product(g, turn(get_pair(matrix, AREA, W)), dq, gn, dqn, lo, hi, W, BN)
    elif role == 1:
        pair_product(v, get_pair(weights, AREA, W), dk, vn, dkn, lo, hi, W, BN)
    else:
        pair_product(k, turn(get_pair(weights, AREA, W)), dv, kn, dvn, lo, hi, W, BN)
