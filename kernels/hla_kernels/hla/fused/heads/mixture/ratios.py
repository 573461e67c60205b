"""Operator of `polynomial` as a ratio of features, from the saved moments of `mixture_moments`."""

import triton
import triton.language as tl

from ...algebra import anchor, eye_of
from ...loops import span
from ...tiles import add4, axpy2, cast4, load4, load_vec, matvec, rank1, scale4, store4, store_vec, zeros2
from .. import load_coefficients
from ..halves import half, put_matrix
from .digits import REST, RESTS, C, P, R, S, W, load, product, put_digits, settled, whole
from .kept import load_units


@triton.jit
def product_of(
    a, b, unit, spare, A: tl.constexpr, B: tl.constexpr, RA: tl.constexpr, RB: tl.constexpr, DIGITS: tl.constexpr,
    D1: tl.constexpr, D2: tl.constexpr,
):  # fmt: skip
    """Matrix A of a times matrix B of b in units of their units; DIGITS: with their rests RA and RB behind them, and
    spare memory of a matrix."""
    if DIGITS:  # the barriers keep factors from being loaded long before their products
        out = settled(spare, product(load(a, A + RA, D1, D2), load(b, B, D1, D2), D2), D2)
        tl.debug_barrier()
        out = add4(out, product(load(a, A, D1, D2), load(b, B + RB, D1, D2), D2), D2, D2)
        out = settled(spare + 2 * D2 * D2, out, D2)
        tl.debug_barrier()
        out = add4(product(load(a, A, D1, D2), load(b, B, D1, D2), D2), scale4(out, REST), D2, D2)
    else:
        out = product(load(a, A, D1, D2), load(b, B, D1, D2), D2)
    return scale4(out, unit)


@triton.jit
def moment_of(kept, I: tl.constexpr, unit, DIGITS: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr):
    """Return a moment in float32."""
    if DIGITS:
        out = whole(kept, I, unit, D1, D2)
    else:
        out = scale4(cast4(load(kept, I, D1, D2), tl.float32), unit)
    return out


@triton.jit(do_not_specialize=["N", "H", "scale"])
def ratio_operator(
    kept, units, room, vectors, matrix, coefficients, N, H, scale, OFF: tl.constexpr, K: tl.constexpr, D: tl.constexpr,
    F1: tl.constexpr, F2: tl.constexpr, KF: tl.constexpr, KR: tl.constexpr, DIGITS: tl.constexpr,
):  # fmt: skip
    """Compute M - m1 a' of every head, and m1 and vbar + a, with a of `algebra.anchor`, in its vectors. room: memory
    for three matrices; without DIGITS the left factor of P overwrites R."""
    pid = tl.program_id(0)
    head = pid.to(tl.int64)
    _, N, scale = span(N, pid // H, pid, scale)
    kept += head * KF
    units += head * 8
    room += head * KR
    spare = room + 2 * (F1 + F2) * (F1 + F2)
    vectors += head * K
    up, us, uc, ur, uw = load_units(units)
    c = load_coefficients(coefficients, pid % H, 5)
    z = zeros2(F1, F2)
    p = moment_of(kept, P, up, DIGITS, F1, F2)
    sums = (z, load_vec(vectors + OFF[6], D, F1, F2), z)
    q1 = axpy2(z, scale, load_vec(vectors + OFF[5], D, F1, F2), F2)
    a = anchor((p, p, p, p, p), axpy2(z, scale, sums[1], F2), q1, sums, 5, F1, F2, F1, F2)
    mean = load_vec(vectors + OFF[7], D, F1, F2)
    store_vec(vectors + OFF[9], axpy2(a, 1.0 / N[1], mean, F2), D, F1, F2)
    m1 = axpy2(z, c[1], matvec(moment_of(kept, S, us, DIGITS, F1, F2), q1, F2, F2), F2)
    store_vec(vectors + OFF[8], m1, D, F1, F2)
    tl.debug_barrier()  # what is read again holds no registers until then
    t = product_of(kept, kept, us * uw * c[3], spare, S, W, RESTS, RESTS, DIGITS, F1, F2)
    if DIGITS:
        tl.debug_barrier()  # or R is loaded long before it is added
    t = add4(t, scale4(moment_of(kept, R, ur, DIGITS, F1, F2), c[2]), F2, F2)
    t = add4(t, scale4(eye_of(t), c[0]), F2, F2)
    p1 = axpy2(z, scale, load_vec(vectors + OFF[6], D, F1, F2), F2)
    m1 = axpy2(load_vec(vectors + OFF[8], D, F1, F2), 1.0, matvec(t, p1, F2, F2), F2)
    tl.debug_barrier()  # every thread has read it
    store_vec(vectors + OFF[8], m1, D, F1, F2)
    if DIGITS:
        ut = put_digits(room, t, 1, F1, F2)
    else:
        t, ut = half(t, F2, F2)
        put_matrix(room, t, F1, F2)
        tl.store(units + R, ut)
    tl.debug_barrier()  # every thread reads what others wrote
    x = product_of(kept, kept, us * uc * c[1], spare, S, C, RESTS, RESTS, DIGITS, F1, F2)
    mean = load_vec(vectors + OFF[7], D, F1, F2)
    a = axpy2(load_vec(vectors + OFF[9], D, F1, F2), -1.0 / N[1], mean, F2)
    m1 = load_vec(vectors + OFF[8], D, F1, F2)
    x = rank1(x, axpy2(z, -1.0, m1, F2), a, F2, F2)
    matrix += head * D * D
    if DIGITS:  # it holds no registers until it is added
        store4(matrix, x, D, F1, F2, D, F1, F2, D, 1)
    tl.debug_barrier()  # every thread reads what others wrote
    m = product_of(room, kept, ut * up, spare, 0, P, 1, RESTS, DIGITS, F1, F2)
    if DIGITS:
        x = load4(matrix, D, F1, F2, D, F1, F2, D, 1)
        tl.debug_barrier()
    store4(matrix, add4(m, x, F2, F2), D, F1, F2, D, F1, F2, D, 1)
