"""Matrices in float32 precision as two float16 matrices, and the algebra of `polynomial` with them.

Weights and the gradient of the coefficients.

d coefficients are linear in every factor. With A = A^ + a (A^ the float16 number next to it, a what is left of it)

    <dM, S C> = <S, dM^ C^'> + <c, S dM> + <dm, S C>,

up to terms of second order, so that only a product of A^s has to be exact, which tensor cores make it, and what the
rests add is a sum over products that the weights need anyway, to three digits.

Left factors are read from memory as they are: assemblers overwrite one that was computed in registers while a product
still reads it. Equations as in `algebra`.
"""

import triton
import triton.language as tl

from ...algebra import eye_of, less_mean
from ...maps import power_of_two
from ...tiles import (
    add4,
    axpy2,
    cast4,
    load4,
    load_vec,
    matvec,
    rank1,
    scale4,
    store4,
    store_vec,
    trans4,
    vecmat,
    zeros2,
)
from ..halves import get_matrix, half, largest_folded, put_matrix

REST = tl.constexpr(2.0**-11)  # unit of a rest over the unit of its matrix; both have the same largest number
P, S, C, R, W, RESTS = (tl.constexpr(i) for i in range(6))  # where a moment lies, in matrices; its rest RESTS behind it
DM, Z, T, REST_DM = (tl.constexpr(i) for i in range(4))  # dM, dM P' and c1 I + c3 R + c4 S W, likewise


@triton.jit
def digits(a, D2: tl.constexpr):
    """Return (a in units of u as float16, its rest in units of u REST, u)."""
    unit = power_of_two(0.125 * largest_folded(a, D2, D2))
    x = scale4(a, 1.0 / unit)
    hat = cast4(x, tl.float16)
    rest = add4(x, scale4(cast4(hat, tl.float32), -1.0), D2, D2)
    return hat, cast4(scale4(rest, 1.0 / REST), tl.float16), unit


@triton.jit
def put_digits(to, a, FAR: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr):
    """Write both matrices of `digits`, the second FAR matrices behind the first, and return the unit."""
    hat, rest, unit = digits(a, D2)
    put_matrix(to, hat, D1, D2)
    put_matrix(to + FAR * (D1 + D2) * (D1 + D2), rest, D1, D2)
    return unit


@triton.jit
def load(at, I: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr):
    """Matrix I of many."""
    return get_matrix(at + I * (D1 + D2) * (D1 + D2), D1, D2)


@triton.jit
def whole(at, I: tl.constexpr, unit, D1: tl.constexpr, D2: tl.constexpr):
    """Return a moment of `put_digits` in float32."""
    hat = cast4(load(at, I, D1, D2), tl.float32)
    return add4(scale4(hat, unit), scale4(cast4(load(at, I + RESTS, D1, D2), tl.float32), unit * REST), D2, D2)


@triton.jit
def add(a, b, c):
    """Return c + a b; a product that another one starts from is given to 8 warps in another way than that one."""
    return c + tl.dot(a, b, max_num_imprecise_acc=16)


@triton.jit
def product(a, b, D2: tl.constexpr):
    """a b in float32 for float16 matrices as they were loaded, or their transposes; block 21 by its transpose, whose
    64 rows make it a wgmma."""
    c11 = tl.dot(a[0], b[0])
    c12 = c11
    c21 = c11
    c22 = c11
    if D2 > 0:
        c11 = add(a[1], b[2], c11)
        c12 = add(a[1], b[3], tl.dot(a[0], b[1]))
        c21 = tl.trans(add(tl.trans(b[2]), tl.trans(a[3]), tl.dot(tl.trans(b[0]), tl.trans(a[2]))))
        c22 = add(a[3], b[3], tl.dot(a[2], b[1]))
    return c11, c12, c21, c22


@triton.jit
def settled(at, z, D2: tl.constexpr):
    """A `product` z, its block 22 by way of float32 memory at `at`: assemblers put the products of that block off until
    it is read, and their operands stay in registers."""
    z22 = z[3]
    if D2 > 0:
        i = tl.arange(0, D2)
        at = at.to(tl.pointer_type(tl.float32)) + i[:, None] * D2 + i[None, :]
        tl.store(at, z22)
        tl.debug_barrier()  # every thread reads what others wrote
        z22 = tl.load(at)
    return z[0], z[1], z[2], z22


@triton.jit
def symmetric(a, D2: tl.constexpr):
    """Return a + a'."""
    return add4(a, trans4(a), D2, D2)


@triton.jit
def total(x, D2: tl.constexpr):
    """Return the sum of a vector."""
    out = tl.sum(x[0])
    if D2 > 0:
        out += tl.sum(x[1])
    return out


@triton.jit
def inner(a, b, c, D2: tl.constexpr):
    """c <a, b>, a in any dtype: one number at once, because rows that wait for others keep both matrices alive."""
    x = tl.sum(a[0].to(tl.float32) * b[0], 1)
    y = x
    if D2 > 0:
        x += tl.sum(a[1].to(tl.float32) * b[1], 1)
        y = tl.sum(a[2].to(tl.float32) * b[2], 1) + tl.sum(a[3].to(tl.float32) * b[3], 1)
    return total((x, y), D2) * c


