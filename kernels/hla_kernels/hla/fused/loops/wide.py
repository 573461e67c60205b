"""The two passes of `ratio.sum_ratio` for wide heads, one by one, to fit in registers."""

import triton
import triton.language as tl

from ..tiles import load_rows, load_vec, power_of_two, scale4, trans4, zeros4
from .extent import alive
from .ratio import (
    add_outer,
    against,
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
    q, g, dq, qn, gn, dqn, lo, hi, m, m1, row, eps, ratio, WRITE: tl.constexpr, F: tl.constexpr, V: tl.constexpr,
    BN: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """1 / den and d loss / d den of tokens lo..hi to ratio [*, 2]; WRITE: dq of the
    first order too. m1 is a pointer: read once a tile it holds no registers."""
    vector = load_vec(m1, F)
    dtype: tl.constexpr = q.dtype.element_ty
    mt, cols = readout_columns(trans4(m), (-eps * row[0], -eps * row[1]), dtype, F, V)
    ones = columns(vector, dtype, F)  # of v = 1; a product too, because loads that no product reads are not pipelined
    i = tl.arange(0, BN)
    zero = tl.full([], 0, tl.int64)
    for start in range(lo, hi[0], BN):
        live = alive(start + i, hi)
        tg = load_rows(g + (zero + start) * gn, i, gn, live, V, False)
        tq = load_rows(q + (zero + start) * qn, i, qn, live, F, False)
        den = times_vector(tq, ones, F) + eps
        f = (tq[0].to(tl.float32), tq[1].to(tl.float32))
        _, r, y = against(f, pull(tg, mt, cols, F, V, PREC), dtype, F)
        inverse = reciprocal(den, live, dtype)
        d = -y * inverse
        put_ratio(ratio, start + i, live, inverse, d * inverse)
        if WRITE:
            gq = query_gradient(r, inverse, d, load_vec(m1, F), F)
            store_tokens(dq + (zero + start) * dqn, i, dqn, live, gq, F)


@triton.jit
def sum_divided(
    q, g, qn, gn, lo, hi, m1, ratio, F: tl.constexpr, V: tl.constexpr, BN: tl.constexpr, PREC: tl.constexpr
):
    """Return dM' = Sum g (q / den)' and dm1 = Sum (d loss / d den) q over tokens lo..hi, from the ratio that
    `divide_queries` wrote."""
    dtype: tl.constexpr = q.dtype.element_ty
    unit = 1.0
    if dtype == tl.float16:  # 1 / den of a higher order is too small for float16
        unit = power_of_two(total_of(m1, F))
    dm = zeros4(V, F)
    dm1 = begin_sum(32, BN, F, True)
    i = tl.arange(0, BN)
    zero = tl.full([], 0, tl.int64)
    for start in range(lo, hi[0], BN):
        live = alive(start + i, hi)
        inverse, d = get_ratio(ratio, start + i, live)
        tg = load_rows(g + (zero + start) * gn, i, gn, live, V, False)
        tq = load_rows(q + (zero + start) * qn, i, qn, live, F, False)
        f = (tq[0].to(tl.float32), tq[1].to(tl.float32))
        dm1 = add_sum(dm1, (f[0] * d[:, None], f[1] * d[:, None]), F)
        over = (f[0] * inverse[:, None] * unit, f[1] * inverse[:, None] * unit)
        dm = add_outer(dm, tg, (over[0].to(dtype), over[1].to(dtype)), V, F, PREC)
    return scale4(dm, 1.0 / unit), end_sum(dm1, F, True)
