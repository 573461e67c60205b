"""The two passes of `ratio.sum_ratio` for wide heads, one by one, to fit in registers."""

import triton
import triton.language as tl

from ..maps import is_shifted, ones2, phi32, power_of_two
from ..tiles import axpy2, load_rows, load_vec, rank1, rowdot, scale4, trans4
from .extent import alive
from .ratio import (
    add_outer,
    against,
    begin_outer,
    end_outer,
    pull,
    query_gradient,
    ratio_base,
    readout_columns,
)
from .stores import get_ratio, put_ratio, store_tokens
from .sums import add_sum, add_total, begin_sum, begin_total, end_sum, end_total
from .vectors import as_row, columns, reciprocal, times_vector


@triton.jit
def divide_queries(
    q, g, dq, qn, gn, dqn, lo, hi, m, m1, row, eps, ratio, WRITE: tl.constexpr, FMAP: tl.constexpr, D: tl.constexpr,
    F1: tl.constexpr, F2: tl.constexpr, DV: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, BN: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    """1 / den and d loss / d den of tokens lo..hi to ratio [*, 2]; WRITE: dq of the
    first order too. m1 is a pointer: read once a tile it holds no registers."""
    vector = load_vec(m1, D, F1, F2)
    base, e = ratio_base(m, vector, row, eps, D, is_shifted(FMAP), F1, F2, V2)
    dtype: tl.constexpr = q.dtype.element_ty
    mt, cols = readout_columns(trans4(m), base, dtype, D, F1, F2, V2)
    ones = columns(vector, dtype, F2)  # of v = 1; a product too, because loads that no product reads are not pipelined
    i = tl.arange(0, BN)
    zero = tl.full([], 0, tl.int64)
    for start in range(lo, hi[0], BN):
        live = alive(start + i, hi)
        tg = load_rows(g + (zero + start) * gn, i, gn, live, DV, V1, V2, False)
        tq = load_rows(q + (zero + start) * qn, i, qn, live, D, F1, F2, False)
        f = phi32(tq, live, FMAP, D, F1, F2)
        den = times_vector((f[0].to(dtype), f[1].to(dtype)), ones, F2) + e
        f, r, y = against(f, pull(tg, mt, cols, D, F1, F2, V2, PREC), dtype, D, F1, F2)
        inverse = reciprocal(den, live, dtype)
        d = -y * inverse
        put_ratio(ratio, start + i, live, inverse, d * inverse)
        if WRITE:
            gq = query_gradient(f, r, inverse, d, load_vec(m1, D, F1, F2), FMAP, F2)
            store_tokens(dq + (zero + start) * dqn, i, dqn, live, gq, D, F1, F2)


@triton.jit
def sum_divided(
    q, g, qn, gn, lo, hi, m1, eps, ratio, FMAP: tl.constexpr, D: tl.constexpr, F1: tl.constexpr, F2: tl.constexpr,
    DV: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, BN: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Return dM' = Sum g (phi(q) / den)' and dm1 = Sum (d loss / d den) phi(q) over tokens lo..hi, from the ratio that
    `divide_queries` wrote; c of `ratio.sum_ratio` is taken off before phi(q) / den is rounded."""
    SHIFTED: tl.constexpr = is_shifted(FMAP)
    dtype: tl.constexpr = q.dtype.element_ty
    one = ones2(D, F1, F2)
    unit = 1.0
    if dtype == tl.float16:  # 1 / den of a higher order is too small for float16
        unit = power_of_two(tl.sum(rowdot(as_row((tl.abs(m1[0]), tl.abs(m1[1]))), as_row(one), F2)))
    c = 0.0
    if SHIFTED:
        e = tl.sum(rowdot(as_row(one), as_row(m1), F2)) + eps
        c = tl.where(e == 0.0, 0.0, 1.0 / e)
    dm = begin_outer(V1, V2, F1, F2)
    dm1 = begin_sum(32, BN, F1, F2, True)
    sg = begin_total(dtype, BN, V1, V2, SHIFTED)
    sd = tl.zeros([BN], tl.float32)
    i = tl.arange(0, BN)
    zero = tl.full([], 0, tl.int64)
    for start in range(lo, hi[0], BN):
        live = alive(start + i, hi)
        inverse, d = get_ratio(ratio, start + i, live)
        tg = load_rows(g + (zero + start) * gn, i, gn, live, DV, V1, V2, False)
        tq = load_rows(q + (zero + start) * qn, i, qn, live, D, F1, F2, False)
        f = phi32(tq, live, FMAP, D, F1, F2)
        dm1 = add_sum(dm1, (f[0] * d[:, None], f[1] * d[:, None]), F2)
        more = (inverse - c if SHIFTED else inverse * 0.0)[:, None]
        over = ((f[0] * inverse[:, None] + more) * unit, (f[1] * inverse[:, None] + more) * unit)
        dm = add_outer(dm, tg, (over[0].to(dtype), over[1].to(dtype)), V2, F2, PREC)
        if SHIFTED:
            sg = add_total(sg, tg, V2, True)
            sd += d
    dm = scale4(end_outer(dm, V2), 1.0 / unit)
    dm1 = end_sum(dm1, F1, F2, True)
    if SHIFTED:
        total = end_total(sg, dtype, V1, V2, True)
        dm = rank1(dm, (total[0] * c, total[1] * c), one, V2, F2)
        dm1 = axpy2(dm1, tl.sum(sd), one, F2)
    return dm, dm1
