"""The two passes of `ratio.sum_ratio` for wide heads, one by one, to fit in registers."""

import triton
import triton.language as tl

from ..tiles import load_rows, load_vec, power_of_two, scale4, trans4
from .extent import alive
from .ratio import (
    add_outer,
    against,
    begin_outer,
    end_outer,
    pull,
    query_gradient,
    readout_columns,
    total_of,
)
from .stores import get_ratio, put_ratio, store_tokens
from .sums import add_sum, begin_sum, end_sum
from .vectors import columns, reciprocal, times_vector


@triton.jit
def divide_queries(
    q, g, dq, qn, gn, dqn, lo, hi, m, m1, row, eps, ratio, WRITE: tl.constexpr, D: tl.constexpr, F1: tl.constexpr,
    F2: tl.constexpr, DV: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, BN: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """1 / den and d loss / d den of tokens lo..hi to ratio [*, 2]; WRITE: dq of the
    first order too. m1 is a pointer: read once a tile it holds no registers."""
    vector = load_vec(m1, D, F1, F2)
    dtype: tl.constexpr = q.dtype.element_ty
    mt, cols = readout_columns(trans4(m), (-eps * row[0], -eps * row[1]), dtype, D, F1, F2, V2)
    ones = columns(vector, dtype, F2)  # of v = 1; a product too, because loads that no product reads are not pipelined
    i = tl.arange(0, BN)
    zero = tl.full([], 0, tl.int64)
    for start in range(lo, hi[0], BN):
        live = alive(start + i, hi)
        tg = load_rows(g + (zero + start) * gn, i, gn, live, DV, V1, V2, False)
        tq = load_rows(q + (zero + start) * qn, i, qn, live, D, F1, F2, False)
        den = times_vector(tq, ones, F2) + eps
        f = (tq[0].to(tl.float32), tq[1].to(tl.float32))
        _, r, y = against(f, pull(tg, mt, cols, D, F1, F2, V2, PREC), dtype, D, F1, F2)
        inverse = reciprocal(den, live, dtype)
        d = -y * inverse
        put_ratio(ratio, start + i, live, inverse, d * inverse)
        if WRITE:
            gq = query_gradient(r, inverse, d, load_vec(m1, D, F1, F2), F2)
            store_tokens(dq + (zero + start) * dqn, i, dqn, live, gq, D, F1, F2)


@triton.jit
def sum_divided(
    q, g, qn, gn, lo, hi, m1, ratio, D: tl.constexpr, F1: tl.constexpr, F2: tl.constexpr, DV: tl.constexpr,
    V1: tl.constexpr, V2: tl.constexpr, BN: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Return dM' = Sum g (q / den)' and dm1 = Sum (d loss / d den) q over tokens lo..hi, from the ratio that
    `divide_queries` wrote."""
    dtype: tl.constexpr = q.dtype.element_ty
    unit = 1.0
    if dtype == tl.float16:  # 1 / den of a higher order is too small for float16
        unit = power_of_two(total_of(m1, F2))
    dm = begin_outer(V1, V2, F1, F2)
    dm1 = begin_sum(32, BN, F1, F2, True)
    i = tl.arange(0, BN)
    zero = tl.full([], 0, tl.int64)
    for start in range(lo, hi[0], BN):
        live = alive(start + i, hi)
        inverse, d = get_ratio(ratio, start + i, live)
        tg = load_rows(g + (zero + start) * gn, i, gn, live, DV, V1, V2, False)
        tq = load_rows(q + (zero + start) * qn, i, qn, live, D, F1, F2, False)
        f = (tq[0].to(tl.float32), tq[1].to(tl.float32))
        dm1 = add_sum(dm1, (f[0] * d[:, None], f[1] * d[:, None]), F2)
        over = (f[0] * inverse[:, None] * unit, f[1] * inverse[:, None] * unit)
        dm = add_outer(dm, tg, (over[0].to(dtype), over[1].to(dtype)), V2, F2, PREC)
    return scale4(end_outer(dm, V2), 1.0 / unit), end_sum(dm1, F1, F2, True)
