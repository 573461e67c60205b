"""Kernels that sum over tokens: the anchor, and the moments of every block.

Matrices are stored transposed, P' [V, F], because features must be the second operand of a product. A program handles
one part of one block of one head and stores separate sums: no atomics.
"""

import triton
import triton.language as tl

from ...hla.fused.loops.settle import settled4
from ...hla.fused.loops.sums import add_sum, begin_sum, end_sum
from ...hla.fused.tiles import (
    axpy2,
    load_rows,
    load_vec,
    outer4_begin,
    outer4_end,
    rank1,
    scale4,
    store4,
    store_vec,
    zeros2,
)
from .features import add_outer, angles_at, digits, digits_of, turn
from .geometry import at_head, keep_of, scale_of, tile, work
from .tokens import NO_SPECIALIZE, times, unit_of


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def blockmix_sum_values(
    v, keep, shares, out, vs, N, H, BH, G, chunk, scale, ALIGN: tl.constexpr, V: tl.constexpr, BN: tl.constexpr
):
    """Store scale times the sum of v over consecutive tokens in out [parts, B * H, V]; shares [B] replace scale."""
    bh = tl.program_id(0) % BH
    part = tl.program_id(0) // BH
    v = at_head(v, vs, bh, H, G, ALIGN)
    keep = keep_of(keep, bh, H, N)
    s = begin_sum(16, BN, V, True)
    for start in range(part * chunk, tl.minimum((part + 1) * chunk, N), BN):
        tokens = (start + tl.arange(0, BN)).to(tl.int64)
        live = tokens < N
        if keep is not None:
            live = live & (tl.load(keep + tokens, mask=live, other=0) != 0)
        s = add_sum(s, load_rows(v, tokens, vs[1] * ALIGN, live, V, False), V)
    total = axpy2(zeros2(V), scale_of(shares, scale, bh, H), end_sum(s, V, True), V)
    store_vec(out + tl.program_id(0).to(tl.int64) * V.D, total, V)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def blockmix_reduce_moments(
    k, v, keep, scales, anchor, inverses, totals, cos, sin, matrix, vector, ks, vs, GEO, N, H, BH, M, G, HT, chunk,
    scale, GK, GV, NORM: tl.constexpr, RATIO: tl.constexpr, PAIR: tl.constexpr, TURN: tl.constexpr, EXACT: tl.constexpr,
    ALIGN: tl.constexpr, F: tl.constexpr, V: tl.constexpr, BN: tl.constexpr, ROWS: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Compute P' = s Sum v phi(k)' [parts, M, B * H, V, F] per block, with rotated phi.

    NORM: v - anchor instead of v (without rotation), and z = s Sum phi(k) with unrotated phi. GK heads share k, GV
    heads share v. PAIR: phi(v), also rotated, instead of v. RATIO: gradients of the mixed moments, with q and do passed
    as k and v: Sum do phi(q)' / den, with the quotient in two digits, and Sum phi(q) total.
    """
    bh, _, b, lo, hi = work(GEO, BH, M, chunk)
    keep = keep_of(keep, bh, H, N)
    k = at_head(k, ks, bh, H, GK, ALIGN)
    v = at_head(v, vs, bh, H, GV, ALIGN)
    angles = angles_at(cos, sin, bh, H, HT, 0, F.D)
    kn, vn = ks[1] * ALIGN, vs[1] * ALIGN
    dtype: tl.constexpr = k.dtype.element_ty
    DIGITS: tl.constexpr = digits(dtype, RATIO or TURN is not None, EXACT)
    acc = outer4_begin(V, F, False, False)
    z = begin_sum(ROWS, BN, F, NORM)
    if RATIO:
        inverses += bh.to(tl.int64) * N
        totals += bh.to(tl.int64) * N
    unit = 1.0
    if RATIO:
        unit = unit_of(inverses, lo, hi, b, keep, dtype, BN)
    for start in range(lo, hi, BN):
        tokens, live = tile(start, hi, b, keep, BN)
        tv = load_rows(v, tokens, vn, live, V, False)
        f = load_rows(k, tokens, kn, live, F, False)
        t = turn(f, angles, tokens, live, HT, False, TURN, F)
        if RATIO:
            total = tl.load(totals + tokens, mask=live, other=0.0)
            z = add_sum(z, times(f, total[:, None], F), F)
            t = times(t, tl.load(inverses + tokens, mask=live, other=0.0)[:, None] * unit, F)
        elif NORM:
            z = add_sum(z, f, F)
        if PAIR:
            parts = digits_of(turn(tv, angles, tokens, live, HT, False, TURN, V), dtype, DIGITS, V)
            for i in tl.static_range(DIGITS):
                acc = add_outer(acc, parts[DIGITS - 1 - i], t, live, dtype, i + 1, V, F, PREC)
        else:
            acc = add_outer(acc, tv, t, live, dtype, DIGITS, V, F, PREC)
        acc = settled4(acc, V, F, NORM and TURN is None)
    s = scale_of(scales, scale, bh, H)
    p = scale4(outer4_end(acc, V), s / unit)
    pid = tl.program_id(0).to(tl.int64)
    if NORM:
        total = axpy2(zeros2(F), s, end_sum(z, F, True), F)
        store_vec(vector + pid * F.D, total, F)
    if NORM and not RATIO and TURN is None:
        minus = axpy2(zeros2(V), -1.0, load_vec(anchor + bh * V.D, V), V)
        p = rank1(p, minus, total, V, F)
    store4(matrix + pid * F.D * V.D, p, V, F, F.D, 1)