@triton.jit
def inner_whole(at, I: tl.constexpr, unit, b, D1: tl.constexpr, D2: tl.constexpr):
    """<a, b> of a moment a of `put_digits`; of two parts the rest is loaded when its number is done with."""
    if D2 == 0:
        out = inner(whole(at, I, unit, D1, D2), b, 1.0, D2)
    else:
        out = inner(load(at, I, D1, D2), b, unit, D2)
        tl.debug_barrier()
        out += inner(load(at, I + RESTS, D1, D2), b, unit * REST, D2)
    return out


@triton.jit
def put_weight(to, a, dtype: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr):
    """Write a matrix [D, D] in the dtype of the tokens."""
    store4(to, cast4(a, dtype), D, D1, D2, D, D1, D2, D, 1)


@triton.jit
def put_left(to, t, r, c, D1: tl.constexpr, D2: tl.constexpr):
    """Write c1 I + c3 R + c4 S W in float16, of t = S W and R; returns its unit."""
    t = add4(scale4(t, c[3]), scale4(r, c[2]), D2, D2)
    hat, unit = half(add4(t, scale4(eye_of(t), c[0]), D2, D2), D2, D2)
    put_matrix(to, hat, D1, D2)
    return unit


@triton.jit
def moment(kept, r, ur, KEPT: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr):
    """Return R: r, or with KEPT the saved one, which is loaded late to save registers."""
    out = r
    if KEPT:
        out = whole(kept, R, ur, D1, D2)
    return out


@triton.jit
def beside_ones(side, s, OFF: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr):
    """p1 = s sum k, q1 = s sum q, and the gradient of m1 of values that are centred, from side = (vectors, grads of
    `split.reduce_readout`, rows, the number of tokens)."""
    z = zeros2(D1, D2)
    return (
        axpy2(z, s, load_vec(side[0] + OFF[6], D, D1, D2), D2),
        axpy2(z, s, load_vec(side[0] + OFF[5], D, D1, D2), D2),
        load_vec(side[1] + D * D, D, D1, D2),
    )


