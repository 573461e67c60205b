"""Algebra between the two passes of `summed` over tokens. Equations as in `algebra`.

The gradient of the operator of a head, then the weights and rows of the token gradients.
"""

import triton
import triton.language as tl

from ..algebra import centre_rows, has, less_mean, ones_moments
from ..loops import add_rows, alike, end_pairs, gradient_sums, sum_gradient, sum_ratio
from ..loops.sums import end_total
from ..split.grads import load_weights
from ..tiles import (
    axpy2,
    cast4,
    load4,
    load_vec,
    matvec,
    ones2,
    power_of_two,
    rank1,
    scale4,
    store4,
    store_vec,
    trans4,
    vecmat,
    zeros2,
)
from .halves import (
    again,
    get_factors,
    get_matrix,
    half,
    half_operator,
    half_weight,
    largest_sum,
    loaded_products,
    put_sums,
    times,
)


@triton.jit
def ones_through(y, p1, q1, ORDER: tl.constexpr, F: tl.constexpr):
    """Return m1 = S q1 (hla2) or R p1 (ahla). S is symmetric, and sums along rows need fewer exchanges of threads."""
    x = p1
    if ORDER == 2:
        x = q1
    return matvec(y, x, F, F)


@triton.jit
def anchor_ones(mt, m1, F: tl.constexpr):
    """Return a of `algebra.anchor` for the features 1: 1'(M - m1 a') = 0. M is nearly of rank one: others are alike."""
    e = tl.sum(m1[0])
    if F.D2 > 0:
        e += tl.sum(m1[1])
    top = sum_rows(mt, F, F)
    over = tl.where(e == 0.0, 0.0, 1.0 / e)
    return top[0] * over, top[1] * over


