"""The pass over queries of the backward of a ratio: sums of gradients, with a single product per tile."""

import triton
import triton.language as tl

from ..tiles import add_dot, axpy2, cast4, load_rows, power_of_two, rowdot, scale4, trans4, zeros4
from .extent import alive, anew
from .stores import put_ratio, store_tokens
from .vectors import add_pairs, as_row, begin_pairs, beside, columns, reciprocal, times_vector


@triton.jit
def add_outer(acc, x, y, X: tl.constexpr, Y: tl.constexpr, PREC: tl.constexpr):
    """acc + x'y over the tokens of a tile, y computed in the loop. Block 22, whose operands go through registers,
    before the others."""
    a11, a12, a21, a22 = acc
    if X.D2 > 0 and Y.D2 > 0:
        a22 = add_dot(tl.trans(x[1]), y[1] + 0.0, a22, PREC)
    a11 = add_dot(tl.trans(x[0]), y[0], a11, PREC)
    if Y.D2 > 0:
        a12 = add_dot(tl.trans(x[0]), y[1], a12, PREC)
    if X.D2 > 0:
        a21 = add_dot(tl.trans(x[1] + 0.0), y[0], a21, PREC)
    return a11, a12, a21, a22


@triton.constexpr_function
def spare(D, F1, F2, dtype):
    """Whether two padding columns of a tile of D channels are free, which then carry a vector along: `with_row`."""
    return F2 > 0 and F1 + F2 >= D + 2 and dtype == tl.bfloat16


@triton.jit
def with_number(x, d, V: tl.constexpr):
    """Return a tile x of gradients with a number d of each token in its two padding columns, the rounding and what that
    left."""
    c = tl.arange(0, x[1].shape[1])[None, :] - (V.D - V.D1)
    high = d.to(x[1].dtype)
    low = (d - high.to(tl.float32)).to(x[1].dtype)
    return x[0], tl.where(c == 0, high[:, None], tl.where(c == 1, low[:, None], x[1]))


@triton.jit
def numbers_of(m, V: tl.constexpr):
    """Return (m without, Sum d y) of Sum x y' with the numbers d of `with_number`."""
    r = tl.arange(0, m[2].shape[0])[:, None] - (V.D - V.D1)
    own = (r == 0) | (r == 1)
    d1 = tl.sum(tl.where(own, m[2], 0.0), 0)
    d2 = tl.sum(tl.where(own, m[3], 0.0), 0)
    return (m[0], m[1], tl.where(own, 0.0, m[2]), tl.where(own, 0.0, m[3])), (d1, d2)


@triton.jit
def with_row(mt, x, F: tl.constexpr, V: tl.constexpr):
    """Return M' with x [V] in its columns D (its rounding) and D + 1 (what that left)."""
    c = tl.arange(0, mt[1].shape[1])[None, :] - (F.D - F.D1)
    high = x[0].to(mt[1].dtype)
    low = (x[0] - high.to(tl.float32)).to(mt[1].dtype)
    m12 = tl.where(c == 0, high[:, None], tl.where(c == 1, low[:, None], mt[1]))
    m22 = mt[3]
    if V.D2 > 0:
        high = x[1].to(mt[1].dtype)
        low = (x[1] - high.to(tl.float32)).to(mt[1].dtype)
        m22 = tl.where(c == 0, high[:, None], tl.where(c == 1, low[:, None], mt[3]))
    return mt[0], m12, mt[2], m22


@triton.jit
def readout_columns(mt, x, dtype: tl.constexpr, F: tl.constexpr, V: tl.constexpr):
    """Return (M', `columns` of x [V]) for `pull`; where columns are spare x is in M' alone."""
    cols = 0.0
    if spare(F.D, F.D1, F.D2, dtype):
        mt = with_row(mt, x, F, V)
    else:
        cols = columns(x, dtype, V)
    return mt, cols


@triton.jit
def pull(g, mt, cols, F: tl.constexpr, V: tl.constexpr, PREC: tl.constexpr):
    """What `against` takes of a tile of gradients g of outputs (f m + b) / (f.m1 + eps) + row, b = -eps row: r = g M'
    and g.b (none where b is in M'); mt and cols: `readout_columns` of M' and b."""
    SPARE: tl.constexpr = spare(F.D, F.D1, F.D2, g[0].dtype)
    y = 0.0
    if not SPARE:
        y = times_vector(g, cols, V)
    r1 = part_product(g, mt[0], mt[2], V, PREC)
    r2 = r1
    if F.D2 > 0:
        r2 = part_product(g, mt[1], mt[3], V, PREC)
    return r1, r2, y


@triton.jit
def against(f, pulled, dtype: tl.constexpr, F: tl.constexpr):
    """Return (f, r, g.(f m + b)) of a tile of queries with features f, from `pull`.

    g.(f m + b) = f.r + g.b, so that all of it is elementwise in the layout of r.
    """
    SPARE: tl.constexpr = spare(F.D, F.D1, F.D2, dtype)
    r1, r2, y = pulled
    f1 = beside(f[0], r1)
    f2 = f[1]
    y += tl.sum(f1 * r1, 1)
    if F.D2 > 0:
        f2 = beside(f[1], r2)
        y += tl.sum(r2 * (tl.where(is_spare(F), 1.0, f2) if SPARE else f2), 1)
    return (f1, f2), (r1, r2), y


