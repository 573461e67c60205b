"""Products and inner products of float16 matrices of a head, and what is made of them.

Left factors are read from memory as they are: assemblers overwrite one that was computed in registers while a product
still reads it. Equations as in `algebra`.
"""

import triton
import triton.language as tl

from ...algebra import eye_of, less_mean
from ...tiles import (
    add4,
    axpy2,
    cast4,
    load4,
    load_vec,
    matvec,
    scale4,
    store4,
    store_vec,
    trans4,
    vecmat,
    zeros2,
)
from ..halves import get_matrix, half, put_matrix

P, S, C, R, W, T = (tl.constexpr(i) for i in range(6))  # where a moment lies, and T = c1 I + c3 R + c4 S W


@triton.jit
def load(at, I: tl.constexpr, F: tl.constexpr):
    """Matrix I of many."""
    return get_matrix(at + I * (F.D1 + F.D2) * (F.D1 + F.D2), F)


@triton.jit
def add(a, b, c):
    """Return c + a b; a product that another one starts from is given to 8 warps in another way than that one."""
    return c + tl.dot(a, b, max_num_imprecise_acc=16)


@triton.jit
def product(a, b, F: tl.constexpr):
    """a b in float32 for float16 matrices as they were loaded, or their transposes; block 21 by its transpose, whose
    64 rows make it a wgmma."""
    c11 = tl.dot(a[0], b[0])
    c12 = c11
    c21 = c11
    c22 = c11
    if F.D2 > 0:
        c11 = add(a[1], b[2], c11)
        c12 = add(a[1], b[3], tl.dot(a[0], b[1]))
        c21 = tl.trans(add(tl.trans(b[2]), tl.trans(a[3]), tl.dot(tl.trans(b[0]), tl.trans(a[2]))))
        c22 = add(a[3], b[3], tl.dot(a[2], b[1]))
    return c11, c12, c21, c22


@triton.jit
def symmetric(a, F: tl.constexpr):
    """Return a + a'."""
    return add4(a, trans4(a), F, F)


@triton.jit
def total(x, F: tl.constexpr):
    """Return the sum of a vector."""
    out = tl.sum(x[0])
    if F.D2 > 0:
        out += tl.sum(x[1])
    return out


@triton.jit
def inner(a, b, c, F: tl.constexpr):
    """c <a, b>, a in any dtype: one number at once, because rows that wait for others keep both matrices alive."""
    x = tl.sum(a[0].to(tl.float32) * b[0], 1)
    y = x
    if F.D2 > 0:
        x += tl.sum(a[1].to(tl.float32) * b[1], 1)
        y = tl.sum(a[2].to(tl.float32) * b[2], 1) + tl.sum(a[3].to(tl.float32) * b[3], 1)
    return total((x, y), F) * c


@triton.jit
def put_weight(to, a, dtype: tl.constexpr, F: tl.constexpr):
    """Write a matrix [D, D] in the dtype of the tokens."""
    store4(to, cast4(a, dtype), F, F, F.D, 1)


@triton.jit
def put_left(to, t, r, c, F: tl.constexpr):
    """Write c1 I + c3 R + c4 S W in float16, of t = S W and R; returns its unit."""
    t = add4(scale4(t, c[3]), scale4(r, c[2]), F, F)
    hat, unit = half(add4(t, scale4(eye_of(t), c[0]), F, F), F, F)
    put_matrix(to, hat, F)
    return unit


@triton.jit
def beside_ones(side, s, L: tl.constexpr, F: tl.constexpr):
    """p1 = s sum k, q1 = s sum q, and the gradient of m1 of values that are centred, from side = (vectors, grads of
    `split.reduce_readout`, rows, the number of tokens); side is None unless the call is a ratio."""
    z = zeros2(F)
    return (
        axpy2(z, s, load_vec(side[0] + L.SUM_K, F), F), axpy2(z, s, load_vec(side[0] + L.SUM_Q, F), F),
        load_vec(side[1] + F.D * F.D, F),
    )  # fmt: skip


@triton.jit
def put_query_row(side, w, hs, c, L: tl.constexpr, F: tl.constexpr):
    """Write what every dq receives by the column of ones, c S dm1 of float16 S, less what WC' at w gives the mean
    value."""
    row = matvec(cast4(hs, tl.float32), axpy2(zeros2(F), c, load_vec(side[1] + F.D * F.D, F), F), F, F)
    store_vec(side[2], less_written(row, side, w, L, F), F)


@triton.jit
def put_key_row(side, w, ht, c, L: tl.constexpr, F: tl.constexpr):
    """Likewise of dk: c T'dm1, and WP' at w. dv receives nothing."""
    row = vecmat(axpy2(zeros2(F), c, load_vec(side[1] + F.D * F.D, F), F), cast4(ht, tl.float32), F, F)
    store_vec(side[2] + F.D, less_written(row, side, w, L, F), F)
    store_vec(side[2] + 2 * F.D, zeros2(F), F)


@triton.jit
def less_written(row, side, w, L: tl.constexpr, F: tl.constexpr):
    """`less_mean` of a weight that was just written."""
    tl.debug_barrier()  # every thread reads what others wrote
    return less_mean(row, load4(w, F, F, F.D, 1), (side[0] + L.SUM_V, side[3]), F)


@triton.jit
def trace(a, F: tl.constexpr):
    """Return the sum of the diagonal."""
    return inner(eye_of(a), a, 1.0, F)
