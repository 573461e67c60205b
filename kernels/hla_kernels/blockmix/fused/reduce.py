"""The passes that sum over the tokens of a block: moments, and their gradients together with dq.

Matrices are kept transposed, P' [V, F], because the tile that a feature map transforms belongs in the second operand
of a product. One program is one part of one block of one head and writes its own sums: no atomics.
"""

import triton
import triton.language as tl

from ...hla.fused.loops.sums import add_sum, begin_sum, end_sum
from ...hla.fused.maps import phi, phi_grad
from ...hla.fused.tiles import (
    axpy2,
    load_rows,
    load_vec,
    outer4,
    outer4_begin,
    outer4_end,
    rank1,
    rowmul,
    scale4,
    store4,
    store_rows,
    store_vec,
    zero_rows,
    zeros2,
)
from .geometry import at_head, box, keep_of, place, scale_of, tile
from .tokens import NO_SPECIALIZE, load_operator, low_digits, ratio_grad, times
from .vectors import add_weighted, begin_weighted, columns, end_weighted


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def sum_values(
    v, keep, out, vs, N, H, BH, chunk, scale, ALIGN: tl.constexpr, DV: tl.constexpr, V1: tl.constexpr,
    V2: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """scale times the sum of v over a run of tokens -> out [parts, B * H, V]."""
    bh = tl.program_id(0) % BH
    part = tl.program_id(0) // BH
    v = at_head(v, vs, bh, H, ALIGN)
    keep = keep_of(keep, bh, H, N)
    s = begin_sum(16, BN, V1, V2, True)
    for start in range(part * chunk, tl.minimum((part + 1) * chunk, N), BN):
        tokens = (start + tl.arange(0, BN)).to(tl.int64)
        live = tokens < N
        if keep is not None:
            live = live & (tl.load(keep + tokens, mask=live, other=0) != 0)
        s = add_sum(s, load_rows(v, tokens, vs[1] * ALIGN, live, DV, V1, V2, False), V2)
    total = end_sum(s, V1, V2, True)
    store_vec(out + tl.program_id(0).to(tl.int64) * DV, axpy2(zeros2(V1, V2), scale, total, V2), DV, V1, V2)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def reduce_moments(
    k, v, keep, scales, anchor, inverses, totals, matrix, vector, ks, vs, GEO, N, H, BH, M, chunk, scale,
    NORM: tl.constexpr, RATIO: tl.constexpr, FMAP: tl.constexpr, ALIGN: tl.constexpr, D: tl.constexpr,
    F1: tl.constexpr, F2: tl.constexpr, DV: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, BN: tl.constexpr,
    ROWS: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """P' = s Sum v phi(k)' [parts, M, B * H, V, F] of each block; NORM: of v - anchor, and z = s Sum phi(k).

    RATIO: the gradients of the mixed moments, of q and do in the places of k and v: Sum do phi(q)' / den, to twice the
    digits of the quotient, and Sum phi(q) total.
    """
    bh, block, part = place(BH, M)
    b = box(GEO, block)
    k = at_head(k, ks, bh, H, ALIGN)
    v = at_head(v, vs, bh, H, ALIGN)
    keep = keep_of(keep, bh, H, N)
    kn, vn = ks[1] * ALIGN, vs[1] * ALIGN
    dtype: tl.constexpr = k.dtype.element_ty
    acc = outer4_begin(V1, V2, F1, F2, False, False)
    z = begin_sum(ROWS, BN, F1, F2, NORM)
    if RATIO:
        inverses += bh.to(tl.int64) * N
        totals += bh.to(tl.int64) * N
    hi = tl.minimum((part + 1) * chunk, b[0])
    for start in range(part * chunk, hi, BN):
        tokens, live = tile(start, hi, b, keep, BN)
        tv = load_rows(v, tokens, vn, live, DV, V1, V2, False)
        fk = phi(load_rows(k, tokens, kn, live, D, F1, F2, False), live, FMAP, D, F1, F2)
        if RATIO:
            total = tl.load(totals + tokens, mask=live, other=0.0)
            z = add_sum(z, times(fk, total[:, None], F2), F2)
            over = times(fk, tl.load(inverses + tokens, mask=live, other=0.0)[:, None], F2)
            fk = (over[0].to(dtype), over[1].to(dtype))
            if dtype != tl.float32:
                acc = outer4(acc, tv, low_digits(over, fk, dtype, F2), live, V2, F2, False, PREC)
        elif NORM:
            z = add_sum(z, fk, F2)
        acc = outer4(acc, tv, fk, live, V2, F2, False, PREC)
    s = scale_of(scales, scale, bh, H)
    p = scale4(outer4_end(acc, V2), s)
    pid = tl.program_id(0).to(tl.int64)
    if NORM:
        total = axpy2(zeros2(F1, F2), s, end_sum(z, F1, F2, True), F2)
        store_vec(vector + pid * D, total, D, F1, F2)
    if NORM and not RATIO:
        minus = axpy2(zeros2(V1, V2), -1.0, load_vec(anchor + bh * DV, DV, V1, V2), V2)
        p = rank1(p, minus, total, V2, F2)
    store4(matrix + pid * D * DV, p, DV, V1, V2, D, F1, F2, D, 1)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def query_grads(
    q, g, dq, inverses, keep, anchor, mixed, mixed_vector, matrix, vector, qs, gs, dqs, GEO, N, H, BH, M, chunk, eps,
    NORM: tl.constexpr, FMAP: tl.constexpr, ALIGN: tl.constexpr, D: tl.constexpr, F1: tl.constexpr, F2: tl.constexpr,
    DV: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, BN: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """dq, and the gradients of the mixed moments: dP~' = Sum do phi(q)' (of the ratio: do phi(q)' / den, to twice the
    digits of the quotient), dz~."""
    bh, block, part = place(BH, M)
    b = box(GEO, block)
    q = at_head(q, qs, bh, H, ALIGN)
    g = at_head(g, gs, bh, H, ALIGN)
    dq = at_head(dq, dqs, bh, H, ALIGN)
    keep = keep_of(keep, bh, H, N)
    qn, gn, dqn = qs[1] * ALIGN, gs[1] * ALIGN, dqs[1] * ALIGN
    dtype: tl.constexpr = q.dtype.element_ty
    at = (block * BH + bh).to(tl.int64)
    w, unit = load_operator(mixed + at * D * DV, dtype, D, F1, F2, DV, V1, V2)
    if NORM:
        z = mixed_vector + at * D
        a = columns(load_vec(anchor + bh * DV, DV, V1, V2), dtype, V2)
        inverses += bh.to(tl.int64) * N
    acc = outer4_begin(V1, V2, F1, F2, False, False)
    dz = begin_weighted(dtype, BN, F1, F2, NORM)
    hi = tl.minimum((part + 1) * chunk, b[0])
    for start in range(part * chunk, hi, BN):
        tokens, live = tile(start, hi, b, keep, BN)
        tg = load_rows(g, tokens, gn, live, DV, V1, V2, False)
        fq = phi(load_rows(q, tokens, qn, live, D, F1, F2, False), live, FMAP, D, F1, F2)
        gq = times(rowmul(zero_rows(BN, F1, F2), tg, w, V2, F2, PREC), unit, F2)
        if NORM:
            inverse = tl.load(inverses + tokens, mask=live, other=0.0)
            gq, total = ratio_grad(fq, tg, gq, inverse, z, a, eps, D, F1, F2, V2)
        store_rows(dq, tokens, dqn, live, phi_grad(fq, gq, FMAP, F2), D, F1, F2)
        if NORM:
            dz = add_weighted(dz, fq, total, F2)
            over = times(fq, inverse[:, None], F2)
            fq = (over[0].to(dtype), over[1].to(dtype))
            if dtype != tl.float32:
                acc = outer4(acc, tg, low_digits(over, fq, dtype, F2), live, V2, F2, False, PREC)
        acc = outer4(acc, tg, fq, live, V2, F2, False, PREC)
    pid = tl.program_id(0).to(tl.int64)
    store4(matrix + pid * D * DV, outer4_end(acc, V2), DV, V1, V2, D, F1, F2, D, 1)
    if NORM:
        store_vec(vector + pid * D, end_weighted(dz, F1, F2, True), D, F1, F2)