@triton.jit
def query_gradient(r, inverse, d, m1, F: tl.constexpr):
    """Return dq of the first order from `pull` and d = d loss / d den times den."""
    return axpy2((r[0] * inverse[:, None], r[1] * inverse[:, None]), (d * inverse)[:, None], as_row(m1), F)


@triton.jit
def is_spare(F: tl.constexpr):
    """Which columns of the second part are the two of `with_row`."""
    c = tl.arange(0, F.D2)[None, :] - (F.D - F.D1)
    return (c == 0) | (c == 1)


@triton.jit
def part_product(x, m1, m2, K: tl.constexpr, PREC: tl.constexpr):
    """Return x m for one of the two parts of the columns of m."""
    out = tl.dot(x[0], m1, input_precision=PREC)
    if K.D2 > 0:
        out = tl.dot(x[1], m2, out, input_precision=PREC)
    return out


@triton.jit
def total_of(x, W: tl.constexpr):
    """Return the sum of the absolute values of a vector."""
    out = tl.sum(tl.abs(x[0]))
    if W.D2 > 0:
        out += tl.sum(tl.abs(x[1]))
    return out


@triton.jit
def sum_ratio(
    q, g, dq, qn, gn, dqn, lo, hi, m, m1, row, eps, ratio, ORDER: tl.constexpr, WRITE: tl.constexpr, F: tl.constexpr,
    V: tl.constexpr, BN: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Return (dM' = Sum g (q / den)', dm1 = Sum (d loss / d den) q) over tokens lo..hi, dm1 for `end_pairs`.

    Apart from r = M g, with the rows of dq, everything is elementwise per query: den = q.m1, g.y = q.r. o = (q M -
    eps row) / (den + eps) + row.
    WRITE: dq = (r - (g.o) m1) / den, which is complete if M depends on keys only; otherwise 1 / den and d loss / d den
    of every token are stored in ratio [*, 2].
    """
    dtype: tl.constexpr = q.dtype.element_ty
    unit = 1.0
    if dtype == tl.float16:  # 1 / den of a higher order is too small for float16
        unit = power_of_two(total_of(m1, F))
    SPARE: tl.constexpr = spare(F.D, F.D1, F.D2, dtype)
    # dm1 is a row of dM' too, but for coefficients whose gradient it nearly cancels in
    NUMBER: tl.constexpr = SPARE and spare(V.D, V.D1, V.D2, dtype) and ORDER != "polynomial"
    mt, cols = readout_columns(trans4(cast4(m, dtype)), (-eps * row[0], -eps * row[1]), dtype, F, V)
    ones = cols
    if NUMBER:  # of v = 1: a product holds no registers from turn to turn
        ones = columns(m1, dtype, F)
    # pointers, which take fewer registers than products of strides
    MOVING: tl.constexpr = WRITE or (F.D2 > 0 and ORDER == "polynomial")
    dm = zeros4(V, F)
    dm1 = begin_pairs(BN, F)
    i = tl.arange(0, BN)
    zero = tl.full([], 0, tl.int64)
    gp = g + (zero + lo) * gn
    qp = q + (zero + lo) * qn
    for start in tl.range(lo, hi[0], BN, disable_licm=WRITE and F.D2 > 0):
        live = alive(start + i, hi)
        j = anew(i, start, F.D2 > 0)
        if MOVING:
            tg = load_rows(gp, j, gn, live, V, False)
            tq = load_rows(qp, j, qn, live, F, False)
            gp += (zero + BN) * gn
            qp += (zero + BN) * qn
        else:
            tg = load_rows(g + (zero + start) * gn, j, gn, live, V, False)
            tq = load_rows(q + (zero + start) * qn, j, qn, live, F, False)
        # products first: what needs them waits the less, the later it comes
        pulled = pull(tg, mt, cols, F, V, PREC)
        if NUMBER:
            den = times_vector(tq, ones, F)
        f, r, y = against((tq[0].to(tl.float32), tq[1].to(tl.float32)), pulled, dtype, F)
        if NUMBER:
            inverse = reciprocal(den + eps, live, dtype)
        else:
            inverse = reciprocal(rowdot(f, as_row(m1), F) + eps, live, dtype)
        d = -y * inverse  # d loss / d den times den
        if WRITE:
            store_tokens(dq + (zero + start) * dqn, j, dqn, live, query_gradient(r, inverse, d, m1, F), F)
        else:
            put_ratio(ratio, start + i, live, inverse, d * inverse)
        over = (f[0] * inverse[:, None], f[1] * inverse[:, None])
        if NUMBER:
            tg = with_number(tg, d, V)
        else:
            dm1 = add_pairs(dm1, d, over, F)
        over = (over[0] * unit, over[1] * unit)
        dm = add_outer(dm, tg, (over[0].to(dtype), over[1].to(dtype)), V, F, PREC)
    dm = scale4(dm, 1.0 / unit)
    if NUMBER:
        dm, dm1 = numbers_of(dm, V)
    return dm, dm1
