"""D x D algebra of one head in registers, from moments to the weights of token gradients.

Scaled and centred moments -> operator -> weights of the token gradients.

All in float32. Blocks as in `tiles`; P, C and M are [F, V], the gradient of M comes transposed, dM' [V, F], because
every product below then has an accumulator as it is for operand A (a transposed accumulator as operand A was
miscompiled by Triton). c = (c1, c2, c3, c4) are the coefficients of `polynomial`; the other orders use none.
"""

import triton
import triton.language as tl

from .spec import MOMENTS
from .tiles import (
    add4,
    axpy2,
    cast4,
    eye4,
    load_vec,
    matvec,
    power_of_two,
    rank1,
    rowdot,
    scale4,
    vecmat,
    zeros2,
)


@triton.constexpr_function
def has(moment, order):
    """Whether an order, the name of an operator or the letters of some moments ("CR"), has a moment, or the weight in
    its place in `spec.Layout`."""
    if order in MOMENTS:  # Triton takes no method of a global
        order = MOMENTS[order]
    return moment in order


@triton.jit
def scale_moments(
    raw, sums, s, n, ridge, ORDER: tl.constexpr, CENTER: tl.constexpr, ONES: tl.constexpr, RIDGE: tl.constexpr,
    F: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """s (Sum a b' - Sum a Sum b' / n) for the moments that centring touches, s Sum a b' for the others; + ridge I on S
    or R.

    ONES: v is centred. The ratio (or mean path) of v is vbar plus the same for v - vbar, which avoids cancellation.
    """
    mp, ms, mc, mr, mw = raw
    sq, sk, sv = sums
    z = zeros2(F)
    kbar = axpy2(z, -1.0 / n, sk, F)
    qbar = axpy2(z, -1.0 / n, sq, F)
    if has("P", ORDER) and (CENTER is not None or ONES):
        mp = rank1(mp, kbar, sv, F, V)
    if has("S", ORDER) and CENTER is not None:
        ms = rank1(ms, kbar, sk, F, F)
    if has("R", ORDER) and CENTER is not None:
        mr = rank1(mr, kbar, sq, F, F)
    if has("C", ORDER) and (CENTER == "qk" or ONES):
        mc = rank1(mc, qbar, sv, F, V)
    if has("W", ORDER) and CENTER == "qk":
        mw = rank1(mw, qbar, sq, F, F)
    ms = scale4(ms, s)
    mr = scale4(mr, s)
    if RIDGE:
        if has("S", ORDER):
            ms = add4(ms, eye4(ridge, F), F, F)
        elif has("R", ORDER):
            mr = add4(mr, eye4(ridge, F), F, F)
    return scale4(mp, s), ms, scale4(mc, s), mr, scale4(mw, s)


@triton.jit
def ones_moments(sums, s, CENTER: tl.constexpr, F: tl.constexpr):
    """P and C of v = 1: p1 = s Sum k and q1 = s Sum q, zero where centred."""
    p1 = zeros2(F)
    q1 = zeros2(F)
    if CENTER is None:
        p1 = axpy2(p1, s, sums[1], F)
    if CENTER != "qk":
        q1 = axpy2(q1, s, sums[0], F)
    return p1, q1


@triton.jit
def anchor(m, p1, q1, sums, ORDER: tl.constexpr, F: tl.constexpr, V: tl.constexpr):
    """a [V] for which M - m1 a' is small when normalised: the ratio P k / p1.k of the mean key (C q / q1.q of the mean
    query for hla2).

    q M / q.m1 = a + q (M - m1 a') / q.m1 for every a. With non-negative features M is close to rank one, m1 a';
    rounded to the dtype of the tokens that part would cancel in dq and leave its rounding error.
    """
    a = zeros2(V)
    if ORDER == "hla2":
        top = vecmat(sums[0], m[2], F, V)
        den = tl.sum(rowdot(row1(sums[0]), row1(q1), F))
    else:
        top = vecmat(sums[1], m[0], F, V)
        den = tl.sum(rowdot(row1(sums[1]), row1(p1), F))
    return axpy2(a, tl.where(den == 0.0, 0.0, 1.0 / den), top, V)


@triton.jit
def row1(x):
    """Return a vector as one row."""
    return x[0][None, :], x[1][None, :]


@triton.jit
def affine(out, m1, sums, a, n, F: tl.constexpr, V: tl.constexpr):
    """Return (M - m1 a', vbar + a) of a ratio, with a of `anchor`."""
    row = axpy2(axpy2(zeros2(V), 1.0 / n, sums[2], V), 1.0, a, V)
    return rank1(out, axpy2(zeros2(F), -1.0, m1, F), a, F, V), row


@triton.jit
def largest(a, A: tl.constexpr, B: tl.constexpr):
    """Return the largest |a|."""
    x = tl.max(tl.abs(a[0]))
    if B.D2 > 0:
        x = tl.maximum(x, tl.max(tl.abs(a[1])))
    if A.D2 > 0:
        x = tl.maximum(x, tl.max(tl.abs(a[2])))
    if A.D2 > 0 and B.D2 > 0:
        x = tl.maximum(x, tl.max(tl.abs(a[3])))
    return x


@triton.jit
def cast_operator(m, dtype: tl.constexpr, NORM: tl.constexpr, A: tl.constexpr, B: tl.constexpr):
    """Return (M / unit in the dtype of the tokens, unit). The unit per head avoids underflow and overflow in float16,
    since M has the scale of a moment as many times as there are moments in it; a ratio has `Spec.in_range`."""
    unit = 1.0
    if dtype == tl.float16 and not NORM:
        m = cast4(m, tl.float32)
        unit = power_of_two(largest(m, A, B))
        m = scale4(m, 1.0 / unit)
    return cast4(m, dtype), unit


@triton.jit
def cast_weights(w, ORDER: tl.constexpr, dtype: tl.constexpr, F: tl.constexpr, V: tl.constexpr):
    """Return (w / unit in the dtype of the tokens, unit). The unit per head avoids underflow in float16, where weights
    are of the order of 1 / N."""
    unit = 1.0
    if dtype == tl.float16:
        big = 0.0
        if has("P", ORDER):
            big = tl.maximum(big, largest(w[0], V, F))
        if has("S", ORDER):
            big = tl.maximum(big, largest(w[1], F, F))
        if has("C", ORDER):
            big = tl.maximum(big, largest(w[2], V, F))
        if has("R", ORDER):
            big = tl.maximum(big, largest(w[3], F, F))
        if has("W", ORDER):
            big = tl.maximum(big, largest(w[4], F, F))
        unit = power_of_two(big)
        w = scale5(w, 1.0 / unit)
    return (cast4(w[0], dtype), cast4(w[1], dtype), cast4(w[2], dtype), cast4(w[3], dtype), cast4(w[4], dtype)), unit


@triton.jit
def scale5(w, c):
    """c times every matrix."""
    return scale4(w[0], c), scale4(w[1], c), scale4(w[2], c), scale4(w[3], c), scale4(w[4], c)


@triton.jit
def centre_rows(
    w, unit, sums, row_q, row_k, row_v, n, ORDER: tl.constexpr, CENTER: tl.constexpr, MEAN: tl.constexpr,
    F: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """rows - mean W of what a moment centres (MEAN: v, in P and C); w = (WP', WS, WC', WR', WW) in units of unit.

    What the products give a mean, which is in every token, is rounded as they are, so that it cancels.
    """
    sq, sk, sv = sums
    n = n / unit
    h = -1.0 / n
    q = axpy2(zeros2(F), h, sq, F)
    k = axpy2(zeros2(F), h, sk, F)
    if has("P", ORDER) and (CENTER is not None or MEAN):
        row_v = axpy2(row_v, 1.0, matvec(w[0], k, V, F), V)
        row_k = axpy2(row_k, h, vecmat(sv, w[0], V, F), F)
    if CENTER is not None:
        if has("S", ORDER):
            row_k = axpy2(row_k, 1.0, vecmat(k, w[1], F, F), F)
        if has("R", ORDER):
            row_q = axpy2(row_q, 1.0, matvec(w[3], k, F, F), F)
            row_k = axpy2(row_k, 1.0, vecmat(q, w[3], F, F), F)
    if has("C", ORDER) and (CENTER == "qk" or MEAN):
        row_v = axpy2(row_v, 1.0, matvec(w[2], q, V, F), V)
        row_q = axpy2(row_q, h, vecmat(sv, w[2], V, F), F)
    if has("W", ORDER) and CENTER == "qk":
        row_q = axpy2(row_q, 1.0, vecmat(q, w[4], F, F), F)
    return row_q, row_k, row_v


@triton.jit
def less_mean(row, w, mean, F: tl.constexpr):
    """A row for v centred -> for v as it is: less what w, as it was rounded, gives the mean value, which is in what it
    gives every token; mean: (where Sum v is, the number of tokens)."""
    total = load_vec(mean[0], F)
    return axpy2(row, -1.0 / mean[1], vecmat(total, cast4(w, tl.float32), F, F), F)
