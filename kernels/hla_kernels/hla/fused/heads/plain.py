"""The backward of a higher order of the tokens as they are, in one launch: one program for everything of a head.

Its weights stay in shared memory, for the D x D algebra has float16 factors (`halves`); the tokens are read again from
L2.
"""

import triton
import triton.language as tl

from ..algebra import scale_moments
from ..loops import span, sum_moments, write_grads
from ..tiles import cast4, zeros2
from . import NO_SPECIALIZE, at_head
from .halves import half, half_moments, half_operator, half_weights


@triton.jit
def plain_gradient(
    q, k, v, g, qn, kn, vn, gn, N, scale, ridge, ORDER: tl.constexpr, RIDGE: tl.constexpr, D: tl.constexpr,
    F1: tl.constexpr, F2: tl.constexpr, DV: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, BN: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    """M' and the weights of a head, in the dtype of its tokens."""
    dtype: tl.constexpr = q.dtype.element_ty
    raw, sums, dm, _ = sum_moments(
        q, k, v, g, qn, kn, vn, gn, 0, N, ORDER, False, True, False, D, F1, F2, DV, V1, V2, BN, PREC
    )
    m = scale_moments(raw, sums, scale, N[1], ridge, ORDER, 0, False, RIDGE, F1, F2, V2)
    m, units = half_moments(m, ORDER, F2, V2)
    dm, unit = half(dm, V2, F2)
    mt, t = half_operator(m, units, ORDER, F2, V2)
    mt = cast4(mt, dtype)
    return mt, half_weights(m, units, t, dm, scale * unit, ORDER, F2, V2, dtype)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def plain_backward(
    q, k, v, g, dq, dk, dv, qs, ks, vs, gs, dqs, dks, dvs, N, H, G, scale, ridge, ORDER: tl.constexpr,
    RIDGE: tl.constexpr, ALIGN: tl.constexpr, D: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr, F1: tl.constexpr,
    F2: tl.constexpr, DV: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, BN: tl.constexpr, BO: tl.constexpr,
    LOOPS: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """dq, dk, dv of one head. LOOPS = 2: dq, then dk and dv, whose tiles take less shared memory than those of all
    three."""
    pid = tl.program_id(0)
    b = pid // H
    h = pid % H
    at, N, scale = span(N, b, pid, scale)
    q = at_head(q, qs, at, h, ALIGN)
    k = at_head(k, ks, at, h // G, ALIGN)
    v = at_head(v, vs, at, h // G, ALIGN)
    g = at_head(g, gs, at, h, ALIGN)
    qn, kn, vn, gn = qs[1] * ALIGN, ks[1] * ALIGN, vs[1] * ALIGN, gs[1] * ALIGN
    mt, w = plain_gradient(q, k, v, g, qn, kn, vn, gn, N, scale, ridge, ORDER, RIDGE, D, F1, F2, DV, V1, V2, BN, PREC)
    dq = at_head(dq, dqs, at, h, ALIGN)
    dk = at_head(dk, dks, at, h, ALIGN)
    dv = at_head(dv, dvs, at, h, ALIGN)
    dqn, dkn, dvn = dqs[1] * ALIGN, dks[1] * ALIGN, dvs[1] * ALIGN
    m1 = zeros2(F1, F2)
    rows = (m1, m1, zeros2(V1, V2))
    for part in tl.static_range(LOOPS):
        write_grads(
            q, k, v, g, dq, dk, dv, qn, kn, vn, gn, dqn, dkn, dvn, 0, N, mt, m1, 0, w, 1.0, rows, rows,
            0 if LOOPS == 1 else part + 1, ORDER, False, False, 0, D, R1, R2, F1, F2, DV, V1, V2, D, BO, PREC, 2,
        )  # fmt: skip
