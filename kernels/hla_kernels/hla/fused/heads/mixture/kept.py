"""Saved tensors of `mixture`: sums of tokens, and (centred) moments in float16."""

import triton
import triton.language as tl

from ...loops import sum_moments
from ...tiles import axpy2, rank1, scale4, store_vec, zeros2
from ..halves import half, put_matrix


@triton.jit
def head_moments(
    q, k, v, qn, kn, vn, N, CENTER: tl.constexpr, MEAN: tl.constexpr, D: tl.constexpr, F1: tl.constexpr,
    F2: tl.constexpr, BN: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """All moments of a head, and the sums of its tokens if something is centred."""
    SUMS: tl.constexpr = 2 if CENTER > 0 or MEAN else 0
    m, sums, _ = sum_moments(
        q, k, v, q, qn, kn, vn, qn, 0, N, 5, SUMS, False, True, D, F1, F2, D, F1, F2, BN, PREC
    )  # fmt: skip
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
def put_sums(
    vectors, sums, ORDER: tl.constexpr, OFF: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr
):  # fmt: skip
    """Write sum q, sum k, sum v; with several programs per head, the program of C writes sum q, the program of P the
    others."""
    if ORDER < 6 or ORDER == 12:
        store_vec(vectors + OFF[5], sums[0], D, D1, D2)
    if ORDER < 6 or ORDER == 11:
        store_vec(vectors + OFF[6], sums[1], D, D1, D2)
        store_vec(vectors + OFF[7], sums[2], D, D1, D2)


@triton.jit
def centred(a, sums, X: tl.constexpr, Y: tl.constexpr, n, s, D1: tl.constexpr, D2: tl.constexpr):
    """s (a - x y' / n), x and y two sums of tokens."""
    return scale4(rank1(a, axpy2(zeros2(D1, D2), -1.0 / n, sums[X], D2), sums[Y], D2, D2), s)


@triton.jit
def scaled(
    m, sums, n, s, I: tl.constexpr, CENTER: tl.constexpr, MEAN: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr
):
    """Moment I (0 .. 4: P, S, C, R, W) times s and centred, as `algebra.scale_moments` does."""
    if I == 0 and (CENTER > 0 or MEAN):
        out = centred(m[0], sums, 1, 2, n, s, D1, D2)
    elif I == 1 and CENTER > 0:
        out = centred(m[1], sums, 1, 1, n, s, D1, D2)
    elif I == 2 and (CENTER == 2 or MEAN):
        out = centred(m[2], sums, 0, 2, n, s, D1, D2)
    elif I == 3 and CENTER > 0:
        out = centred(m[3], sums, 1, 0, n, s, D1, D2)
    elif I == 4 and CENTER == 2:
        out = centred(m[4], sums, 0, 0, n, s, D1, D2)
    else:
        out = scale4(m[I], s)
    return out


@triton.constexpr_function
def has_moment(i, order):
    """Whether an order of `begin_moments` has moment i (0 .. 4: P, S, C, R, W)."""
    return i in {10: (3,), 11: (0, 1), 12: (2, 4)}[order]


@triton.jit
def put_moments(
    to, units, m, vectors, sums, n, s, ORDER: tl.constexpr, CENTER: tl.constexpr, MEAN: tl.constexpr, OFF: tl.constexpr,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
):  # fmt: skip
    """Write the sums of tokens, the moments of an order of `begin_moments` in float16, and their units."""
    if CENTER > 0 or MEAN:
        put_sums(vectors, sums, ORDER, OFF, D, D1, D2)
    for i in tl.static_range(5):
        if has_moment(i, ORDER):
            x, unit = half(scaled(m, sums, n, s, i, CENTER, MEAN, D1, D2), D2, D2)
            put_matrix(to + i * (D1 + D2) * (D1 + D2), x, D1, D2)
            tl.store(units + i, unit)


@triton.jit
def put_rows(rows, sg, n, MEAN: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr):
    """Rows of dq, dk, dv before they are centred: of the mean value alone."""
    z = zeros2(D1, D2)
    store_vec(rows, z, D, D1, D2)
    store_vec(rows + D, z, D, D1, D2)
    if MEAN:
        z = axpy2(z, 1.0 / n, sg, D2)
    store_vec(rows + 2 * D, z, D, D1, D2)
