"""Matrices of two neighbouring heads: memory layout, and algebra with the float16 factors of `halves`.

A padded matrix takes AREA = (D1 + 2 E)**2 numbers, whole sectors, and has the channels of a second head in the order of
`loops.pairs`; a natural one is [D, D] in the order of the channels. Tensor cores read every operand A of a product in
shared memory, where Triton puts what was loaded: the assembler of Triton 3.6 reuses registers of such an operand too
early (Triton's pull request 11781). So factors go through memory, and nothing of one head waits for the other.
"""

import triton
import triton.language as tl

from ..loops.pairs import of_one, together
from ..maps import power_of_two
from ..tiles import cast4, scale4
from .halves import get_matrix, times, times_symmetric


@triton.jit
def get_pair(ptr, step, D1: tl.constexpr, D2: tl.constexpr):
    """Return the padded matrices of two heads, `step` numbers apart."""
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
    """Return the natural matrices of two heads, `step` numbers apart."""
    return together(get_natural(at, 0, D, D1), get_natural(at + step, 1, D, D1))


@triton.jit
def put_sums(to, m, factor, second, D: tl.constexpr, D1: tl.constexpr):
    """Write the sums of one head before `tiles.outer4_end` (block 22 may contain both heads) times a factor as a
    natural matrix, in the element type of `to`, without the exchange between threads in `outer4_end`."""
    c, e, own = channels(second, D, D1)
    E: tl.constexpr = D - D1
    i = tl.arange(0, 64)
    rows = D1 + i - second * D
    live = (i >= second * E) & (i < second * E + E)
    m = cast4(scale4(m, factor), to.dtype.element_ty)
    tl.store(to + c[:, None] * D + c[None, :], m[0])
    tl.store(to + c[:, None] * D + e[None, :], m[1], mask=own[None, :])
    tl.store(to + e[None, :] * D + c[:, None], m[2], mask=own[None, :])
    tl.store(to + rows[:, None] * D + e[None, :], m[3], mask=live[:, None] & own[None, :])


@triton.jit
def put_moment(m, big, scale, to, step, SQUARE: tl.constexpr, D: tl.constexpr, D1: tl.constexpr):
    """Write scale times a sum of two heads before `loops.pairs.end_outer`, the largest numbers of which are big, in
    float16 (`halves.half`), `step` numbers apart; returns the units."""
    ua = power_of_two(0.125 * tl.abs(scale) * big[0])
    ub = power_of_two(0.125 * tl.abs(scale) * big[1])
    put_sums(to, of_one(m, False, SQUARE), scale / ua, 0, D, D1)
    put_sums(to + step, of_one(m, True, SQUARE), scale / ub, 1, D, D1)
    return ua, ub


@triton.jit
def put_units(to, u):
    """Units of a factor of two heads, four numbers apart."""
    tl.store(to, u[0])
    tl.store(to + 4, u[1])


@triton.jit
def product(x, y, second, D: tl.constexpr, D1: tl.constexpr):
    """Return x y of natural matrices of one head."""
    D2: tl.constexpr = 2 * (D - D1)
    return times(get_natural(x, second, D, D1), get_natural(y, second, D, D1), D2, D2, D2)


@triton.jit
def unit_of(units, ORDER: tl.constexpr):
    """Return the unit of an operator, the product of the units of its factors."""
    u = tl.load(units) * tl.load(units + 1)
    if ORDER == 4:
        u *= tl.load(units + 2)
    return u


@triton.jit
def operators(factors, units, room, dtype: tl.constexpr, ORDER: tl.constexpr, D: tl.constexpr, D1: tl.constexpr):
    """M of two heads of higher order in a dtype from their factors, as four blocks each; room [2, D, D] of hla3, in
    float16."""
    AREA: tl.constexpr = D * D
    STEP: tl.constexpr = 3 * AREA if ORDER == 4 else 2 * AREA
    right = factors
    NEXT: tl.constexpr = AREA if ORDER == 4 else STEP
    if ORDER == 4:
        a = product(factors + 2 * AREA, factors, 0, D, D1)
        b = product(factors + STEP + 2 * AREA, factors + STEP, 1, D, D1)
        put_natural(room, a, 0, D, D1)
        put_natural(room + AREA, b, 1, D, D1)
        tl.debug_barrier()  # every thread reads what others wrote
        right = room
    a = product(factors + AREA, right, 0, D, D1)
    b = product(factors + STEP + AREA, right + NEXT, 1, D, D1)
    return (
        cast4(scale4(a, unit_of(units, ORDER)), dtype), cast4(scale4(b, unit_of(units + 4, ORDER)), dtype)
    )  # fmt: skip


@triton.jit
def put_weights(
    to, dm, s, factors, units, second: tl.constexpr, ORDER: tl.constexpr, D: tl.constexpr, D1: tl.constexpr
):
    """Write the weights of one head, WC', WS of hla2, WP', WR' of ahla or WP', WS, WW of hla3, from dM' in units of s,
    of hla3 the first of three matrices of room."""
    D2: tl.constexpr = 2 * (D - D1)
    AREA: tl.constexpr = D * D
    if ORDER == 4:
        put_third(to, dm, s, factors, units, second, D, D1)
    else:
        d = get_natural(dm, second, D, D1)
        x = get_natural(factors, second, D, D1)
        y = get_natural(factors + AREA, second, D, D1)
        ux = s * tl.load(units)
        uy = s * tl.load(units + 1)
        put_natural(to, scale4(times(d, y, D2, D2, D2), uy), second, D, D1)
        if ORDER == 2:
            w = times_symmetric(x, d, D2, D2)
        else:
            w = times(x, d, D2, D2, D2)
        put_natural(to + AREA, scale4(w, ux), second, D, D1)


@triton.jit
def put_third(to, room, s, factors, units, second: tl.constexpr, D: tl.constexpr, D1: tl.constexpr):
    """`put_weights` of hla3: S W and P dM' through memory, two matrices in registers at a time."""
    D2: tl.constexpr = 2 * (D - D1)
    AREA: tl.constexpr = D * D
    t, pd = room + AREA, room + 2 * AREA
    ux, uy, uz = s * tl.load(units), tl.load(units + 1), tl.load(units + 2)
    put_natural(t, product(factors + AREA, factors + 2 * AREA, second, D, D1), second, D, D1)
    tl.debug_barrier()
    put_natural(pd, product(factors, room, second, D, D1), second, D, D1)
    tl.debug_barrier()  # every thread reads what others wrote
    put_natural(to, scale4(product(room, t, second, D, D1), s * uy * uz), second, D, D1)
    tl.debug_barrier()
    x = get_natural(pd, second, D, D1)
    w = times_symmetric(get_natural(factors + 2 * AREA, second, D, D1), x, D2, D2)
    put_natural(to + AREA, scale4(w, ux * uz), second, D, D1)
    w = times_symmetric(x, get_natural(factors + AREA, second, D, D1), D2, D2)
    put_natural(to + 2 * AREA, scale4(w, ux * uy), second, D, D1)
