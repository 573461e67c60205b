"""The D x D algebra of hla2 and ahla from the float16 factors of `pairs`, one program a head.

What is operand A of a product is loaded for it: tensor cores then read it in shared memory. The assembler of Triton 3.6
reuses registers of such an operand too early (Triton's pull request 11781). Equations as in `algebra`.
"""

import triton
import triton.language as tl

from ..loops import means
from ..tiles import load4, scale4, store4


@triton.jit
def load_factor(ptr, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr):
    """A [D, D] matrix as four blocks."""
    return load4(ptr, D, D1, D2, D, D1, D2, D, 1)


@triton.jit
def store_factor(ptr, m, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr):
    """Inverse of load_factor."""
    store4(ptr, m, D, D1, D2, D, D1, D2, D, 1)


@triton.jit
def times(a, b):
    """a b for a as it was loaded."""
    c11 = tl.dot(a[1], b[2], tl.dot(a[0], b[0]))
    c12 = tl.dot(a[1], b[3], tl.dot(a[0], b[1]))
    c21 = tl.dot(a[3], b[2], tl.dot(a[2], b[0]))
    return c11, c12, c21, tl.dot(a[3], b[3], tl.dot(a[2], b[1]))


@triton.jit
def symmetric(m):
    """m + m'."""
    m12 = m[1] + tl.trans(m[2])
    return m[0] + tl.trans(m[0]), m12, tl.trans(m12), m[3] + tl.trans(m[3])


@triton.jit
def factor_operator(factors, units, matrix, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr):
    """M of every head from its factors: S C or R P."""
    head = tl.program_id(0).to(tl.int64)
    factors += head * 2 * D * D
    units += head * 4
    x = load_factor(factors, D, D1, D2)
    y = load_factor(factors + D * D, D, D1, D2)
    store_factor(matrix + head * D * D, scale4(times(y, x), tl.load(units) * tl.load(units + 1)), D, D1, D2)


@triton.jit(do_not_specialize=["N", "scale"])
def factor_weights(
    factors, gradient, units, weights, N, scale, ORDER: tl.constexpr, D: tl.constexpr, D1: tl.constexpr,
    D2: tl.constexpr, WOFF: tl.constexpr, KW: tl.constexpr,
):  # fmt: skip
    """The weights [B * H, KW] of every head at WOFF (`spec.layout`) from its factors and dM'."""
    head = tl.program_id(0).to(tl.int64)
    _, scale = means(N, head, scale)
    factors += head * 2 * D * D
    units += head * 4
    weights += head * KW
    x = load_factor(factors, D, D1, D2)
    y = load_factor(factors + D * D, D, D1, D2)
    dm = load_factor(gradient + head * D * D, D, D1, D2)
    scale *= tl.load(units + 3)
    ux = scale * tl.load(units)
    uy = scale * tl.load(units + 1)
    if ORDER == 2:
        store_factor(weights + WOFF[2], scale4(times(dm, y), uy), D, D1, D2)
        store_factor(weights + WOFF[1], scale4(symmetric(times(x, dm)), ux), D, D1, D2)
    else:
        store_factor(weights + WOFF[0], scale4(times(dm, y), uy), D, D1, D2)
        store_factor(weights + WOFF[3], scale4(times(x, dm), ux), D, D1, D2)
