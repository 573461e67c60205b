"""Matrices of two neighbouring heads: how memory keeps them, and the algebra with the float16 factors of `halves`.

A padded matrix takes AREA = (D1 + 2 E)**2 numbers, whole sectors, and has the channels of a second head in the order of
`loops.pairs`; a natural one is [D, D] in the order of the channels. Tensor cores read every operand A of a product in
shared memory, where Triton puts what was loaded: the assembler of Triton 3.6 reuses registers of such an operand too
early (Triton's pull request 11781). So factors go through memory, and nothing of one head waits for the other.
"""

import triton
import triton.language as tl

from ..loops.pairs import alone, together
from ..maps import power_of_two
from ..tiles import cast4, scale4, trans4
from .halves import get_matrix, times, times_symmetric


@triton.jit
def get_pair(ptr, step, D1: tl.constexpr, D2: tl.constexpr):
    """The padded matrices of two heads, `step` numbers apart."""
    return together(get_matrix(ptr, D1, D2), get_matrix(ptr + step, D1, D2))


@triton.jit
def channels(second, D: tl.constexpr, D1: tl.constexpr):
    """`loops.pairs.ends` of the first (0) or the second head (1), known when the program runs."""
    E: tl.constexpr = D - D1
    e = tl.arange(0, 2 * E)
    return second * E + tl.arange(0, D1), D1 + e - second * D, (e < E) != (second == 1)


@triton.jit
def get_natural(at, second, D: tl.constexpr, D1: tl.constexpr):
    """Four blocks of a natural matrix; what is not the head's own is zero."""
    c, e, own = channels(second, D, D1)
    a11 = tl.load(at + c[:, None] * D + c[None, :])
    a12 = tl.load(at + c[:, None] * D + e[None, :], mask=own[None, :], other=0.0)
    a21 = tl.load(at + e[:, None] * D + c[None, :], mask=own[:, None], other=0.0)
    return a11, a12, a21, tl.load(at + e[:, None] * D + e[None, :], mask=own[:, None] & own[None, :], other=0.0)


@triton.jit
def put_natural(to, a, second, D: tl.constexpr, D1: tl.constexpr):
    """Inverse of `get_natural`, in the element type of `to`."""
    c, e, own = channels(second, D, D1)
    a = cast4(a, to.dtype.element_ty)
    tl.store(to + c[:, None] * D + c[None, :], a[0])
    tl.store(to + c[:, None] * D + e[None, :], a[1], mask=own[None, :])
    tl.store(to + e[:, None] * D + c[None, :], a[2], mask=own[:, None])
    tl.store(to + e[:, None] * D + e[None, :], a[3], mask=own[:, None] & own[None, :])


@triton.jit
def natural_pair(at, step, D: tl.constexpr, D1: tl.constexpr):
    """The natural matrices of two heads, `step` numbers apart."""
    return together(get_natural(at, 0, D, D1), get_natural(at + step, 1, D, D1))


@triton.jit
def half_own(m, scale, big, SECOND: tl.constexpr, D: tl.constexpr, D1: tl.constexpr):
    """`halves.half` of the first or the second of two matrices of sums, whose largest number is big, times scale."""
    unit = power_of_two(0.125 * tl.abs(scale) * big)
    return cast4(scale4(alone(m, 1.0, SECOND, D, D1), scale / unit), tl.float16), unit


@triton.jit
def put_moment(m, big, scale, to, step, units, TURN: tl.constexpr, D: tl.constexpr, D1: tl.constexpr):
    """Write a moment of two heads, TURN: transposed, as a factor, `step` numbers apart, and its units, four apart."""
    a, ua = half_own(m, scale, big[0], False, D, D1)
    b, ub = half_own(m, scale, big[1], True, D, D1)
    if TURN:
        a = trans4(a)
        b = trans4(b)
    put_natural(to, a, 0, D, D1)
    put_natural(to + step, b, 1, D, D1)
    tl.store(units, ua)
    tl.store(units + 4, ub)


@triton.jit
def operator_of(factors, units, second, dtype: tl.constexpr, D: tl.constexpr, D1: tl.constexpr):
    """M of one head of hla2 or ahla in a dtype from its factors."""
    x = get_natural(factors, second, D, D1)
    y = get_natural(factors + D * D, second, D, D1)
    D2: tl.constexpr = 2 * (D - D1)
    return cast4(scale4(times(y, x, D2, D2, D2), tl.load(units) * tl.load(units + 1)), dtype)


@triton.jit
def put_weights(
    to, dm, s, factors, units, second: tl.constexpr, ORDER: tl.constexpr, D: tl.constexpr, D1: tl.constexpr
):
    """Write both weights of one head from dM' in units of s."""
    D2: tl.constexpr = 2 * (D - D1)
    d = get_natural(dm, second, D, D1)
    x = get_natural(factors, second, D, D1)
    y = get_natural(factors + D * D, second, D, D1)
    ux = s * tl.load(units)
    uy = s * tl.load(units + 1)
    put_natural(to, scale4(times(d, y, D2, D2, D2), uy), second, D, D1)
    if ORDER == 2:
        w = times_symmetric(x, d, D2, D2)
    else:
        w = times(x, d, D2, D2, D2)
    put_natural(to + D * D, scale4(w, ux), second, D, D1)
