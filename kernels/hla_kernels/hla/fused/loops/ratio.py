"""The pass that sums the gradients of a ratio over tokens as they are."""

import triton
import triton.language as tl

from ..maps import is_shifted, ones2, power_of_two
from ..tiles import add_dot, axpy2, load_rows, rank1, rowdot, rowmul, scale4, zero_rows, zeros4
from .extent import alive
from .sums import add_moments, add_sum, begin_moments, begin_sum, end_moments, end_sum
from .vectors import as_row, columns, times_vector


@triton.jit
def ratio_base(
    m, m1, row, eps, D: tl.constexpr, SHIFTED: tl.constexpr, F1: tl.constexpr, F2: tl.constexpr, V2: tl.constexpr
):
    """(b, e) of the normalised read-out o = (f m + b) / (f.m1 + e) + row of tokens f: b = -eps row and e = eps, and
    1'm and 1'm1 more where the features are f + 1."""
    base = (-eps * row[0], -eps * row[1])
    if SHIFTED:
        one = ones2(D, F1, F2)
        base1 = tl.sum(m[0].to(tl.float32), 0)
        base2 = base1
        if F2 > 0:
            base1 += tl.sum(m[2].to(tl.float32), 0)
        if V2 > 0:
            base2 = tl.sum(m[1].to(tl.float32), 0)
        if F2 > 0 and V2 > 0:
            base2 += tl.sum(m[3].to(tl.float32), 0)
        base = axpy2(base, 1.0, (base1, base2), V2)
        eps += tl.sum(rowdot(as_row(one), as_row(m1), F2))
    return base, eps


@triton.jit
def weight_rows(x, y, unit, dtype: tl.constexpr):
    """Two vectors [BN] as rows 0, 1 and 2, 3 of a matrix [16, BN] in units of 1 / unit: a rounding, and its rest.

    Rows, not columns: Triton 3.6 gives a tile of 16 columns that is computed in a loop a wrong place in the shared
    memory of a wgmma, while 16 rows make it a product of registers. `add_outer` is cut for the same reason.
    """
    r = tl.arange(0, 16)[:, None]
    w = tl.where(r < 2, (x * unit)[None, :], tl.where(r < 4, (y * unit)[None, :], 0.0))
    high = w.to(dtype)
    low = (w - high.to(tl.float32)).to(dtype)
    return tl.where(r % 2 == 0, high, low)


@triton.jit
def begin_weighted(dtype: tl.constexpr, BN: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, NEEDED: tl.constexpr):
    """The accumulator of `add_weighted`."""
    out = begin_sum(16, 16 if dtype != tl.float32 else BN, D1, D2, NEEDED)
    return out


@triton.jit
def add_weighted(s, x, w, rows, D2: tl.constexpr):
    """s + the sum of w [BN] times the tokens of a tile; of 16-bit tokens `weight_rows` times the tile."""
    if x[0].dtype == tl.float32:
        x2 = x[1]
        if D2 > 0:
            x2 = x[1] * w[:, None]
        out = add_sum(s, (x[0] * w[:, None], x2), D2)
    else:
        s2 = s[1]
        if D2 > 0:
            s2 = tl.dot(rows, x[1], s[1])
        out = (tl.dot(rows, x[0], s[0]), s2)
    return out


@triton.jit
def end_weighted(s, FIRST: tl.constexpr, unit, dtype: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr):
    """The vector that `add_weighted` summed with rows FIRST and FIRST + 1."""
    if dtype == tl.float32:
        out = end_sum(s, D1, D2, True)
    else:
        r = tl.arange(0, 16)[:, None]
        keep = (r >= FIRST) & (r < FIRST + 2)
        s1 = tl.sum(tl.where(keep, s[0], 0.0), 0) / unit
        s2 = s1
        if D2 > 0:
            s2 = tl.sum(tl.where(keep, s[1], 0.0), 0) / unit
        out = (s1, s2)
    return out


@triton.jit
def begin_outer(V1: tl.constexpr, V2: tl.constexpr, F1: tl.constexpr, F2: tl.constexpr):
    """The accumulator of `add_outer`."""
    m11, m12, m21, m22 = zeros4(V1, V2, F1, F2)
    if F2 > 0:
        m12 = tl.zeros([F2, V1], tl.float32)
    return m11, m12, m21, m22


