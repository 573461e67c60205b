"""D x D algebra of one head with float16 factors.

As accurate as tf32, with half the registers and shared memory.

Each moment has a separate unit, a power of two, in which its largest number is about 8. Products of two matrices of up
to 80 rows are then in the range of float16, and so are entries down to 2**-17 of the largest one. Blocks as in
`tiles`, equations as in `algebra`; F = V, P, C and M are [F, V], dM' is [V, F].
"""

import triton
import triton.language as tl

from ..algebra import largest
from ..tiles import cast4, load4, power_of_two, scale4, store4, trans4


@triton.jit
def largest_folded(a, A: tl.constexpr, B: tl.constexpr):
    """`algebra.largest`; blocks are folded onto each other first, which exchanges less between threads."""
    if A.D2 == 16 and B.D2 == 16:
        x = tl.max(tl.reshape(tl.abs(a[0]), [a[0].shape[0], a[0].shape[1] // 16, 16]), 1)
        x = tl.maximum(x, tl.maximum(tl.abs(a[1]), tl.abs(tl.trans(a[2]))))
        big = tl.maximum(tl.max(x), tl.max(tl.abs(a[3])))
    else:
        big = largest(a, A, B)
    return big


@triton.jit
def half(a, A: tl.constexpr, B: tl.constexpr):
    """Return (a in units of u as float16, u)."""
    unit = power_of_two(0.125 * largest_folded(a, A, B))
    return cast4(scale4(a, 1.0 / unit), tl.float16), unit


@triton.jit
def factors_of(m, ORDER: tl.constexpr):
    """Return the moments that an order multiplies: (C, S), (P, R) or (P, S, W), three of either."""
    if ORDER == "hla2":
        out = (m[2], m[1], m[1])
    elif ORDER == "ahla":
        out = (m[0], m[3], m[3])
    else:
        out = (m[0], m[1], m[4])
    return out


@triton.jit
def put_three(units, u):
    """Write the units of three factors."""
    tl.store(units, u[0])
    tl.store(units + 1, u[1])
    tl.store(units + 2, u[2])


@triton.jit
def get_factors(at, units, ORDER: tl.constexpr, P: tl.constexpr):
    """Return the factors [2 or 3, P, P] of the padded width P (whole sectors of memory) and three units."""
    x = load4(at, P, P, P.D, 1)
    y = load4(at + P.D * P.D, P, P, P.D, 1)
    z = y
    if ORDER == "hla3":
        z = load4(at + 2 * P.D * P.D, P, P, P.D, 1)
    return (x, y, z), (tl.load(units), tl.load(units + 1), tl.load(units + 2))


@triton.jit
def again(at, a, P: tl.constexpr):
    """Return a matrix as a float16 factor by way of memory, so that tensor cores do not read it from registers (the
    assembler of Triton 3.6 is known to corrupt such operands)."""
    store4(at, cast4(a, tl.float16), P, P, P.D, 1)
    tl.debug_barrier()  # every thread reads what others wrote
    return load4(at, P, P, P.D, 1)


@triton.jit
def times(a, b, A: tl.constexpr, K: tl.constexpr, B: tl.constexpr):
    """a b; block 21 by its transpose, whose 64 rows make it a wgmma."""
    c11 = tl.dot(a[0], b[0])
    c12 = c11
    c21 = c11
    c22 = c11
    if K.D2 > 0:
        c11 = tl.dot(a[1], b[2], c11)
    if B.D2 > 0:
        c12 = tl.dot(a[0], b[1])
        if K.D2 > 0:
            c12 = tl.dot(a[1], b[3], c12)
    if A.D2 > 0:
        c21 = tl.dot(tl.trans(b[0]), tl.trans(a[2]))
        if K.D2 > 0:
            c21 = tl.dot(tl.trans(b[2]), tl.trans(a[3]), c21)
        c21 = tl.trans(c21)
    if A.D2 > 0 and B.D2 > 0:
        c22 = tl.dot(a[2], b[1])
        if K.D2 > 0:
            c22 = tl.dot(a[3], b[3], c22)
    return c11, c12, c21, c22


@triton.jit
def times_symmetric(a, b, A: tl.constexpr, K: tl.constexpr):
    """a b + (a b)'."""
    c11 = tl.dot(a[0], b[0])
    c12 = c11
    c21 = c11
    c22 = c11
    if K.D2 > 0:
        c11 = tl.dot(a[1], b[2], c11)
    c11 = tl.dot(tl.trans(b[0]), tl.trans(a[0]), c11)
    if K.D2 > 0:
        c11 = tl.dot(tl.trans(b[2]), tl.trans(a[1]), c11)
    if A.D2 > 0:
        c12 = tl.dot(a[0], b[1])
        c22 = tl.dot(a[2], b[1])
        if K.D2 > 0:
            c12 = tl.dot(a[1], b[3], c12)
            c22 = tl.dot(a[3], b[3], c22)
        c12 = tl.dot(tl.trans(b[0]), tl.trans(a[2]), c12)
        if K.D2 > 0:
            c12 = tl.dot(tl.trans(b[2]), tl.trans(a[3]), c12)
        c21 = tl.trans(c12)
        c22 = c22 + tl.trans(c22)
    return c11, c12, c21, c22


@triton.jit
def half_operator(m, u, t, ORDER: tl.constexpr, W: tl.constexpr):
    """Return M'; t = S W in units of its factors."""
    x, y, _ = m
    if ORDER == "hla2":
        out = scale4(times(trans4(x), y, W, W, W), u[0] * u[1])
    elif ORDER == "ahla":
        out = scale4(times(trans4(x), trans4(y), W, W, W), u[0] * u[1])
    else:
        out = scale4(times(trans4(x), trans4(t), W, W, W), u[0] * u[1] * u[2])
    return out


@triton.jit
def half_weight(m, u, t, dm, pd, s, MOMENT: tl.constexpr, ORDER: tl.constexpr, W: tl.constexpr, dtype: tl.constexpr):
    """WP', WS, WC', WR' or WW, by the MOMENT, in a dtype; t = S W, pd = P dM' in units of their factors, s the scale
    of a moment times the unit of dM'."""
    x, y, z = m
    ux, uy, uz = u
    if MOMENT == "P":
        if ORDER == "hla3":
            w = scale4(times(dm, t, W, W, W), s * uy * uz)
        else:
            w = scale4(times(dm, y, W, W, W), s * uy)
    elif MOMENT == "S":
        if ORDER == "hla3":
            w = scale4(times_symmetric(z, pd, W, W), s * ux * uz)
        else:
            w = scale4(times_symmetric(x, dm, W, W), s * ux)
    elif MOMENT == "C":
        w = scale4(times(dm, y, W, W, W), s * uy)
    elif MOMENT == "R":
        w = scale4(times(x, dm, W, W, W), s * ux)
    else:
        w = scale4(times_symmetric(pd, y, W, W), s * ux * uy)
    return cast4(w, dtype)
