"""Kernels that sum over the tokens of a block: moments, and their gradients together with dq.

Matrices are stored transposed, P' [V, F], because features must be the second operand of a product. A program handles
one part of one block of one head and stores separate sums: no atomics.
"""

import triton
import triton.language as tl

from ...hla.fused.loops.settle import settled4
from ...hla.fused.loops.sums import add_sum, begin_sum, end_sum
from ...hla.fused.loops.vectors import columns
from ...hla.fused.tiles import (
    axpy2,
    load_rows,
    load_vec,
    outer4_begin,
    outer4_end,
    rank1,
    scale4,
    store4,
    store_rows,
    store_vec,
    zeros2,
)
from .features import add_outer, angles_at, cast2, digits, rest, turn
from .geometry import at_head, box, keep_of, place, scale_of, tile
from .tokens import (
    NO_SPECIALIZE,
    add_vector,
    add_weighted,
    begin_weighted,
    by_operator,
    load_operator,
    times,
    total_grad,
    unit_of,
)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def sum_values(
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
def reduce_moments(
    k, v, keep, scales, anchor, inverses, totals, cos, sin, matrix, vector, ks, vs, GEO, N, H, BH, M, G, GV, HT, chunk,
    scale, NORM: tl.constexpr, RATIO: tl.constexpr, PAIR: tl.constexpr, TURN: tl.constexpr, EXACT: tl.constexpr,
    ALIGN: tl.constexpr, F: tl.constexpr, V: tl.constexpr, BN: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    """Compute P' = s Sum v phi(k)' [parts, M, B * H, V, F] per block, with rotated phi.

    NORM: v - anchor instead of v (without rotation), and z = s Sum phi(k) with unrotated phi. G heads share k, GV heads
    share v. PAIR: phi(v), also rotated, instead of v. RATIO: gradients of the mixed moments, with q and do passed as k
    and v: Sum do phi(q)' / den, with the quotient in two digits, and Sum phi(q) total. SPLIT: number of programs that
    split the features of a head; F: the width of one program.
    """
    bh, block, part = place(BH, M, SPLIT)
    first = tl.program_id(0) % SPLIT * F.D
    b = box(GEO, block)
    k = at_head(k, ks, bh, H, G, ALIGN) + first
    v = at_head(v, vs, bh, H, GV, ALIGN)
    keep = keep_of(keep, bh, H, N)
    cos = angles_at(cos, bh, H, HT, first, F.D * SPLIT)
    sin = angles_at(sin, bh, H, HT, first, F.D * SPLIT)
    kn, vn = ks[1] * ALIGN, vs[1] * ALIGN
    dtype: tl.constexpr = k.dtype.element_ty
    DIGITS: tl.constexpr = digits(dtype, RATIO or TURN > 0, EXACT)
    acc = outer4_begin(V, F, False, False)
    z = begin_sum(ROWS, BN, F, NORM)
    if RATIO:
        inverses += bh.to(tl.int64) * N
        totals += bh.to(tl.int64) * N
    hi = tl.minimum((part + 1) * chunk, b[0])
    unit = 1.0
    if RATIO:
        unit = unit_of(inverses, part * chunk, hi, b, keep, dtype, BN)
    for start in range(part * chunk, hi, BN):
        tokens, live = tile(start, hi, b, keep, BN)
        tv = load_rows(v, tokens, vn, live, V, False)
        f = load_rows(k, tokens, kn, live, F, False)
        t = turn(f, cos, sin, tokens, live, HT * SPLIT, False, TURN, F)
        if RATIO:
            total = tl.load(totals + tokens, mask=live, other=0.0)
            z = add_sum(z, times(f, total[:, None], F), F)
            t = times(t, tl.load(inverses + tokens, mask=live, other=0.0)[:, None] * unit, F)
        elif NORM:
            z = add_sum(z, f, F)
        if PAIR:
            wide = turn(tv, cos, sin, tokens, live, HT, False, TURN, V)
            tv = cast2(wide, dtype, V)
            if DIGITS > 1:
                low = rest(wide, tv, V)
                tl2 = cast2(low, dtype, V)
                if DIGITS > 2:
                    acc = add_outer(acc, cast2(rest(low, tl2, V), dtype, V), t, live, dtype, 1, V, F, PREC)
                acc = add_outer(acc, tl2, t, live, dtype, DIGITS - 1, V, F, PREC)
        acc = settled4(add_outer(acc, tv, t, live, dtype, DIGITS, V, F, PREC), V, F, NORM and TURN == 0)
    s = scale_of(scales, scale, bh, H)
    p = scale4(outer4_end(acc, V), s / unit)
    pid = (tl.program_id(0) // SPLIT).to(tl.int64)
    if NORM:
        total = axpy2(zeros2(F), s, end_sum(z, F, True), F)
        store_vec(vector + pid * F.D * SPLIT + first, total, F)
    if NORM and not RATIO and TURN == 0:
        minus = axpy2(zeros2(V), -1.0, load_vec(anchor + bh * V.D, V), V)
        p = rank1(p, minus, total, V, F)
    store4(matrix + pid * F.D * SPLIT * V.D + first, p, V, F, F.D * SPLIT, 1)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def query_grads(
    q, g, dq, inverses, keep, anchor, cos, sin, mixed, mixed_vector, matrix, vector, qs, gs, dqs, GEO, N, H, BH, M, HT,
    chunk, eps, NORM: tl.constexpr, TURN: tl.constexpr, EXACT: tl.constexpr, ALIGN: tl.constexpr, F: tl.constexpr,
    V: tl.constexpr, FINE: tl.constexpr, BN: tl.constexpr, SPLIT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Compute dq, and the gradients of the mixed moments: dP~' = Sum do phi(q)' (ratio: do phi(q)' / den, with the
    quotient in two digits) and dz~. FINE: dq from operators in two digits. SPLIT as in `reduce_moments`; 1 for the
    ratio, which needs all features."""
    bh, block, part = place(BH, M, SPLIT)
    first = tl.program_id(0) % SPLIT * F.D
    b = box(GEO, block)
    q = at_head(q, qs, bh, H, 1, ALIGN) + first
    g = at_head(g, gs, bh, H, 1, ALIGN)
    dq = at_head(dq, dqs, bh, H, 1, ALIGN) + first
    keep = keep_of(keep, bh, H, N)
    cos = angles_at(cos, bh, H, HT, first, F.D * SPLIT)
    sin = angles_at(sin, bh, H, HT, first, F.D * SPLIT)
    qn, gn, dqn = qs[1] * ALIGN, gs[1] * ALIGN, dqs[1] * ALIGN
    dtype: tl.constexpr = q.dtype.element_ty
    DIGITS: tl.constexpr = digits(dtype, NORM or TURN > 0, EXACT)
    at = (block * BH + bh).to(tl.int64)
    OF_P: tl.constexpr = digits(dtype, FINE or (NORM and EXACT), NORM and EXACT)
    w, unit = load_operator(mixed + at * F.D * SPLIT * V.D + first, dtype, OF_P, F, V, SPLIT)
    a = anchor
    if NORM and TURN == 0:
        a = columns(load_vec(anchor + bh * V.D, V), dtype, V, EXACT)
    if NORM:
        inverses += bh.to(tl.int64) * N
    acc = outer4_begin(V, F, False, False)
    dz = begin_weighted(dtype, BN, F, NORM)
    hi = tl.minimum((part + 1) * chunk, b[0])
    over = 1.0
    if NORM:
        over = unit_of(inverses, part * chunk, hi, b, keep, dtype, BN)
    for start in range(part * chunk, hi, BN):
        tokens, live = tile(start, hi, b, keep, BN)
        tg = load_rows(g, tokens, gn, live, V, False)
        f = load_rows(q, tokens, qn, live, F, False)
        t = turn(f, cos, sin, tokens, live, HT * SPLIT, False, TURN, F)
        gt = times(by_operator(tg, w, OF_P, V, F, PREC), unit, F)
        if NORM:
            inverse = tl.load(inverses + tokens, mask=live, other=0.0)
            total = total_grad(t, tg, gt, inverse, a, eps, TURN == 0, F, V)
            dz = add_weighted(dz, f, total, F, EXACT)
            gt = times(gt, inverse[:, None], F)
            t = times(t, inverse[:, None] * over, F)
        gq = turn(gt, cos, sin, tokens, live, HT * SPLIT, True, TURN, F)
        if NORM:
            gq = add_vector(gq, total, mixed_vector + at * F.D, F)
        store_rows(dq, tokens, dqn, live, gq, F)
        acc = settled4(add_outer(acc, tg, t, live, dtype, DIGITS, V, F, PREC), V, F)
    pid = (tl.program_id(0) // SPLIT).to(tl.int64)
    p = scale4(outer4_end(acc, V), 1.0 / over)
    store4(matrix + pid * F.D * SPLIT * V.D + first, p, V, F, F.D * SPLIT, 1)
    if NORM:
        store_vec(vector + pid * F.D, end_sum(dz, F, True), F)