@triton.jit
def add_outer(acc, x, y, X2: tl.constexpr, Y2: tl.constexpr, PREC: tl.constexpr):
    """acc + x'y over the tokens of a tile, block 12 kept transposed: y is computed in the loop."""
    a11, a12, a21, a22 = acc
    a11 = add_dot(tl.trans(x[0]), y[0], a11, PREC)
    if Y2 > 0:
        a12 = add_dot(tl.trans(y[1]), x[0], a12, PREC)
    if X2 > 0:
        a21 = add_dot(tl.trans(x[1] + 0.0), y[0], a21, PREC)
    if X2 > 0 and Y2 > 0:
        a22 = add_dot(tl.trans(x[1] + 0.0), y[1] + 0.0, a22, PREC)
    return a11, a12, a21, a22


@triton.jit
def end_outer(acc, Y2: tl.constexpr):
    """The matrix that `add_outer` summed."""
    a12 = acc[1]
    if Y2 > 0:
        a12 = tl.trans(acc[1])
    return acc[0], a12, acc[2], acc[3]


@triton.jit
def sum_ratio(
    q, k, v, g, qn, kn, vn, gn, lo, hi, m, m1, row, eps, ratio, ORDER: tl.constexpr, MOMENTS: tl.constexpr,
    FMAP: tl.constexpr, D: tl.constexpr, F1: tl.constexpr, F2: tl.constexpr, DV: tl.constexpr, V1: tl.constexpr,
    V2: tl.constexpr, BN: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """(P, S, C, R, W) with MOMENTS, dM' = Sum g (phi(q) / den)', dm1 = Sum (d loss / d den) phi(q) over tokens lo..hi
    of features; 1 / den and d loss / d den of every token go to ratio = (pointer, room of a row), two rows.
    """
    SHIFTED: tl.constexpr = is_shifted(FMAP)
    dtype: tl.constexpr = q.dtype.element_ty
    unit = 1.0
    if dtype == tl.float16:  # 1 / den of a higher order is too small for float16
        unit = power_of_two(tl.sum(rowdot(as_row(m1), as_row(ones2(D, F1, F2)), F2)))
    base, eps = ratio_base(m, m1, row, eps, D, SHIFTED, F1, F2, V2)
    cols = columns(m1, dtype, F2)
    mm = begin_moments(ORDER, F1, F2, V1, V2, MOMENTS, False)
    dm = begin_outer(V1, V2, F1, F2)
    dm1 = begin_weighted(dtype, BN, F1, F2, True)
    sg = begin_weighted(dtype, BN, V1, V2, SHIFTED)
    sd = tl.zeros([BN], tl.float32)
    i = tl.arange(0, BN)
    zero = tl.full([], 0, tl.int64)
    for start in range(lo, hi[0], BN):
        live = alive(start + i, hi)
        tq = load_rows(q + (zero + start) * qn, i, qn, live, D, F1, F2, False)
        tg = load_rows(g + (zero + start) * gn, i, gn, live, DV, V1, V2, False)
        if MOMENTS:
            tk = load_rows(k + (zero + start) * kn, i, kn, live, D, F1, F2, False)
            tv = load_rows(v + (zero + start) * vn, i, vn, live, DV, V1, V2, False)
            mm = add_moments(mm, tq, tk, tv, i, i, ORDER, F2, V2, False, PREC)
        y = axpy2(rowmul(zero_rows(BN, V1, V2), tq, m, F2, V2, PREC), 1.0, as_row(base), V2)
        inverse = tl.where(live, 1.0 / (times_vector(tq, cols, F2) + eps), 0.0)
        d = -rowdot(tg, y, V2) * inverse * inverse
        tl.store(ratio[0] + start + i, inverse, mask=live)
        tl.store(ratio[0] + ratio[1] + start + i, d, mask=live)
        each = (inverse * unit)[:, None]
        over = ((tq[0].to(tl.float32) * each).to(dtype), (tq[1].to(tl.float32) * each).to(dtype))
        dm = add_outer(dm, tg, over, V2, F2, PREC)
        rows = weight_rows(d, inverse, unit, dtype)
        dm1 = add_weighted(dm1, tq, d, rows, F2)
        if SHIFTED:
            sg = add_weighted(sg, tg, inverse, rows, V2)
            sd += d
    dm = scale4(end_outer(dm, F2), 1.0 / unit)
    dm1 = end_weighted(dm1, 0, unit, dtype, F1, F2)
    if SHIFTED:
        one = ones2(D, F1, F2)
        dm = rank1(dm, end_weighted(sg, 2, unit, dtype, V1, V2), one, V2, F2)
        dm1 = axpy2(dm1, tl.sum(sd), one, F2)
    return end_moments(mm, ORDER, F2, MOMENTS), dm, dm1
