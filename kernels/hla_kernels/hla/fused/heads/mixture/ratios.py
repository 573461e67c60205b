"""Operator of `polynomial` as a ratio, from the saved moments of `mixture_moments`."""

import triton
import triton.language as tl

from ...algebra import anchor, eye_of
from ...loops import span
from ...tiles import add4, axpy2, cast4, load_vec, matvec, rank1, scale4, store4, store_vec, zeros2
from .. import load_coefficients
from ..halves import half, put_matrix
from .kept import load_units
from .matrices import C, P, R, S, T, W, load, product


@triton.jit
def product_of(kept, A: tl.constexpr, B: tl.constexpr, unit, F: tl.constexpr):
    """Product of two kept matrices in units of their units."""
    return scale4(product(load(kept, A, F), load(kept, B, F), F), unit)


@triton.jit
def moment_of(kept, I: tl.constexpr, unit, F: tl.constexpr):
    """Return a moment in float32."""
    return scale4(cast4(load(kept, I, F), tl.float32), unit)


@triton.jit(do_not_specialize=["N", "H", "scale"])
def ratio_operator(
    kept, units, vectors, matrix, coefficients, N, H, scale, L: tl.constexpr, F: tl.constexpr, KF: tl.constexpr
):
    """Compute T and M - m1 a' of every head, and m1 and vbar + a, with a of `algebra.anchor`, in its vectors."""
    pid = tl.program_id(0)
    head = pid.to(tl.int64)
    _, N, scale = span(N, pid // H, pid, scale)
    kept += head * KF
    units += head * 8
    vectors += head * L.K
    up, us, uc, ur, uw, _ = load_units(units)
    c = load_coefficients(coefficients, pid % H, 5)
    z = zeros2(F)
    p = moment_of(kept, P, up, F)
    sums = (z, load_vec(vectors + L.SUM_K, F), z)
    q1 = axpy2(z, scale, load_vec(vectors + L.SUM_Q, F), F)
    a = anchor((p, p, p, p, p), axpy2(z, scale, sums[1], F), q1, sums, 5, F, F)
    mean = load_vec(vectors + L.SUM_V, F)
    store_vec(vectors + L.ROW, axpy2(a, 1.0 / N[1], mean, F), F)
    m1 = axpy2(z, c[1], matvec(moment_of(kept, S, us, F), q1, F, F), F)
    store_vec(vectors + L.M1, m1, F)
    tl.debug_barrier()  # what is read again holds no registers until then
    t = product_of(kept, S, W, us * uw * c[3], F)
    t = add4(t, scale4(moment_of(kept, R, ur, F), c[2]), F, F)
    t = add4(t, scale4(eye_of(t), c[0]), F, F)
    p1 = axpy2(z, scale, load_vec(vectors + L.SUM_K, F), F)
    m1 = axpy2(load_vec(vectors + L.M1, F), 1.0, matvec(t, p1, F, F), F)
    tl.debug_barrier()  # every thread has read it
    store_vec(vectors + L.M1, m1, F)
    t, ut = half(t, F, F)
    put_matrix(kept + T * (F.D1 + F.D2) * (F.D1 + F.D2), t, F)
    tl.store(units + T, ut)
    tl.debug_barrier()  # every thread reads what others wrote
    x = product_of(kept, S, C, us * uc * c[1], F)
    mean = load_vec(vectors + L.SUM_V, F)
    a = axpy2(load_vec(vectors + L.ROW, F), -1.0 / N[1], mean, F)
    m1 = load_vec(vectors + L.M1, F)
    x = rank1(x, axpy2(z, -1.0, m1, F), a, F, F)
    matrix += head * F.D * F.D
    tl.debug_barrier()  # every thread reads what others wrote
    m = product_of(kept, T, P, ut * up, F)
    store4(matrix, add4(m, x, F, F), F, F, F.D, 1)
