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
    v, keep, shares, out, vs, N, H, BH, G, chunk, scale, ALIGN: tl.constexpr, DV: tl.constexpr, V1: tl.constexpr,
    V2: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Store scale times the sum of v over consecutive tokens in out [parts, B * H, V]; shares [B] replace scale."""
    bh = tl.program_id(0) % BH
    part = tl.program_id(0) // BH
    v = at_head(v, vs, bh, H, G, ALIGN)
    keep = keep_of(keep, bh, H, N)
    s = begin_sum(16, BN, V1, V2, True)
    for start in range(part * chunk, tl.minimum((part + 1) * chunk, N), BN):
        tokens = (start + tl.arange(0, BN)).to(tl.int64)
        live = tokens < N
        if keep is not None:
            live = live & (tl.load(keep + tokens, mask=live, other=0) != 0)
        s = add_sum(s, load_rows(v, tokens, vs[1] * ALIGN, live, DV, V1, V2, False), V2)
    total = axpy2(zeros2(V1, V2), scale_of(shares, scale, bh, H), end_sum(s, V1, V2, True), V2)
    store_vec(out + tl.program_id(0).to(tl.int64) * DV, total, DV, V1, V2)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def reduce_moments(
    k, v, keep, scales, anchor, inverses, totals, cos, sin, matrix, vector, ks, vs, GEO, N, H, BH, M, G, GV, HT, chunk,
    scale, NORM: tl.constexpr, RATIO: tl.constexpr, PAIR: tl.constexpr, TURN: tl.constexpr, EXACT: tl.constexpr,
    ALIGN: tl.constexpr, D: tl.constexpr, F1: tl.constexpr, F2: tl.constexpr, DV: tl.constexpr, V1: tl.constexpr,
    V2: tl.constexpr, BN: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Compute P' = s Sum v phi(k)' [parts, M, B * H, V, F] per block, with rotated phi.

    NORM: v - anchor instead of v (without rotation), and z = s Sum phi(k) with unrotated phi. G heads share k, GV heads
    share v. PAIR: phi(v), also rotated, instead of v. RATIO: gradients of the mixed moments, with q and do passed as k
    and v: Sum do phi(q)' / den, with the quotient in two digits, and Sum phi(q) total. SPLIT: number of programs that
    split the features of a head; D, F1 and F2 are the widths of one program.
    """
    bh, block, part = place(BH, M, SPLIT)
    first = tl.program_id(0) % SPLIT * D
    b = box(GEO, block)
    k = at_head(k, ks, bh, H, G, ALIGN) + first
    v = at_head(v, vs, bh, H, GV, ALIGN)
    keep = keep_of(keep, bh, H, N)
    cos = angles_at(cos, bh, H, HT, first, D * SPLIT)
    sin = angles_at(sin, bh, H, HT, first, D * SPLIT)
    kn, vn = ks[1] * ALIGN, vs[1] * ALIGN
    dtype: tl.constexpr = k.dtype.element_ty
    DIGITS: tl.constexpr = digits(dtype, RATIO or TURN > 0, EXACT)
    acc = outer4_begin(V1, V2, F1, F2, False, False)
    z = begin_sum(ROWS, BN, F1, F2, NORM)
    if RATIO:
        inverses += bh.to(tl.int64) * N
        totals += bh.to(tl.int64) * N
    hi = tl.minimum((part + 1) * chunk, b[0])
    unit = 1.0
    if RATIO:
        unit = unit_of(inverses, part * chunk, hi, b, keep, dtype, BN)
    for start in range(part * chunk, hi, BN):
        tokens, live = tile(start, hi, b, keep, BN)
        tv = load_rows(v, tokens, vn, live, DV, V1, V2, False)
        f = load_rows(k, tokens, kn, live, D, F1, F2, False)
        t = turn(f, cos, sin, tokens, live, HT * SPLIT, False, TURN, D, F1, F2)
        if RATIO:
            total = tl.load(totals + tokens, mask=live, other=0.0)
            z = add_sum(z, times(f, total[:, None], F2), F2)
            t = times(t, tl.load(inverses + tokens, mask=live, other=0.0)[:, None] * unit, F2)
        elif NORM:
            z = add_sum(z, f, F2)
        if PAIR:
            wide = turn(tv, cos, sin, tokens, live, HT, False, TURN, DV, V1, V2)
            tv = cast2(wide, dtype, V2)
            if DIGITS > 1:
                low = rest(wide, tv, V2)
                tl2 = cast2(low, dtype, V2)
                if DIGITS > 2:
                    acc = add_outer(acc, cast2(rest(low, tl2, V2), dtype, V2), t, live, dtype, 1, V2, F2, PREC)
                acc = add_outer(acc, tl2, t, live, dtype, DIGITS - 1, V2, F2, PREC)
        acc = settled4(add_outer(acc, tv, t, live, dtype, DIGITS, V2, F2, PREC), V2, F2, NORM and TURN == 0)
    s = scale_of(scales, scale, bh, H)
    p = scale4(outer4_end(acc, V2), s / unit)
    pid = (tl.program_id(0) // SPLIT).to(tl.int64)
    if NORM:
        total = axpy2(zeros2(F1, F2), s, end_sum(z, F1, F2, True), F2)
        store_vec(vector + pid * D * SPLIT + first, total, D, F1, F2)
    if NORM and not RATIO and TURN == 0:
        minus = axpy2(zeros2(V1, V2), -1.0, load_vec(anchor + bh * DV, DV, V1, V2), V2)
        p = rank1(p, minus, total, V2, F2)
    store4(matrix + pid * D * SPLIT * DV + first, p, DV, V1, V2, D, F1, F2, D * SPLIT, 1)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def query_grads(
    q, g, dq, inverses, keep, anchor, cos, sin, mixed, mixed_vector, matrix, vector, qs, gs, dqs, GEO, N, H, BH, M, HT,
    chunk, eps, NORM: tl.constexpr, TURN: tl.constexpr, EXACT: tl.constexpr, ALIGN: tl.constexpr, D: tl.constexpr,
    F1: tl.constexpr, F2: tl.constexpr, DV: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, FINE: tl.constexpr,
    BN: tl.constexpr, SPLIT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Compute dq, and the gradients of the mixed moments: dP~' = Sum do phi(q)' (ratio: do phi(q)' / den, with the
    quotient in two digits) and dz~. FINE: dq from operators in two digits. SPLIT as in `reduce_moments`; 1 for the
    ratio, which needs all features."""
    bh, block, part = place(BH, M, SPLIT)
    first = tl.program_id(0) % SPLIT * D
    b = box(GEO, block)
    q = at_head(q, qs, bh, H, 1, ALIGN) + first
    g = at_head(g, gs, bh, H, 1, ALIGN)
    dq = at_head(dq, dqs, bh, H, 1, ALIGN) + first
    keep = keep_of(keep, bh, H, N)
    cos = angles_at(cos, bh, H, HT, first, D * SPLIT)
    sin = angles_at(sin, bh, H, HT, first, D * SPLIT)
    qn, gn, dqn = qs[1] * ALIGN, gs[1] * ALIGN, dqs[1] * ALIGN
    dtype: tl.constexpr = q.dtype.element_ty
    DIGITS: tl.constexpr = digits(dtype, NORM or TURN > 0, EXACT)
    at = (block * BH + bh).to(tl.int64)
    OF_P: tl.constexpr = digits(dtype, FINE or (NORM and EXACT), NORM and EXACT)
    w, unit = load_operator(mixed + at * D * SPLIT * DV + first, dtype, OF_P, D, F1, F2, DV, V1, V2, SPLIT)
    a = anchor
    if NORM and TURN == 0:
        a = columns(load_vec(anchor + bh * DV, DV, V1, V2), dtype, V2, EXACT)
    if NORM:
        inverses += bh.to(tl.int64) * N
    acc = outer4_begin(V1, V2, F1, F2, False, False)
    dz = begin_weighted(dtype, BN, F1, F2, NORM)
    hi = tl.minimum((part + 1) * chunk, b[0])
    over = 1.0
    if NORM:
        over = unit_of(inverses, part * chunk, hi, b, keep, dtype, BN)
    for start in range(part * chunk, hi, BN):
        tokens, live = tile(start, hi, b, keep, BN)
        tg = load_rows(g, tokens, gn, live, DV, V1, V2, False)
        f = load_rows(q, tokens, qn, live, D, F1, F2, False)
        t = turn(f, cos, sin, tokens, live, HT * SPLIT, False, TURN, D, F1, F2)
        gt = times(by_operator(tg, w, OF_P, V2, F1, F2, PREC), unit, F2)
        if NORM:
            inverse = tl.load(inverses + tokens, mask=live, other=0.0)
            total = total_grad(t, tg, gt, inverse, a, eps, TURN == 0, F2, V2)
            dz = add_weighted(dz, f, total, F2, EXACT)
            gt = times(gt, inverse[:, None], F2)
            t = times(t, inverse[:, None] * over, F2)
        gq = turn(gt, cos, sin, tokens, live, HT * SPLIT, True, TURN, D, F1, F2)
        if NORM:
            gq = add_vector(gq, total, mixed_vector + at * D, D, F1, F2)
        store_rows(dq, tokens, dqn, live, gq, D, F1, F2)
        acc = settled4(add_outer(acc, tg, t, live, dtype, DIGITS, V2, F2, PREC), V2, F2)
    pid = (tl.program_id(0) // SPLIT).to(tl.int64)
    p = scale4(outer4_end(acc, V2), 1.0 / over)
    store4(matrix + pid * D * SPLIT * DV + first, p, DV, V1, V2, D, F1, F2, D * SPLIT, 1)
    if NORM:
        store_vec(vector + pid * D, end_sum(dz, F1, F2, True), D, F1, F2)
