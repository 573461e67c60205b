"""Saved tensors of `mixture`: sums of tokens, and (centred) moments in float16."""

import triton
import triton.language as tl

from ...algebra import has
from ...loops import sum_moments
from ...tiles import axpy2, rank1, scale4, store_vec, zeros2
from ..halves import half, put_matrix


@triton.jit
def head_moments(
    q, k, v, qn, kn, vn, N, CENTER: tl.constexpr, MEAN: tl.constexpr, F: tl.constexpr, BN: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    """All moments of a head, and the sums of its tokens if something is centred."""
    SUMS: tl.constexpr = 2 if CENTER > 0 or MEAN else 0
    m, sums, _ = sum_moments(q, k, v, q, qn, kn, vn, qn, 0, N, 5, SUMS, False, True, F, F, BN, PREC)
    return m, sums


@triton.jit
def store_units(to, u):
    """Write the units of P, S, C, R, W, T."""
    for i in tl.static_range(6):
        tl.store(to + i, u[i])


@triton.jit
def load_units(at):
    """Inverse of `store_units`."""
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4), tl.load(at + 5)


@triton.jit
def put_sums(vectors, sums, ORDER: tl.constexpr, L: tl.constexpr, F: tl.constexpr):
    """Write sum q, sum k, sum v; with several programs per head, the program of C writes sum q, the program of P the
    others."""
    if ORDER < 6 or ORDER == 12:
        store_vec(vectors + L.SUM_Q, sums[0], F)
    if ORDER < 6 or ORDER == 11:
        store_vec(vectors + L.SUM_K, sums[1], F)
        store_vec(vectors + L.SUM_V, sums[2], F)


@triton.jit
def centred(a, sums, X: tl.constexpr, Y: tl.constexpr, n, s, F: tl.constexpr):
    """s (a - x y' / n), x and y two sums of tokens."""
    return scale4(rank1(a, axpy2(zeros2(F), -1.0 / n, sums[X], F), sums[Y], F, F), s)


@triton.jit
def scaled(m, sums, n, s, I: tl.constexpr, CENTER: tl.constexpr, MEAN: tl.constexpr, F: tl.constexpr):
    """Moment I (0 .. 4: P, S, C, R, W) times s and centred, as `algebra.scale_moments` does."""
    if I == 0 and (CENTER > 0 or MEAN):
        out = centred(m[0], sums, 1, 2, n, s, F)
    elif I == 1 and CENTER > 0:
        out = centred(m[1], sums, 1, 1, n, s, F)
    elif I == 2 and (CENTER == 2 or MEAN):
        out = centred(m[2], sums, 0, 2, n, s, F)
    elif I == 3 and CENTER > 0:
        out = centred(m[3], sums, 1, 0, n, s, F)
    elif I == 4 and CENTER == 2:
        out = centred(m[4], sums, 0, 0, n, s, F)
    else:
        out = scale4(m[I], s)
    return out


@triton.jit
def put_moments(
    to, units, m, vectors, sums, n, s, ORDER: tl.constexpr, CENTER: tl.constexpr, MEAN: tl.constexpr, L: tl.constexpr,
    F: tl.constexpr,
):  # fmt: skip
    """Write the sums of tokens, the moments of an order of `begin_moments` in float16, and their units."""
    if CENTER > 0 or MEAN:
        put_sums(vectors, sums, ORDER, L, F)
    for i in tl.static_range(5):
        if has(i, ORDER):
            x, unit = half(scaled(m, sums, n, s, i, CENTER, MEAN, F), F, F)
            put_matrix(to + i * (F.D1 + F.D2) * (F.D1 + F.D2), x, F)
            tl.store(units + i, unit)


@triton.jit
def put_rows(rows, sg, n, MEAN: tl.constexpr, F: tl.constexpr):
    """Rows of dq, dk, dv before they are centred: of the mean value alone."""
    z = zeros2(F)
    store_vec(rows, z, F)
    store_vec(rows + F.D, z, F)
    if MEAN:
        z = axpy2(z, 1.0 / n, sg, F)
    store_vec(rows + 2 * F.D, z, F)