@triton.jit
def first_products(
    kept, room, weights, dm, r, um, u, c, s, side, KEPT: tl.constexpr, OFF: tl.constexpr, WOFF: tl.constexpr,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Write WR', and Z = dM P' and the left factor of P in float16 to `room`, of the digits of moments in `kept` (R is
    r unless KEPT) and of dM in `room`. Returns what is known of d coefficients 1, 3 and 4 and the units of both. side:
    of a ratio `beside_ones`, whose ones are a column more of P and of dM; otherwise None."""
    up, us, _, ur, uw = u
    dc1 = inner_whole(kept, P, up, dm, D1, D2)
    tl.debug_barrier()  # or factors are loaded long before their products
    z = product(load(room, REST_DM, D1, D2), trans4(load(kept, P, D1, D2)), D2)
    z = settled(room + Z * (D1 + D2) * (D1 + D2), z, D2)
    z = add4(z, product(load(room, DM, D1, D2), trans4(load(kept, P + RESTS, D1, D2)), D2), D2, D2)
    z = settled(room + T * (D1 + D2) * (D1 + D2), z, D2)
    tl.debug_barrier()
    z = add4(product(load(room, DM, D1, D2), trans4(load(kept, P, D1, D2)), D2), scale4(z, REST), D2, D2)
    z = scale4(z, um * up)
    if side is not None:
        p1, _, d1 = beside_ones(side, s, OFF, D, D1, D2)
        z = rank1(z, d1, p1, D2, D2)
        dc1 += total((d1[0] * p1[0], d1[1] * p1[1]), D2)
    hz, uz = half(z, D2, D2)
    put_matrix(room + Z * (D1 + D2) * (D1 + D2), hz, D1, D2)
    if KEPT:
        dc3 = inner_whole(kept, R, ur, z, D1, D2)
    else:
        dc3 = inner(r, z, 1.0, D2)
    tl.debug_barrier()
    put_weight(weights + WOFF[3], trans4(scale4(z, s * c[2])), dtype, D, D1, D2)
    if D2 > 0:
        tl.debug_barrier()
    t = scale4(product(load(kept, S, D1, D2), load(kept, W, D1, D2), D2), us * uw)
    dc4 = inner(t, z, 1.0, D2)
    if D2 > 0:
        tl.debug_barrier()
    r = moment(kept, r, ur, KEPT, D1, D2)
    return dc1, dc3, dc4, uz, put_left(room + T * (D1 + D2) * (D1 + D2), t, r, c, D1, D2)


@triton.jit
def put_query_row(side, w, hs, c, OFF: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr):
    """Write what every dq receives by the column of ones, c S dm1 of float16 S, less what WC' at w gives the mean
    value."""
    row = matvec(cast4(hs, tl.float32), axpy2(zeros2(D1, D2), c, load_vec(side[1] + D * D, D, D1, D2), D2), D2, D2)
    store_vec(side[2], less_written(row, side, w, OFF, D, D1, D2), D, D1, D2)


@triton.jit
def put_key_row(side, w, ht, c, OFF: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr):
    """Likewise of dk: c T'dm1, and WP' at w. dv receives nothing."""
    row = vecmat(axpy2(zeros2(D1, D2), c, load_vec(side[1] + D * D, D, D1, D2), D2), cast4(ht, tl.float32), D2, D2)
    store_vec(side[2] + D, less_written(row, side, w, OFF, D, D1, D2), D, D1, D2)
    store_vec(side[2] + 2 * D, zeros2(D1, D2), D, D1, D2)


@triton.jit
def less_written(row, side, w, OFF: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr):
    """`less_mean` of a weight that was just written."""
    tl.debug_barrier()  # every thread reads what others wrote
    return less_mean(row, load4(w, D, D1, D2, D, D1, D2, D, 1), (side[0] + OFF[7], side[3], D), D1, D2)


@triton.jit
def second_products(
    kept, room, matrix, weights, um, uz, ut, u, c, s, side, PART: tl.constexpr, OFF: tl.constexpr, WOFF: tl.constexpr,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Write WW (PART 0), WS (1), WC' and WP' (2; of a ratio the rows of dq, dk, dv too) or M (3; a ratio has it).
    Returns what these add to d coefficients 2 and 4."""
    up, us, uc, _, uw = u
    if PART == 0:
        hs = load(kept, S, D1, D2)
        x = scale4(product(hs, load(room, Z, D1, D2), D2), us * uz)
        put_weight(weights + WOFF[4], symmetric(scale4(x, s * c[3]), D2), dtype, D, D1, D2)
        dc2 = 0.0
        dc4 = inner(load(kept, W + RESTS, D1, D2), x, uw * REST, D2)
    elif PART == 1:
        y = scale4(product(load(room, DM, D1, D2), trans4(load(kept, C, D1, D2)), D2), um * uc)
        if side is not None:
            _, q1, d1 = beside_ones(side, s, OFF, D, D1, D2)
            y = rank1(y, d1, q1, D2, D2)
        dc2 = inner_whole(kept, S, us, y, D1, D2)
        y = scale4(y, s * c[1])
        tl.debug_barrier()
        x = scale4(product(load(kept, W, D1, D2), trans4(load(room, Z, D1, D2)), D2), uw * uz)
        dc4 = inner(load(kept, S + RESTS, D1, D2), x, us * REST, D2)
        put_weight(weights + WOFF[1], symmetric(add4(y, scale4(x, s * c[3]), D2, D2), D2), dtype, D, D1, D2)
    elif PART == 2:
        x = scale4(product(load(kept, S, D1, D2), load(room, DM, D1, D2), D2), us * um)
        dc2 = inner(load(kept, C + RESTS, D1, D2), x, uc * REST, D2)
        dc4 = 0.0
        put_weight(weights + WOFF[2], trans4(scale4(x, s * c[1])), dtype, D, D1, D2)
        if side is not None:
            put_query_row(side, weights + WOFF[2], load(kept, S, D1, D2), s * us * c[1], OFF, D, D1, D2)
        tl.debug_barrier()
        x = scale4(product(trans4(load(room, DM, D1, D2)), load(room, T, D1, D2), D2), s * um * ut)
        put_weight(weights + WOFF[0], x, dtype, D, D1, D2)
        if side is not None:
            put_key_row(side, weights + WOFF[0], load(room, T, D1, D2), s * ut, OFF, D, D1, D2)
    else:
        x = scale4(product(load(kept, S, D1, D2), load(kept, C, D1, D2), D2), us * uc)
        dc2 = inner(load(room, REST_DM, D1, D2), x, um * REST, D2)
        dc4 = 0.0
        tl.debug_barrier()
        if side is None:
            y = scale4(product(load(room, T, D1, D2), load(kept, P, D1, D2), D2), ut * up)
            put_weight(matrix, add4(y, scale4(x, c[1]), D2, D2), dtype, D, D1, D2)
    return dc2, dc4


@triton.jit
def mixed_gradient(
    kept, room, matrix, weights, dm, r, um, u, c, s, side, KEPT: tl.constexpr, OFF: tl.constexpr, WOFF: tl.constexpr,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Write M to `matrix` and WP', WS, WC', WR', WW to `weights`, in a dtype; returns d coefficients. r is
    R unless KEPT; side as in `first_products`."""
    tl.debug_barrier()  # every thread reads what others wrote
    dc1, dc3, dc4, uz, ut = first_products(
        kept, room, weights, dm, r, um, u, c, s, side, KEPT, OFF, WOFF, D, D1, D2, dtype
    )
    tl.debug_barrier()
    dc2 = 0.0
    for part in tl.static_range(4):
        x2, x4 = second_products(
            kept, room, matrix, weights, um, uz, ut, u, c, s, side, part, OFF, WOFF, D, D1, D2, dtype
        )  # fmt: skip
        dc2 += x2
        dc4 += x4
    return dc1, dc2, dc3, dc4