@triton.jit
def summed_gradient(
    q, g, qn, gn, lo, N, eps, ratio, vectors, matrix, ORDER: tl.constexpr, NORM: tl.constexpr, MEAN: tl.constexpr,
    F: tl.constexpr, L: tl.constexpr, BN: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """dM', what all dv have in common, and of a ratio the gradient of m1 for v centred, of the tokens lo .. N[0]; fills
    ratio."""
    row = zeros2(F)
    one = row
    if NORM:
        dm, dm1 = sum_ratio(
            q, g, q, qn, gn, qn, lo, N, load4(matrix, F, F, F.D, 1), load_vec(vectors + L.M1, F),
            load_vec(vectors + L.ROW, F), eps, ratio, ORDER, False, F, F, BN, PREC,
        )  # fmt: skip
        if F.D1 + F.D2 > F.D:
            dm = inside(dm, F)
        mean = load_vec(vectors + L.SUM_V, F)
        mean = (mean[0] / N[1], mean[1] / N[1])
        anchor = axpy2(mean, -1.0, load_vec(vectors + L.ROW, F), F)  # -a
        if alike(BN, F.D2, F.D1, F.D2):
            one = end_pairs(add_rows(dm1, dm, anchor), F)
        else:
            one = axpy2(end_pairs(dm1, F), 1.0, vecmat(anchor, dm, F, F), F)
    else:
        dm, sg = sum_gradient(q, g, qn, gn, lo, N, MEAN, F, F, BN, PREC)
        if MEAN:
            row = axpy2(row, 1.0 / N[1], sg, F)
    return dm, row, one


@triton.jit
def gradient_of_head(
    q, g, qn, gn, N, eps, ratio, vectors, matrix, units, room, to, LATER: tl.constexpr, ORDER: tl.constexpr,
    NORM: tl.constexpr, MEAN: tl.constexpr, F: tl.constexpr, L: tl.constexpr, BN: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """`summed_gradient` of all tokens. LATER, not of a ratio: what all dv have in common goes to memory, and dM' of
    two blocks of columns to room in units of units[3], so that no registers hold them."""
    if LATER:
        if F.D2 > 0:
            dm, sg = gradient_sums(q, g, qn, gn, 0, N, MEAN, F, F, BN, PREC)
            unit = power_of_two(0.125 * largest_sum(dm))
            put_sums(room, dm, 1.0 / unit, F)
            tl.store(units + 3, unit)
            sg = end_total(sg, q.dtype.element_ty, F, MEAN)
        else:
            dm, sg = sum_gradient(q, g, qn, gn, 0, N, MEAN, F, F, BN, PREC)
        z = zeros2(F)
        if MEAN:
            store_vec(to, axpy2(z, 1.0 / N[1], sg, F), F)
        tl.debug_barrier()  # every thread reads what others wrote
        out = (dm, to, z)
    else:
        out = summed_gradient(q, g, qn, gn, 0, N, eps, ratio, vectors, matrix, ORDER, NORM, MEAN, F, L, BN, PREC)
    return out


@triton.jit
def taken(at, MEAN: tl.constexpr, W: tl.constexpr):
    """Return the vector at a place that is written again, zeros unless MEAN."""
    x = zeros2(W)
    if MEAN:
        x = load_vec(at, W)
        tl.debug_barrier()  # every thread has read it
    return x


@triton.jit
def sums_of(vectors, SUMMED: tl.constexpr, L: tl.constexpr, W: tl.constexpr):
    """Return the kept sums of q, k and v, zeros unless SUMMED."""
    z = zeros2(W)
    out = (z, z, z)
    if SUMMED:
        out = (load_vec(vectors + L.SUM_Q, W), load_vec(vectors + L.SUM_K, W), load_vec(vectors + L.SUM_V, W))
    return out


@triton.jit
def inside(a, W: tl.constexpr):
    """Return a matrix without what its columns hold beyond D."""
    c1, c2 = ones2(W)
    a12 = a[1]
    a22 = a[3]
    if W.D2 > 0:
        a12 = tl.where(c2[None, :] > 0, a[1], 0.0)
        a22 = tl.where(c2[None, :] > 0, a[3], 0.0)
    return tl.where(c1[None, :] > 0, a[0], 0.0), a12, tl.where(c1[None, :] > 0, a[2], 0.0), a22


@triton.jit
def summed_algebra(
    dm, row_v, one, N, scale, vectors, matrix, factors, units, room, dtype: tl.constexpr, READY: tl.constexpr,
    ORDER: tl.constexpr, NORM: tl.constexpr, CENTER: tl.constexpr, MEAN: tl.constexpr, F: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """M', the weights (WP', WS, WC', WR', WW) of `algebra.weights`, as far as the order has them, in a dtype, and the
    rows of dq, dk, dv, from what `summed_gradient` gave (READY: dM' is what was left in room, in units of units[3],
    and row_v where it is); room for three matrices."""
    AREA: tl.constexpr = (F.D1 + F.D2) * (F.D1 + F.D2)
    sums = sums_of(vectors, NORM or MEAN or CENTER > 0, L, F)
    z = zeros2(F)
    if not NORM and ORDER > 1 and F.D2 == 0:
        mt, w = loaded_products(factors, units, dm, scale, ORDER, F, dtype)
    else:
        if ORDER > 1:
            if READY:
                dm = get_matrix(room, F, F.D)
                unit = tl.load(units + 3)
            else:
                dm, unit = half(dm, F, F)
                dm = again(room, dm, F)
            m, u = get_factors(factors, units, ORDER, F)
            s = scale * unit
            t = m[1]
        ones = z
        if NORM:
            p1, q1 = ones_moments(sums, scale, CENTER, F)
            ones = p1 if ORDER > 2 else q1
        mean = (vectors + L.SUM_V, N[1])
        if ORDER == 4:
            t = again(room + AREA, times(m[1], m[2], F, F, F), F)
            pd = times(m[0], dm, F, F, F)
            more = 1.0
            if NORM:
                pd, more = half(rank1(scale4(pd, u[0] * unit), ones, one, F, F), F, F)
                more = more / (u[0] * unit)
            pd = again(room + 2 * AREA, pd, F)
        if NORM or ORDER == 1:
            mt = trans4(load4(matrix, F, F, F.D, 1))
        else:
            mt = cast4(half_operator(m, u, t, ORDER, F), dtype)
        if ORDER == 1:
            w1 = cast4(scale4(dm, scale), dtype)
            w = (w1, w1, w1, w1, w1)
        elif ORDER == 2:
            w, rows = weights2(m, u, t, dm, s, scale, ones, one, mean, dtype, NORM, F)
        elif ORDER == 3:
            w, rows = weights3(m, u, t, dm, s, scale, ones, one, mean, dtype, NORM, F)
        else:
            w, rows = weights4(m, u, t, dm, pd, s, more, scale, one, mean, dtype, NORM, F)
    if READY and not NORM:
        row_v = taken(row_v, MEAN, F)
    if not NORM:
        rows = centre_rows(w, 1.0, sums, z, z, row_v, N[1], ORDER, CENTER, MEAN, F, F)
    return mt, w, rows


@triton.jit
def stored_algebra(
    row_v, N, scale, vectors, matrix, factors, units, room, weights, ORDER: tl.constexpr, CENTER: tl.constexpr,
    MEAN: tl.constexpr, F: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """`summed_algebra` of what `gradient_of_head` left in room, whose matrices do not fit in registers together: M goes
    to matrix and each weight to weights when it is computed. Gives the rows, taken of what was written."""
    AREA: tl.constexpr = (F.D1 + F.D2) * (F.D1 + F.D2)
    dtype: tl.constexpr = weights.dtype.element_ty
    dm = get_matrix(room, F, F.D)
    unit = tl.load(units + 3)
    m, u = get_factors(factors, units, ORDER, F)
    t = m[1]
    pd = dm
    if ORDER == 4:
        t = again(room + AREA, times(m[1], m[2], F, F, F), F)
        store4(matrix, half_operator(m, u, t, ORDER, F), F, F, 1, F.D)
        pd = again(room + 2 * AREA, times(m[0], dm, F, F, F), F)
    else:
        store4(matrix, half_operator(m, u, t, ORDER, F), F, F, 1, F.D)
    tl.debug_barrier()  # the weights may lie where something was read
    for name in tl.static_range(5):
        if has(name, ORDER):
            w = half_weight(m, u, t, dm, pd, scale * unit, name, ORDER, F, dtype)
            store4(weights + L[name], w, F, F, F.D, 1)
    tl.debug_barrier()  # every thread reads what others wrote
    z = zeros2(F)
    rows = (z, z, z)
    if CENTER > 0 or MEAN:
        w = load_weights(weights, ORDER, L, F, F)
        sums = sums_of(vectors, True, L, F)
        row_v = taken(row_v, MEAN, F)
        rows = centre_rows(w, 1.0, sums, z, z, row_v, N[1], ORDER, CENTER, MEAN, F, F)
    return rows


@triton.jit
def weights2(m, u, t, dm, s, scale, q1, one, mean, dtype: tl.constexpr, NORM: tl.constexpr, F: tl.constexpr):
    """Weights and rows of hla2: WC' and WS, the latter + s (q1 dm1' + dm1 q1') of a ratio."""
    z = zeros2(F)
    row_q = z
    wc = half_weight(m, u, t, dm, dm, s, 2, 2, F, dtype)
    if NORM:
        row_q = less_mean(row_q, wc, mean, F)
        row_q = axpy2(row_q, 1.0, matvec(cast4(m[1], tl.float32), axpy2(z, scale * u[1], one, F), F, F), F)
    ws = half_weight(m, u, t, dm, dm, s, 1, 2, F, tl.float32)
    if NORM:
        ws = rank1(ws, axpy2(z, scale, q1, F), one, F, F)
        ws = rank1(ws, axpy2(z, scale, one, F), q1, F, F)
    ws = cast4(ws, dtype)
    return (wc, ws, wc, ws, ws), (row_q, z, z)


@triton.jit
def weights3(m, u, t, dm, s, scale, p1, one, mean, dtype: tl.constexpr, NORM: tl.constexpr, F: tl.constexpr):
    """Weights and rows of ahla: WP' and WR', the latter + s p1 dm1' of a ratio."""
    z = zeros2(F)
    row_k = z
    wp = half_weight(m, u, t, dm, dm, s, 0, 3, F, dtype)
    if NORM:  # before WR' takes registers
        row_k = less_mean(row_k, wp, mean, F)
        row_k = axpy2(row_k, 1.0, vecmat(axpy2(z, scale * u[1], one, F), cast4(t, tl.float32), F, F), F)
    wr = half_weight(m, u, t, dm, dm, s, 3, 3, F, tl.float32)
    if NORM:
        wr = rank1(wr, axpy2(z, scale, p1, F), one, F, F)
    wr = cast4(wr, dtype)
    return (wp, wp, wp, wr, wr), (z, row_k, z)


@triton.jit
def weights4(m, u, t, dm, pd, s, more, scale, one, mean, dtype: tl.constexpr, NORM: tl.constexpr, F: tl.constexpr):
    """Weights and rows of hla3: WP', WS and WW; pd = P dM' (+ p1 dm1' of a ratio) in `more` times the units of P and
    dM'."""
    z = zeros2(F)
    row_k = z
    if NORM:  # before WP' takes registers
        row_k = vecmat(axpy2(z, scale * u[1] * u[2], one, F), cast4(t, tl.float32), F, F)
    wp = half_weight(m, u, t, dm, pd, s, 0, 4, F, dtype)
    if NORM:
        row_k = less_mean(row_k, wp, mean, F)
    ws = half_weight(m, u, t, dm, pd, s * more, 1, 4, F, dtype)
    ww = half_weight(m, u, t, dm, pd, s * more, 4, 4, F, dtype)
    return (wp, ws, wp, wp, ww), (z, row_k, z)


@triton.jit
def sum_rows(a, A: tl.constexpr, B: tl.constexpr):
    """a 1."""
    y1 = tl.sum(a[0], 1)
    y2 = y1
    if B.D2 > 0:
        y1 += tl.sum(a[1], 1)
    if A.D2 > 0:
        y2 = tl.sum(a[2], 1)
        if B.D2 > 0:
            y2 += tl.sum(a[3], 1)
    return y1, y2


@triton.jit
def store_rows3(to, rows, W: tl.constexpr):
    """Write the rows of dq, dk, dv."""
    store_vec(to, rows[0], W)
    store_vec(to + W.D, rows[1], W)
    store_vec(to + 2 * W.D, rows[2], W)


@triton.jit
def load_rows3(at, W: tl.constexpr):
    """Return the rows of dq, dk, dv from where they are."""
    return load_vec(at[0], W), load_vec(at[1], W), load_vec(at[2], W)


@triton.jit
def rows_by_memory(to, rows, W: tl.constexpr):
    """`store_rows3`, then where each row is: a loop that reads them there holds no registers for them."""
    store_rows3(to, rows, W)
    tl.debug_barrier()  # every thread reads what others wrote
    return to, to + W.D, to + 2 * W.D


@triton.jit
def store_weights(to, w, ORDER: tl.constexpr, L: tl.constexpr, W: tl.constexpr):
    """Write the weights that an order has."""
    for name in tl.static_range(5):
        if has(name, ORDER):
            store4(to + L[name], w[name], W, W, W.D, 1)
