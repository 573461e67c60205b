"""The D x D algebra of two neighbouring heads, one head after the other, with the float16 factors of `halves`.

Tensor cores read every operand A of a product in shared memory: the assembler of Triton 3.6 reuses registers of such an
operand too early (Triton's pull request 11781). Triton puts there what was loaded and what a turn of a loop hands to
the next one, so the heads are turns of a loop. A matrix of a head takes AREA numbers; the second head has its channels
in the order of `loops.pairs`.
"""

import triton
import triton.language as tl

from ..loops.pairs import alone, together
from ..maps import power_of_two
from ..tiles import cast4, scale4, trans4
from .halves import get_matrix, put_matrix, times, times_symmetric


@triton.jit
def get_pair(ptr, step, D1: tl.constexpr, D2: tl.constexpr):
    """The matrices of two heads, `step` numbers apart."""
    return together(get_matrix(ptr, D1, D2), get_matrix(ptr + step, D1, D2))


@triton.jit
def half_own(m, scale, big, SECOND: tl.constexpr, D: tl.constexpr, D1: tl.constexpr):
    """`halves.half` of the first or the second of two matrices of sums, whose largest number is big, times scale."""
    unit = power_of_two(0.125 * tl.abs(scale) * big)
    return cast4(scale4(alone(m, 1.0, SECOND, D, D1), scale / unit), tl.float16), unit


@triton.jit
def put_cast(to, m, c, dtype: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr):
    """Write c m in a dtype."""
    put_matrix(to, cast4(scale4(m, c), dtype), D1, D2)


@triton.jit
def two_operators(
    xa, xb, ca, cb, matrix, factors, SAVE: tl.constexpr, dtype: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    AREA: tl.constexpr,
):  # fmt: skip
    """Write M of both heads in a dtype from their factors (C, S) or (P, R'), S and R' from memory, in units whose
    products are c: M' = C' S or P' R'. SAVE: C or P too."""
    x, c = xa, ca
    for second in tl.range(2, num_stages=1):
        own = factors + second * 2 * AREA
        y = get_matrix(own + AREA, D1, D2)
        put_cast(matrix + second * AREA, trans4(times(trans4(x), y, D2, D2, D2)), c, dtype, D1, D2)
        if SAVE:
            put_matrix(own, x, D1, D2)
        x, c = xb, cb


@triton.jit
def put_operators(
    x, y, big, scale, matrix, factors, units, SAVE: tl.constexpr, dtype: tl.constexpr, D: tl.constexpr,
    D1: tl.constexpr, AREA: tl.constexpr,
):  # fmt: skip
    """Write M of two heads in a dtype from sums (C, S) or (P, R'), and `two_operators`' factors and units."""
    D2: tl.constexpr = 2 * (D - D1)
    a, ya = half_own(y, scale, big[1][0], False, D, D1)
    put_matrix(factors + AREA, a, D1, D2)
    b, yb = half_own(y, scale, big[1][1], True, D, D1)
    put_matrix(factors + 3 * AREA, b, D1, D2)
    tl.store(units + 1, ya)
    tl.store(units + 5, yb)
    xa, ua = half_own(x, scale, big[0][0], False, D, D1)
    xb, ub = half_own(x, scale, big[0][1], True, D, D1)
    tl.store(units, ua)
    tl.store(units + 4, ub)
    tl.debug_barrier()  # every thread reads what others wrote
    two_operators(xa, xb, ua * ya, ub * yb, matrix, factors, SAVE, dtype, D1, D2, AREA)


@triton.jit
def put_weights(
    to, dm, s, factors, units, ORDER: tl.constexpr, dtype: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    AREA: tl.constexpr,
):  # fmt: skip
    """Of one head, write WC', WS of hla2 or WP', WR of ahla in a dtype; dm = dM' in its unit, s the scale of a moment
    times that unit; factors and units as `heads.pairs.forward_pairs` kept them."""
    x = get_matrix(factors, D1, D2)
    ux = tl.load(units)
    uy = tl.load(units + 1)
    if ORDER == 2:
        put_cast(to, times(dm, get_matrix(factors + AREA, D1, D2), D2, D2, D2), s * uy, dtype, D1, D2)
        put_cast(to + AREA, times_symmetric(x, dm, D2, D2), s * ux, dtype, D1, D2)
    else:
        y = trans4(get_matrix(factors + AREA, D1, D2))  # R
        put_cast(to, times(dm, y, D2, D2, D2), s * uy, dtype, D1, D2)
        put_cast(to + AREA, times(x, dm, D2, D2, D2), s * ux, dtype, D1, D2)


@triton.jit
def two_weights(
    to, room, dm, big, scale, factors, units, ORDER: tl.constexpr, dtype: tl.constexpr, D: tl.constexpr,
    D1: tl.constexpr, AREA: tl.constexpr,
):  # fmt: skip
    """`put_weights` of both heads from sums dM', those of the second one through memory."""
    D2: tl.constexpr = 2 * (D - D1)
    x, ux = half_own(dm, 1.0, big[0], False, D, D1)
    xb, ub = half_own(dm, 1.0, big[1], True, D, D1)
    put_matrix(room + AREA, xb, D1, D2)
    tl.debug_barrier()  # every thread reads what others wrote
    for second in tl.range(2, num_stages=1):
        put_weights(
            to + second * 2 * AREA, x, scale * ux, factors + second * 2 * AREA, units + second * 4, ORDER, dtype, D1,
            D2, AREA,
        )  # fmt: skip
        x, ux = get_matrix(room + AREA, D1, D2), ub
