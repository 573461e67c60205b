"""The D x D algebra of one head with float16 factors: the digits of tf32 in half the registers and shared memory.

Each moment has a unit of its own, a power of two, in which its largest number is about 8: products of two matrices of
up to 80 rows are float16 numbers then, and so are numbers of a moment down to 2**-17 of its largest one. Blocks as in
`tiles`, equations as in `algebra`; P, C and M are [F, V], dM' is [V, F].
"""

import triton
import triton.language as tl

from ..algebra import largest
from ..maps import power_of_two
from ..tiles import cast4, scale4, trans4


@triton.jit
def largest_folded(a, A2: tl.constexpr, B2: tl.constexpr):
    """`algebra.largest`; blocks are folded onto each other first, which exchanges less between threads."""
    if A2 == 16 and B2 == 16:
        x = tl.max(tl.reshape(tl.abs(a[0]), [a[0].shape[0], a[0].shape[1] // 16, 16]), 1)
        x = tl.maximum(x, tl.maximum(tl.abs(a[1]), tl.abs(tl.trans(a[2]))))
        big = tl.maximum(tl.max(x), tl.max(tl.abs(a[3])))
    else:
        big = largest(a, A2, B2)
    return big


@triton.jit
def half(a, A2: tl.constexpr, B2: tl.constexpr):
    """(a in units of u as float16, u)."""
    unit = power_of_two(0.125 * largest_folded(a, A2, B2))
    return cast4(scale4(a, 1.0 / unit), tl.float16), unit


@triton.jit
def half_moments(m, ORDER: tl.constexpr, F2: tl.constexpr, V2: tl.constexpr):
    """`half` of those of (P, S, C, R, W) that the order has: (factors, units)."""
    mp, ms, mc, mr, mw = m
    up = 1.0
    us = 1.0
    uc = 1.0
    ur = 1.0
    uw = 1.0
    if ORDER != 2:
        mp, up = half(mp, F2, V2)
    if ORDER == 2 or ORDER == 4:
        ms, us = half(ms, F2, F2)
    if ORDER == 2:
        mc, uc = half(mc, F2, V2)
    if ORDER == 3:
        mr, ur = half(mr, F2, F2)
    if ORDER == 4:
        mw, uw = half(mw, F2, F2)
    return (mp, ms, mc, mr, mw), (up, us, uc, ur, uw)


@triton.jit
def times(a, b, A2: tl.constexpr, K2: tl.constexpr, B2: tl.constexpr):
    """a b; block 21 by its transpose, whose 64 rows make it a wgmma."""
    c11 = tl.dot(a[0], b[0])
    c12 = c11
    c21 = c11
    c22 = c11
    if K2 > 0:
        c11 = tl.dot(a[1], b[2], c11)
    if B2 > 0:
        c12 = tl.dot(a[0], b[1])
        if K2 > 0:
            c12 = tl.dot(a[1], b[3], c12)
    if A2 > 0:
        c21 = tl.dot(tl.trans(b[0]), tl.trans(a[2]))
        if K2 > 0:
            c21 = tl.dot(tl.trans(b[2]), tl.trans(a[3]), c21)
        c21 = tl.trans(c21)
    if A2 > 0 and B2 > 0:
        c22 = tl.dot(a[2], b[1])
        if K2 > 0:
            c22 = tl.dot(a[3], b[3], c22)
    return c11, c12, c21, c22


@triton.jit
def times_symmetric(a, b, A2: tl.constexpr, K2: tl.constexpr):
    """a b + (a b)'."""
    c11 = tl.dot(a[0], b[0])
    c12 = c11
    c21 = c11
    c22 = c11
    if K2 > 0:
        c11 = tl.dot(a[1], b[2], c11)
    c11 = tl.dot(tl.trans(b[0]), tl.trans(a[0]), c11)
    if K2 > 0:
        c11 = tl.dot(tl.trans(b[2]), tl.trans(a[1]), c11)
    if A2 > 0:
        c12 = tl.dot(a[0], b[1])
        c22 = tl.dot(a[2], b[1])
        if K2 > 0:
            c12 = tl.dot(a[1], b[3], c12)
            c22 = tl.dot(a[3], b[3], c22)
        c12 = tl.dot(tl.trans(b[0]), tl.trans(a[2]), c12)
        if K2 > 0:
            c12 = tl.dot(tl.trans(b[2]), tl.trans(a[3]), c12)
        c21 = tl.trans(c12)
        c22 = c22 + tl.trans(c22)
    return c11, c12, c21, c22


@triton.jit
def half_operator(m, u, ORDER: tl.constexpr, F2: tl.constexpr, V2: tl.constexpr):
    """(M', T in the units of its factors), T = R or S W."""
    up, us, uc, ur, uw = u
    t = m[3]
    if ORDER == 2:
        out = scale4(times(trans4(m[2]), m[1], V2, F2, F2), us * uc)
    elif ORDER == 3:
        out = scale4(times(trans4(m[0]), trans4(t), V2, F2, F2), ur * up)
    else:
        t = cast4(times(m[1], m[4], F2, F2, F2), tl.float16)
        out = scale4(times(trans4(m[0]), trans4(t), V2, F2, F2), us * uw * up)
    return out, t


@triton.jit
def half_weights(m, u, t, dm, s, ORDER: tl.constexpr, F2: tl.constexpr, V2: tl.constexpr, dtype: tl.constexpr):
    """(WP', WS, WC', WR', WW) of `algebra.weights` in a dtype, as far as the order has them; s the scale of a moment
    times the unit of dM'."""
    mp, ms, mc, mr, mw = m
    up, us, uc, ur, uw = u
    if ORDER == 2:
        wc = cast4(scale4(times(dm, ms, V2, F2, F2), s * us), dtype)
        ws = cast4(scale4(times_symmetric(mc, dm, F2, V2), s * uc), dtype)
        out = (wc, ws, wc, ws, ws)
    elif ORDER == 3:
        wp = cast4(scale4(times(dm, mr, V2, F2, F2), s * ur), dtype)
        wr = cast4(scale4(times(mp, dm, F2, V2, F2), s * up), dtype)
        out = (wp, wp, wp, wr, wr)
    else:
        wp = cast4(scale4(times(dm, t, V2, F2, F2), s * us * uw), dtype)
        z = cast4(times(mp, dm, F2, V2, F2), tl.float16)  # P dM'
        ws = cast4(scale4(times_symmetric(mw, z, F2, F2), s * up * uw), dtype)
        ww = cast4(scale4(times_symmetric(z, ms, F2, F2), s * up * us), dtype)
        out = (wp, ws, wp, wp, ww)
    return out
