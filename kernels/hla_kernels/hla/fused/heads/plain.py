"""Higher orders without options, forward and backward, with float16 factors (`halves`).

The forward saves its factors, 2 (D1 + D2)**2 bytes each. The backward then sums only dM, over q and the gradients of o,
and its D x D algebra reads factors from shared memory, as tensor cores require.
"""

import triton
import triton.language as tl

from ..algebra import scale_moments
from ..loops import gradient_sums, read_out, sum_gradient, sum_moments, write_grads
from ..maps import power_of_two
from ..tiles import cast4, store4, trans4, zeros2
from . import NO_SPECIALIZE, at_head, of_head, own_head, stagger
from .duo import put_sums
from .halves import (
    get_factors,
    get_matrix,
    half,
    half_moments,
    half_operator,
    half_sums,
    half_weight,
    largest_sum,
    loaded_operator,
    loaded_weights,
    put_factors,
    put_matrix,
    times,
)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def plain_forward(
    q, k, v, o, factors, units, qs, ks, vs, os, N, H, scale, ORDER: tl.constexpr, ALIGN: tl.constexpr, D: tl.constexpr,
    F1: tl.constexpr, F2: tl.constexpr, KF: tl.constexpr, SAVE: tl.constexpr, BN: tl.constexpr, BO: tl.constexpr,
    DELAY: tl.constexpr, SLOTS: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Compute o = q M of one head. SAVE: its factors go to factors [B * H, KF] and units [B * H, 4]."""
    pid = tl.program_id(0)
    stagger(pid, DELAY, SLOTS)
    head, h, at, N, scale = own_head(pid, N, H, scale)
    q, k, v, qn, kn, vn = of_head((q, k, v), (qs, ks, vs), at, h, ALIGN)
    raw, sums, _, _ = sum_moments(
        q, k, v, q, qn, kn, vn, qn, 0, N, ORDER, False, False, True, D, F1, F2, D, F1, F2, BN, PREC
    )
    m = scale_moments(raw, sums, scale, N[1], 0.0, ORDER, 0, False, False, F1, F2, F2)
    m, u = half_moments(m, ORDER, F2, F2)
    if SAVE:
        put_factors(factors + head * KF, units + head * 4, m, u, ORDER, F1, F2, D)
    t = m[1]
    if ORDER == 4:
        t = cast4(times(m[1], m[2], F2, F2, F2), tl.float16)
    mt = half_operator(m, u, t, ORDER, F2)
    mt = cast4(mt, q.dtype.element_ty)
    row = zeros2(F1, F2)
    o, on = at_head(o, os, at, h, ALIGN), os[1] * ALIGN
    read_out(
        q, o, qn, on, 0, N, trans4(mt), row, row, row, 0.0, 0.0, False, False, 0, D, F1, F2, D, F1, F2, BO, PREC,
    )  # fmt: skip


@triton.jit
def again(at, a, KEPT: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr):
    """Return a matrix as a float16 factor. With KEPT factors it goes through memory, so that tensor cores do not read
    it from registers (the assembler of Triton 3.6 is known to corrupt such operands)."""
    a = cast4(a, tl.float16)
    if KEPT:
        put_matrix(at, a, D1, D2)
        tl.debug_barrier()  # every thread reads what others wrote
        a = get_matrix(at, D1, D2)
    return a


@triton.jit
def plain_gradient(
    q, k, v, g, qn, kn, vn, gn, N, scale, factors, units, room, ORDER: tl.constexpr, KEPT: tl.constexpr,
    D: tl.constexpr, F1: tl.constexpr, F2: tl.constexpr, BN: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Return the arguments of `half_weight`: factors, their units, S W, dM', P dM' and the scale of a weight; room:
    memory for three matrices. Without KEPT, factors are summed again together with dM."""
    AREA: tl.constexpr = (F1 + F2) * (F1 + F2)
    if KEPT:
        dm, _ = gradient_sums(q, g, qn, gn, 0, N, False, D, F1, F2, D, F1, F2, BN, PREC)
        unit = power_of_two(0.125 * largest_sum(dm))
        put_sums(room, dm, 1.0 / unit, 0, D, F1)
        tl.debug_barrier()  # every thread reads what others wrote
        dm = get_matrix(room, F1, F2, D)
        m, u = get_factors(factors, units, ORDER, F1, F2, D)
    else:
        raw, sums, dm, _ = sum_moments(
            q, k, v, g, qn, kn, vn, gn, 0, N, ORDER, False, True, False, D, F1, F2, D, F1, F2, BN, PREC
        )
        m = scale_moments(raw, sums, scale, N[1], 0.0, ORDER, 0, False, False, F1, F2, F2)
        m, u, dm, unit = half_sums(m, dm, ORDER, F2)
    t = dm
    pd = dm
    if ORDER == 4:
        t = again(room + AREA, times(m[1], m[2], F2, F2, F2), KEPT, F1, F2)
        pd = again(room + 2 * AREA, times(m[0], dm, F2, F2, F2), KEPT, F1, F2)
    return m, u, t, dm, pd, scale * unit


@triton.constexpr_function
def which(i, loops, order):
    """PART of `write_grads` of the i-th of so many loops: first what reads the queries that were just summed and are in
    L2 still, dv of hla2 or dk of ahla, then dq, which reads the gradients of o that were, of ahla with dv, which reads
    the same keys."""
    if loops == 3:
        return (4, 1, 3)[i]
    if loops == 2 and order == 3:
        return (3, 5)[i]
    return 0 if loops == 1 else i + 1


@triton.jit
def plain_products(
    q, k, v, g, qn, kn, vn, gn, N, scale, factors, units, room, ORDER: tl.constexpr, KEPT: tl.constexpr,
    D: tl.constexpr, F1: tl.constexpr, F2: tl.constexpr, BN: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Return M' and the weights of `write_grads` in the dtype of the tokens, from what `plain_gradient` takes."""
    dtype: tl.constexpr = q.dtype.element_ty
    m, u, t, dm, pd, s = plain_gradient(
        q, k, v, g, qn, kn, vn, gn, N, scale, factors, units, room, ORDER, KEPT, D, F1, F2, BN, PREC
    )
    mt = cast4(half_operator(m, u, t, ORDER, F2), dtype)
    if ORDER == 2:
        wc = half_weight(m, u, t, dm, pd, s, 2, ORDER, F2, dtype)
        ws = half_weight(m, u, t, dm, pd, s, 1, ORDER, F2, dtype)
        w = (wc, ws, wc, ws, ws)
    elif ORDER == 3:
        wp = half_weight(m, u, t, dm, pd, s, 0, ORDER, F2, dtype)
        wr = half_weight(m, u, t, dm, pd, s, 3, ORDER, F2, dtype)
        w = (wp, wp, wp, wr, wr)
    else:
        wp = half_weight(m, u, t, dm, pd, s, 0, ORDER, F2, dtype)
        ws = half_weight(m, u, t, dm, pd, s, 1, ORDER, F2, dtype)
        ww = half_weight(m, u, t, dm, pd, s, 4, ORDER, F2, dtype)
        w = (wp, ws, wp, wp, ww)
    return mt, w


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def plain_backward(
    q, k, v, g, dq, dk, dv, factors, units, room, qs, ks, vs, gs, dqs, dks, dvs, N, H, scale, ORDER: tl.constexpr,
    ALIGN: tl.constexpr, D: tl.constexpr, F1: tl.constexpr, F2: tl.constexpr, KF: tl.constexpr, KR: tl.constexpr,
    KEPT: tl.constexpr, BN: tl.constexpr, BO: tl.constexpr, LOOPS: tl.constexpr,
    WRITE: tl.constexpr, DELAY: tl.constexpr, SLOTS: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Compute dq, dk, dv of one head in LOOPS passes (`which`), which need less shared memory than a single pass."""
    pid = tl.program_id(0)
    stagger(pid, DELAY, SLOTS)
    head, h, at, N, scale = own_head(pid, N, H, scale)
    q, k, v, g, qn, kn, vn, gn = of_head((q, k, v, g), (qs, ks, vs, gs), at, h, ALIGN)
    mt, w = plain_products(
        q, k, v, g, qn, kn, vn, gn, N, scale, factors + head * KF, units + head * 4, room + head * KR, ORDER, KEPT,
        D, F1, F2, BN, PREC,
    )  # fmt: skip
    dq, dk, dv, dqn, dkn, dvn = of_head((dq, dk, dv), (dqs, dks, dvs), at, h, ALIGN)
    m1 = zeros2(F1, F2)
    rows = (m1, m1, m1)
    for part in tl.static_range(LOOPS):
        write_grads(
            q, k, v, g, dq, dk, dv, qn, kn, vn, gn, dqn, dkn, dvn, 0, N, mt, m1, 0, w, 1.0, rows,
            which(part, LOOPS, ORDER), ORDER, False, False, 0, D, F1, F2, D, F1, F2, D, BO, PREC, WRITE,
        )  # fmt: skip


@triton.jit
def store_matrix(ptr, x, SA: tl.constexpr, SB: tl.constexpr):
    """Store a matrix of one block with strides (SA, SB)."""
    D: tl.constexpr = x.shape[0]
    store4(ptr, (x, x, x, x), D, D, 0, D, D, 0, SA, SB)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def plain_weights(
    q, g, factors, units, room, matrix, weights, qs, gs, N, H, scale, ORDER: tl.constexpr, ALIGN: tl.constexpr,
    D: tl.constexpr, F1: tl.constexpr, F2: tl.constexpr, KF: tl.constexpr, KR: tl.constexpr, WOFF: tl.constexpr,
    KW: tl.constexpr, BN: tl.constexpr, DELAY: tl.constexpr, SLOTS: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """`plain_backward` up to its last pass, left to `split.apply_grads`: for heads of many tokens. Two blocks of
    columns leave no registers for products without `room`."""
    pid = tl.program_id(0)
    stagger(pid, DELAY, SLOTS)
    head, h, at, N, scale = own_head(pid, N, H, scale)
    q, g, qn, gn = of_head((q, g), (qs, gs), at, h, ALIGN)
    factors += head * KF
    units += head * 4
    matrix += head * D * D
    weights += head * KW
    if F2 == 0:
        dm, _ = sum_gradient(q, g, qn, gn, 0, N, False, D, F1, F2, D, F1, F2, BN, PREC)
        m, u = get_factors(factors, units, ORDER, F1, F2, D)
        store_matrix(matrix, loaded_operator(m, u, ORDER), D, 1)
        dm, unit = half(dm, F2, F2)
        a, b, c = loaded_weights(m, u, dm[0], scale * unit, ORDER, weights.dtype.element_ty)
        store_matrix(weights + WOFF[2 if ORDER == 2 else 0], a, 1, D)
        store_matrix(weights + WOFF[3 if ORDER == 3 else 1], b, D, 1)
        if ORDER == 4:
            store_matrix(weights + WOFF[4], c, D, 1)
    else:
        m, u, t, dm, pd, s = plain_gradient(
            q, q, g, g, qn, qn, gn, gn, N, scale, factors, units, room + head * KR, ORDER, True, D, F1, F2, BN, PREC
        )
        dtype: tl.constexpr = q.dtype.element_ty
        store4(matrix, cast4(half_operator(m, u, t, ORDER, F2), dtype), D, F1, F2, D, F1, F2, 1, D)
        for name in tl.static_range(5):
            if (ORDER != 2 and name == 0) or (ORDER != 3 and name == 1) or name == (ORDER if ORDER > 2 else 2):
                w = half_weight(m, u, t, dm, pd, s, name, ORDER, F2, dtype)
                store4(weights + WOFF[name], w, D, F1, F2, D, F1, F2, D, 1)
