"""Shared functions of the passes over tokens: operators, scaled tiles, vector products, ratio gradient.

Weighted sums of tokens run on tensor cores too (`hla.fused.loops.vectors`).
"""

import triton
import triton.language as tl

from ...hla.fused.algebra import cast_operator
from ...hla.fused.loops.sums import add_sum, begin_sum
from ...hla.fused.loops.vectors import as_row, column, times_vector
from ...hla.fused.tiles import (
    add4,
    axpy2,
    cast4,
    load4,
    load_vec,
    power_of_two,
    rowdot,
    rowmul,
    scale4,
    vecmat,
    zero_rows,
)
from .geometry import tile

NO_SPECIALIZE = [
    "qs", "ks", "vs", "xs", "ys", "os", "gs", "dqs", "dxs", "dvs", "others", "GEO", "N", "H", "BH", "M", "G", "GK",
    "GV", "GX", "GY", "HT", "chunk", "scale", "eps",
]  # fmt: skip


@triton.jit
def load_operator(
    ptr, dtype: tl.constexpr, DIGITS: tl.constexpr, F: tl.constexpr, V: tl.constexpr, SPLIT: tl.constexpr = 1,
    BOTH: tl.constexpr = False,
):  # fmt: skip
    """Load (P' [V, F] in `DIGITS` values of the dtype of the tokens, its unit). The unit extends the exponent range of
    float16. Rows are SPLIT D apart. BOTH: a square matrix with its transpose added."""
    m = load4(ptr, V, F, F.D * SPLIT, 1)
    if BOTH:
        m = add4(m, load4(ptr, V, F, 1, F.D), V, F)
    high, unit = cast_operator(m, dtype, False, V, F)
    low = high
    lowest = high
    if DIGITS > 1:
        m = rest4(scale4(m, 1.0 / unit), high)
        low = cast4(m, dtype)
    if DIGITS > 2:
        lowest = cast4(rest4(m, low), dtype)
    return (high, low, lowest), unit


@triton.jit
def anchored_row(vector, anchor, w, unit, DIGITS: tl.constexpr, ANCHOR: tl.constexpr, F: tl.constexpr, V: tl.constexpr):
    """Return dx - a dX' for the vectors at pointers and a `load_operator` w = dX' in its unit."""
    row = load_vec(vector, F)
    if ANCHOR:
        a = load_vec(anchor, V)
        back = vecmat(a, w[0], V, F)
        if DIGITS > 1:
            back = axpy2(back, 1.0, vecmat(a, w[1], V, F), F)
        row = axpy2(row, -unit, back, F)
    return row


@triton.jit
def rest4(m, high):
    """Return a matrix minus its rounding."""
    return (
        m[0] - high[0].to(tl.float32), m[1] - high[1].to(tl.float32), m[2] - high[2].to(tl.float32),
        m[3] - high[3].to(tl.float32),
    )  # fmt: skip


@triton.jit
def by_operator(x, w, DIGITS: tl.constexpr, K: tl.constexpr, B: tl.constexpr, PREC: tl.constexpr):
    """Return x w for a tile of tokens and a `load_operator`, in its units."""
    y = zero_rows(x[0].shape[0], B)
    if DIGITS > 2:
        y = rowmul(y, x, w[2], K, B, PREC)
    if DIGITS > 1:
        y = rowmul(y, x, w[1], K, B, PREC)
    return rowmul(y, x, w[0], K, B, PREC)


@triton.jit
def load_anchor(anchor, shift, bh, at, V: tl.constexpr):
    """Load the anchor of v of a head, plus the shift of the operator of a block unless None."""
    a = load_vec(anchor + bh * V.D, V)
    if shift is not None:
        a = axpy2(a, 1.0, load_vec(shift + at * V.D, V), V)
    return a


@triton.jit
def times(x, factor, W: tl.constexpr):
    """Multiply each token of a tile, in float32, by a factor [BN, 1] or a number."""
    x2 = x[1]
    if W.D2 > 0:
        x2 = x[1].to(tl.float32) * factor
    return x[0].to(tl.float32) * factor, x2


@triton.jit
def begin_weighted(dtype: tl.constexpr, BN: tl.constexpr, W: tl.constexpr, NEEDED: tl.constexpr):
    """Return the accumulator of `add_weighted`, for `end_sum`."""
    return begin_sum(16, 16 if dtype == tl.bfloat16 else BN, W, NEEDED)


@triton.jit
def add_weighted(s, x, w, W: tl.constexpr, EXACT: tl.constexpr):
    """Return s plus the sum of w [BN] (float32) times the tokens of a tile."""
    if x[0].dtype == tl.bfloat16:
        row = tl.trans(column(w, tl.bfloat16, EXACT))
        s2 = s[1]
        if W.D2 > 0:
            s2 = tl.dot(row, x[1], s[1])
        out = (tl.dot(row, x[0], s[0]), s2)
    else:
        x2 = x[1].to(tl.float32)
        if W.D2 > 0:
            x2 = x2 * w[:, None]
        out = add_sum(s, (x[0].to(tl.float32) * w[:, None], x2), W)
    return out


@triton.jit
def unit_of(inverses, lo, hi, b, keep, dtype: tl.constexpr, BN: tl.constexpr):
    """Return the unit of features over denominators in float16, which ends at 65504: the power of two at or just below
    the smallest denominator of positions lo .. hi of a block, from 1 / den at `inverses`. 1.0 for other dtypes."""
    unit = 1.0
    if dtype == tl.float16:
        most = tl.full([BN], 1e-30, tl.float32)
        for start in range(lo, hi, BN):
            tokens, live = tile(start, hi, b, keep, BN)
            most = tl.maximum(most, tl.abs(tl.load(inverses + tokens, mask=live, other=0.0)))
        unit = power_of_two(1.0 / tl.max(most))
    return unit


@triton.jit
def total_grad(t, tg, gt, inverse, a, eps, ANCHOR: tl.constexpr, F: tl.constexpr, V: tl.constexpr):
    """Return d loss / d den of a tile from gt = do P~' of rotated features t, 1 / den and the anchor in `columns`."""
    total = -rowdot(gt, t, F)
    if ANCHOR:
        total += eps * times_vector(tg, a, V)
    return total * inverse * inverse


@triton.jit
def add_vector(x, factor, ptr, F: tl.constexpr):
    """Return x + factor [BN] times the vector at a pointer."""
    return axpy2(x, factor[:, None], as_row(load_vec(ptr, F)), F)
