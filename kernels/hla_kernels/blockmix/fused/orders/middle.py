"""D x D algebra of one block and head: the operator and the gradients of its factors, by rows.

With T the left factor, X the right one and x its column of ones: O' = X'T', o = T x; dX' = dO'T, dx = T'do,
dT' = X dO' + x do'. For a ratio, O - o a' is stored, with the shift a of its block: O is close to rank one, o a', and
the rounded part would cancel in dq. do is then replaced by do - dO a.
"""

import triton
import triton.language as tl

from ....hla.fused.middle import plus_rank1, put_rows, rows_of, times, vec
from ....hla.fused.tiles import axpy2, load4, load_vec, store_vec, vecmat


@triton.jit
def operators(
    right, vector, left, out, out_vector, shift, D: tl.constexpr, F1: tl.constexpr, F2: tl.constexpr, DV: tl.constexpr,
    V1: tl.constexpr, V2: tl.constexpr, BR: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Compute O' or, for a ratio, O' - a o', o and the shift a, the output of a query with equal features."""
    BLOCKS: tl.constexpr = (DV + BR - 1) // BR
    at = (tl.program_id(0) // BLOCKS).to(tl.int64)
    r = (tl.program_id(0) % BLOCKS) * BR
    t = load4(left + at * D * D, D, F1, F2, D, F1, F2, D, 1)
    x = rows_of(right + at * D * DV, r, BR, DV, D, F1, F2, D, 1)
    y = times(x, t, BR, F2, F1, F2, PREC)
    if vector is not None:
        one = vecmat(load_vec(vector + at * D, D, F1, F2), t, F2, F2)
        total = sum2(one, 0, F2)
        a = sum2(y, 1, F2) * tl.where(total == 0.0, 0.0, 1.0 / total)
        y = plus_rank1(y, -a, one, F2)
        i = r + tl.arange(0, BR)
        tl.store(shift + at * DV + i, a, mask=i < DV)
        if r == 0:
            store_vec(out_vector + at * D, one, D, F1, F2)
    put_rows(out + at * D * DV, r, BR, DV, D, F1, F2, y)


@triton.jit
def sum2(x, axis: tl.constexpr, D2: tl.constexpr):
    """Sum both parts of a pair along an axis."""
    out = tl.sum(x[0], axis)
    if D2 > 0:
        out += tl.sum(x[1], axis)
    return out


@triton.jit
def unshifted(
    d_vector, shift, g, D: tl.constexpr, F1: tl.constexpr, F2: tl.constexpr, DV: tl.constexpr, V1: tl.constexpr,
    V2: tl.constexpr,
):  # fmt: skip
    """Return do - dO a, with g = dO'."""
    return axpy2(load_vec(d_vector, D, F1, F2), -1.0, vecmat(load_vec(shift, DV, V1, V2), g, V2, F2), F2)


@triton.jit
def right_grads(
    right, vector, left, d_out, d_vector, shift, to, to_vector, D: tl.constexpr, F1: tl.constexpr, F2: tl.constexpr,
    DV: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, BR: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Compute dX' and, for a ratio, dx."""
    BLOCKS: tl.constexpr = (DV + BR - 1) // BR
    at = (tl.program_id(0) // BLOCKS).to(tl.int64)
    r = (tl.program_id(0) % BLOCKS) * BR
    t = load4(left + at * D * D, D, F1, F2, D, F1, F2, 1, D)
    g = rows_of(d_out + at * D * DV, r, BR, DV, D, F1, F2, D, 1)
    put_rows(to + at * D * DV, r, BR, DV, D, F1, F2, times(g, t, BR, F2, F1, F2, PREC))
    if vector is not None:  # noqa: SIM102  decided at compile time, the next at run time
        if r == 0:
            whole = load4(d_out + at * D * DV, DV, V1, V2, D, F1, F2, D, 1)
            one = unshifted(d_vector + at * D, shift + at * DV, whole, D, F1, F2, DV, V1, V2)
            one = vecmat(one, t, F2, F2)
            store_vec(to_vector + at * D, one, D, F1, F2)


@triton.jit
def left_grads(
    right, vector, left, d_out, d_vector, shift, to, D: tl.constexpr, F1: tl.constexpr, F2: tl.constexpr,
    DV: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, BR: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Compute dT'."""
    BLOCKS: tl.constexpr = (D + BR - 1) // BR
    at = (tl.program_id(0) // BLOCKS).to(tl.int64)
    r = (tl.program_id(0) % BLOCKS) * BR
    g = load4(d_out + at * D * DV, DV, V1, V2, D, F1, F2, D, 1)
    x = rows_of(right + at * D * DV, r, BR, D, DV, V1, V2, 1, D)
    dt = times(x, g, BR, V2, F1, F2, PREC)
    if vector is not None:
        one = unshifted(d_vector + at * D, shift + at * DV, g, D, F1, F2, DV, V1, V2)
        dt = plus_rank1(dt, vec(vector + at * D, r, BR, D), one, F2)
    put_rows(to + at * D * D, r, BR, D, D, F1, F2, dt)
