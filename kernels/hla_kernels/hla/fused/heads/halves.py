"""D x D algebra of one head with float16 factors.

As accurate as tf32, with half the registers and shared memory.

Each moment has a separate unit, a power of two, in which its largest number is about 8. Products of two matrices of up
to 80 rows are then in the range of float16, and so are entries down to 2**-17 of the largest one. Blocks as in
`tiles`, equations as in `algebra`; F = V, P, C and M are [F, V], dM' is [V, F].
"""

import triton
import triton.language as tl

from ..algebra import largest
from ..tiles import cast4, load_block, power_of_two, scale4, store_block, trans4


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
def largest_sum(a):
    """`algebra.largest` of sums of 64 and up to 16 more rows and columns before `tiles.outer4_end`: threads exchange
    their largest numbers alone."""
    x = tl.max(tl.reshape(tl.abs(a[0]), [a[0].shape[0], a[0].shape[1] // 16, 16]), 1)
    x = tl.maximum(tl.maximum(x, tl.abs(a[1])), tl.maximum(tl.abs(a[2]), tl.abs(a[3])))
    return tl.max(tl.max(x, 1), 0)


@triton.jit
def half(a, A: tl.constexpr, B: tl.constexpr):
    """Return (a in units of u as float16, u)."""
    unit = power_of_two(0.125 * largest_folded(a, A, B))
    return cast4(scale4(a, 1.0 / unit), tl.float16), unit


@triton.jit
def factors_of(m, ORDER: tl.constexpr):
    """Return the moments that an order multiplies: (C, S), (P, R) or (P, S, W), three of either."""
    if ORDER == 2:
        out = (m[2], m[1], m[1])
    elif ORDER == 3:
        out = (m[0], m[3], m[3])
    else:
        out = (m[0], m[1], m[4])
    return out


@triton.jit
def put_matrix(to, a, W: tl.constexpr, ROWS: tl.constexpr = None):
    """Write a square matrix of ROWS rows, if not of all D1 + D2: whole sectors of memory."""
    N: tl.constexpr = W.D1 + W.D2 if ROWS is None else ROWS
    store_block(to, a[0], 0, W.D1, 0, W.D1, N, N, N, 1)
    if W.D2 > 0:
        store_block(to, a[1], 0, W.D1, W.D1, W.D2, N, N, N, 1)
        store_block(to, a[2], W.D1, W.D2, 0, W.D1, N, N, N, 1)
        store_block(to, a[3], W.D1, W.D2, W.D1, W.D2, N, N, N, 1)


@triton.jit
def get_matrix(at, W: tl.constexpr, ROWS: tl.constexpr = None):
    """Inverse of `put_matrix`."""
    N: tl.constexpr = W.D1 + W.D2 if ROWS is None else ROWS
    m11 = load_block(at, 0, W.D1, 0, W.D1, N, N, N, 1)
    out = (m11, m11, m11, m11)
    if W.D2 > 0:
        m12 = load_block(at, 0, W.D1, W.D1, W.D2, N, N, N, 1)
        m21 = load_block(at, W.D1, W.D2, 0, W.D1, N, N, N, 1)
        out = (m11, m12, m21, load_block(at, W.D1, W.D2, W.D1, W.D2, N, N, N, 1))
    return out


@triton.jit
def put_sums(to, m, factor, W: tl.constexpr):
    """Write sums of two blocks of columns before `tiles.outer4_end` times a factor as a matrix [D, D], in the element
    type of `to`, without the exchange between threads in `outer4_end`."""
    E: tl.constexpr = W.D - W.D1
    c = tl.arange(0, W.D1)
    e = W.D1 + tl.arange(0, 2 * E)
    i = tl.arange(0, 64)
    own = (tl.arange(0, 2 * E) < E)[None, :]
    m = cast4(scale4(m, factor), to.dtype.element_ty)
    tl.store(to + c[:, None] * W.D + c[None, :], m[0])
    tl.store(to + c[:, None] * W.D + e[None, :], m[1], mask=own)
    tl.store(to + e[None, :] * W.D + c[:, None], m[2], mask=own)
    tl.store(to + (W.D1 + i)[:, None] * W.D + e[None, :], m[3], mask=(i < E)[:, None] & own)


@triton.jit
def put_factors(to, units, m, u, ORDER: tl.constexpr, W: tl.constexpr):
    """Write factors [2 or 3, D1 + D2, D1 + D2] and three units."""
    AREA: tl.constexpr = (W.D1 + W.D2) * (W.D1 + W.D2)
    put_matrix(to, m[0], W)
    put_matrix(to + AREA, m[1], W)
    if ORDER == 4:
        put_matrix(to + 2 * AREA, m[2], W)
    put_three(units, u)


@triton.jit
def put_three(units, u):
    """Write the units of three factors."""
    tl.store(units, u[0])
    tl.store(units + 1, u[1])
    tl.store(units + 2, u[2])


@triton.jit
def get_factors(at, units, ORDER: tl.constexpr, W: tl.constexpr):
    """Inverse of `put_factors`."""
    AREA: tl.constexpr = (W.D1 + W.D2) * (W.D1 + W.D2)
    x = get_matrix(at, W)
    y = get_matrix(at + AREA, W)
    z = y
    if ORDER == 4:
        z = get_matrix(at + 2 * AREA, W)
    return (x, y, z), (tl.load(units), tl.load(units + 1), tl.load(units + 2))


@triton.jit
def again(at, a, W: tl.constexpr):
    """Return a matrix as a float16 factor by way of memory, so that tensor cores do not read it from registers (the
    assembler of Triton 3.6 is known to corrupt such operands)."""
    put_matrix(at, cast4(a, tl.float16), W)
    tl.debug_barrier()  # every thread reads what others wrote
    return get_matrix(at, W)


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
    if ORDER == 2:
        out = scale4(times(trans4(x), y, W, W, W), u[0] * u[1])
    elif ORDER == 3:
        out = scale4(times(trans4(x), trans4(y), W, W, W), u[0] * u[1])
    else:
        out = scale4(times(trans4(x), trans4(t), W, W, W), u[0] * u[1] * u[2])
    return out


@triton.jit
def half_weight(m, u, t, dm, pd, s, NAME: tl.constexpr, ORDER: tl.constexpr, W: tl.constexpr, dtype: tl.constexpr):
    """WP', WS, WC', WR' or WW (NAME 0 .. 4) of `algebra.weights` in a dtype; t = S W, pd = P dM' in units of their
    factors, s the scale of a moment times the unit of dM'."""
    x, y, z = m
    ux, uy, uz = u
    if NAME == 0:
        if ORDER == 4:
            w = scale4(times(dm, t, W, W, W), s * uy * uz)
        else:
            w = scale4(times(dm, y, W, W, W), s * uy)
    elif NAME == 1:
        if ORDER == 4:
            w = scale4(times_symmetric(z, pd, W, W), s * ux * uz)
        else:
            w = scale4(times_symmetric(x, dm, W, W), s * ux)
    elif NAME == 2:
        w = scale4(times(dm, y, W, W, W), s * uy)
    elif NAME == 3:
        w = scale4(times(x, dm, W, W, W), s * ux)
    else:
        w = scale4(times_symmetric(pd, y, W, W), s * ux * uy)
    return cast4(w, dtype)


@triton.jit
def symmetric(x):
    """Return x + x'."""
    return x + tl.trans(x)


@triton.jit
def loaded_operator(m, u, ORDER: tl.constexpr):
    """Return M = S C, R P or S (W P) of factors of one block, as they were loaded."""
    x, y, z = m[0][0], m[1][0], m[2][0]
    if ORDER == 4:
        out = tl.dot(y, tl.dot(z, x).to(tl.float16)) * (u[0] * u[1] * u[2])
    else:
        out = tl.dot(y, x) * (u[0] * u[1])
    return out


@triton.jit
def loaded_weights(m, u, dm, s, ORDER: tl.constexpr, dtype: tl.constexpr):
    """`half_weight` of factors of one block, as they were loaded: (WC, WS), (WP, WR') or (WP, WS, WW), three of either,
    in a dtype: one of them is float32 at a time. WP = W (S dM) where `half_weight` has dM' (S W): what was computed
    here is operand B alone, which tensor cores read in shared memory (the assembler that Triton 3.6 has is known to
    corrupt operand A in registers)."""
    x, y, z = m[0][0], m[1][0], m[2][0]
    ux, uy, uz = u
    if ORDER == 2:
        a = (tl.dot(y, tl.trans(dm)) * (s * uy)).to(dtype)
        b = (symmetric(tl.dot(x, dm)) * (s * ux)).to(dtype)
        c = b
    elif ORDER == 3:
        a = (tl.dot(tl.trans(y), tl.trans(dm)) * (s * uy)).to(dtype)
        b = (tl.dot(x, dm) * (s * ux)).to(dtype)
        c = b
    else:
        a = (tl.dot(z, tl.dot(y, tl.trans(dm)).to(tl.float16)) * (s * uy * uz)).to(dtype)
        pd = tl.dot(x, dm).to(tl.float16)
        b = (symmetric(tl.dot(z, pd)) * (s * ux * uz)).to(dtype)
        c = (symmetric(tl.dot(y, tl.trans(pd))) * (s * ux * uy)).to(dtype)
    return a, b, c


@triton.jit
def loaded_products(factors, units, dm, scale, ORDER: tl.constexpr, W: tl.constexpr, dtype: tl.constexpr):
    """M' and (WP', WS, WC', WR', WW), as far as the order has them, in a dtype: `loaded_operator` and `loaded_weights`
    of factors that were kept and dM' of one block."""
    m, u = get_factors(factors, units, ORDER, W)
    out = tl.trans(loaded_operator(m, u, ORDER).to(dtype))
    dm, unit = half(dm, W, W)
    a, b, c = loaded_weights(m, u, dm[0], scale * unit, ORDER, dtype)
    a = tl.trans(a)
    a = (a, a, a, a)
    b = (b, b, b, b)
    return (out, out, out, out), (a, b, a, b, (c, c, c, c))
