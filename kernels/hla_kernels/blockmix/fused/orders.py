"""D x D algebra of higher orders: the operator of a block and the gradients of its factors, by rows.

    ahla  O = R~ P~    hla2  O = S~ C~    stored transposed: P', C' and O' [V, F], left factors R' and S [F, F]

With T the left factor, X the right one and x its column of ones: O' = X'T', o = T x; dX' = dO'T, dx = T'do,
dT' = X dO' + x do'. For a ratio, O - o a' is stored, with the shift a of its block: O is close to rank one, o a', and
the rounded part would cancel in dq. do is then replaced by do - dO a.
"""

import triton
import triton.language as tl

from ...hla.fused.middle import plus_rank1, put_rows, rows_of, times, vec
from ...hla.fused.tiles import axpy2, load4, load_vec, store_vec, vecmat


@triton.jit
def blockmix_operators(
    right, vector, left, out, out_vector, shift, F: tl.constexpr, V: tl.constexpr, BR: tl.constexpr, PREC: tl.constexpr
):
    """Compute O' or, for a ratio, O' - a o', o and the shift a, the output of a query with equal features."""
    BLOCKS: tl.constexpr = (V.D + BR - 1) // BR
    at = (tl.program_id(0) // BLOCKS).to(tl.int64)
    r = (tl.program_id(0) % BLOCKS) * BR
    t = load4(left + at * F.D * F.D, F, F, F.D, 1)
    x = rows_of(right + at * F.D * V.D, r, BR, V.D, F, F.D, 1)
    y = times(x, t, BR, F, F, PREC)
    if vector is not None:
        one = vecmat(load_vec(vector + at * F.D, F), t, F, F)
        total = sum2(one, 0, F)
        a = sum2(y, 1, F) * tl.where(total == 0.0, 0.0, 1.0 / total)
        y = plus_rank1(y, -a, one, F)
        i = r + tl.arange(0, BR)
        tl.store(shift + at * V.D + i, a, mask=i < V.D)
        if r == 0:
            store_vec(out_vector + at * F.D, one, F)
    put_rows(out + at * F.D * V.D, r, BR, V.D, F, y)


@triton.jit
def sum2(x, axis: tl.constexpr, W: tl.constexpr):
    """Sum both parts of a pair along an axis."""
    out = tl.sum(x[0], axis)
    if W.D2 > 0:
        out += tl.sum(x[1], axis)
    return out


@triton.jit
def unshifted(d_vector, shift, g, F: tl.constexpr, V: tl.constexpr):
    """Return do - dO a, with g = dO'."""
    return axpy2(load_vec(d_vector, F), -1.0, vecmat(load_vec(shift, V), g, V, F), F)


@triton.jit
def blockmix_right_grads(
    right, vector, left, d_out, d_vector, shift, to, to_vector, F: tl.constexpr, V: tl.constexpr, BR: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    """Compute dX' and, for a ratio, dx."""
    BLOCKS: tl.constexpr = (V.D + BR - 1) // BR
    at = (tl.program_id(0) // BLOCKS).to(tl.int64)
    r = (tl.program_id(0) % BLOCKS) * BR
    t = load4(left + at * F.D * F.D, F, F, 1, F.D)
    g = rows_of(d_out + at * F.D * V.D, r, BR, V.D, F, F.D, 1)
    put_rows(to + at * F.D * V.D, r, BR, V.D, F, times(g, t, BR, F, F, PREC))
    if vector is not None:  # noqa: SIM102  decided at compile time, the next at run time
        if r == 0:
            whole = load4(d_out + at * F.D * V.D, V, F, F.D, 1)
            one = unshifted(d_vector + at * F.D, shift + at * V.D, whole, F, V)
            one = vecmat(one, t, F, F)
            store_vec(to_vector + at * F.D, one, F)


@triton.jit
def blockmix_left_grads(
    right, vector, left, d_out, d_vector, shift, to, F: tl.constexpr, V: tl.constexpr, BR: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    """Compute dT'."""
    BLOCKS: tl.constexpr = (F.D + BR - 1) // BR
    at = (tl.program_id(0) // BLOCKS).to(tl.int64)
    r = (tl.program_id(0) % BLOCKS) * BR
    g = load4(d_out + at * F.D * V.D, V, F, F.D, 1)
    x = rows_of(right + at * F.D * V.D, r, BR, F.D, V, 1, F.D)
    dt = times(x, g, BR, V, F, PREC)
    if vector is not None:
        one = unshifted(d_vector + at * F.D, shift + at * V.D, g, F, V)
        dt = plus_rank1(dt, vec(vector + at * F.D, r, BR, F.D), one, F)
    put_rows(to + at * F.D * F.D, r, BR, F.D, F, dt)
