"""Sums and products with one vector by the matrix units, instead of by reductions across threads.

bfloat16 features: a float32 vector is two columns, its rounding and what that left, or three (EXACT). float32 features,
and float16, which lacks the exponents: elementwise.
"""

import triton
import triton.language as tl

from ...hla.fused.loops.sums import add_sum, begin_sum, end_sum
from ...hla.fused.loops.writes import as_row
from ...hla.fused.tiles import rowdot


@triton.jit
def column(x, EXACT: tl.constexpr):
    """x [K] as a bfloat16 matrix [K, 16] whose rows sum to x."""
    high = x.to(tl.bfloat16)
    left = x - high.to(tl.float32)
    low = left.to(tl.bfloat16)
    c = tl.arange(0, 16)[None, :]
    zero = tl.zeros([x.shape[0], 16], tl.bfloat16)
    if EXACT:
        zero = tl.where(c == 2, (left - low.to(tl.float32)).to(tl.bfloat16)[:, None], zero)
    return tl.where(c == 0, high[:, None], tl.where(c == 1, low[:, None], zero))


@triton.jit
def columns(x, dtype: tl.constexpr, D2: tl.constexpr, EXACT: tl.constexpr):
    """`column` of both parts of a vector, or the vector; dtype: that of the features that it meets."""
    out = x
    if dtype == tl.bfloat16:
        c1 = column(x[0], EXACT)
        c2 = c1
        if D2 > 0:
            c2 = column(x[1], EXACT)
        out = (c1, c2)
    return out


@triton.jit
def times_vector(x, c, D2: tl.constexpr):
    """The product of each token of a tile with the vector of `columns`, [BN] in float32."""
    if x[0].dtype == tl.bfloat16:
        y = tl.dot(x[0], c[0])
        if D2 > 0:
            y = tl.dot(x[1], c[1], y)
        out = tl.sum(y, 1)
    else:
        out = rowdot(x, as_row(c), D2)
    return out


@triton.jit
def begin_weighted(dtype: tl.constexpr, BN: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, NEEDED: tl.constexpr):
    """The accumulator of `add_weighted`."""
    return begin_sum(16, 16 if dtype == tl.bfloat16 else BN, D1, D2, NEEDED)


@triton.jit
def add_weighted(s, x, w, D2: tl.constexpr, EXACT: tl.constexpr):
    """s + the sum of w [BN] (float32) times the tokens of a tile."""
    if x[0].dtype == tl.bfloat16:
        row = tl.trans(column(w, EXACT))
        s2 = s[1]
        if D2 > 0:
            s2 = tl.dot(row, x[1], s[1])
        out = (tl.dot(row, x[0], s[0]), s2)
    else:
        x2 = x[1].to(tl.float32)
        if D2 > 0:
            x2 = x2 * w[:, None]
        out = add_sum(s, (x[0].to(tl.float32) * w[:, None], x2), D2)
    return out


@triton.jit
def end_weighted(s, D1: tl.constexpr, D2: tl.constexpr, NEEDED: tl.constexpr):
    """The vector that `add_weighted` summed."""
    return end_sum(s, D1, D2, NEEDED)
