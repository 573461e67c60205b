"""Kernels of the totals of keys and values, and of the output."""

import triton
import triton.language as tl

from ....hla.fused.loops.sums import add_sum, begin_sum, end_sum
from ....hla.fused.loops.writes import as_row
from ....hla.fused.tiles import axpy2, rowdot, store_vec, zero_rows
from .tokens import (
    NO_SPECIALIZE,
    add_weighted,
    at_head,
    factors,
    lane_sums,
    live_at,
    load_at,
    mean,
    padded,
    place,
    products,
    real_tokens,
    rounded_off,
    store_at,
    times,
    weights,
)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def sum_tokens(
    k, k2, v, keep, totals, ks, k2s, vs, N, H, NORM: tl.constexpr, W: tl.constexpr, ALIGN: tl.constexpr,
    D: tl.constexpr, F1: tl.constexpr, F2: tl.constexpr, R: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr,
    DV: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, PARTS: tl.constexpr, BN: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Sum keys, narrow keys, values (without the ratio) and the number of real tokens over a part of the tokens of a
    key head into totals [B * H, PARTS, W]; H key heads."""
    pid = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    b = pid // H
    k = at_head(k, ks, b, pid % H, ALIGN)
    v = at_head(v, vs, b, pid % H, ALIGN)
    if R > 0:
        k2 = at_head(k2, k2s, b, pid % H, ALIGN)
    chunk = (N + PARTS * BN - 1) // (PARTS * BN) * BN
    total = begin_sum(ROWS, BN, F1, F2, True)
    narrow = begin_sum(ROWS, BN, R1, R2, R > 0)
    values = begin_sum(ROWS, BN, V1, V2, not NORM)
    n = tl.zeros([BN], tl.float32)
    for start in range(part * chunk, tl.minimum((part + 1) * chunk, N), BN):
        live = live_at(keep, b, start, N, BN)
        n += live.to(tl.float32)
        total = add_sum(total, load_at(k, start, ks[1] * ALIGN, live, D, F1, F2), F2)
        if R > 0:
            narrow = add_sum(narrow, load_at(k2, start, k2s[1] * ALIGN, live, R, R1, R2), R2)
        if not NORM:
            values = add_sum(values, load_at(v, start, vs[1] * ALIGN, live, DV, V1, V2), V2)
    totals += tl.program_id(0).to(tl.int64) * W
    store_vec(totals, end_sum(total, F1, F2, True), D, F1, F2)
    if R > 0:
        store_vec(totals + D, end_sum(narrow, R1, R2, True), R, R1, R2)
    if not NORM:
        store_vec(totals + D + R, end_sum(values, V1, V2, True), DV, V1, V2)
    filler = D + R if NORM else D + R + DV
    at = filler + tl.arange(0, 4)
    tl.store(totals + at, tl.sum(n, 0) + tl.zeros([4], tl.float32), mask=at < W)


@triton.jit
def add_keys(
    acc, sums, tq, tq2, shift, shift2, a, b, k, k2, v, start, kn, k2n, vn, keep, batch, N, MASK: tl.constexpr,
    UNIT: tl.constexpr, SAVE: tl.constexpr, D: tl.constexpr, F1: tl.constexpr, F2: tl.constexpr, R: tl.constexpr,
    R1: tl.constexpr, R2: tl.constexpr, DV: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Add a tile of keys to the sums of (1 + w) v and y^2, and with SAVE of x and y. MASK: the tile may contain padded
    tokens."""
    live = live_at(keep, batch, start, N, BN)
    tk = load_at(k, start, kn, live, D, F1, F2)
    tv = load_at(v, start, vn, live, DV, V1, V2)
    x = products(tq, tk, F2) - shift[:, None]
    if MASK:
        x = tl.where(live[None, :], x, 0.0)
    y = x
    if R > 0:
        y = products(tq2, load_at(k2, start, k2n, live, R, R1, R2), R2) - shift2[:, None]
        if MASK:
            y = tl.where(live[None, :], y, 0.0)
    weight = weights(UNIT, a * UNIT, b * (0.5 * UNIT), x, y, R)
    squares, x_sum, y_sum = sums[0] + lane_sums(y * y), sums[1], sums[2]
    if SAVE:
        x_sum += lane_sums(x)
        if R > 0:
            y_sum += lane_sums(y)
    return add_weighted(acc, weight.to(tv[0].dtype), tv, V2), (squares, x_sum, y_sum)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def read_out(
    q, q2, k, k2, v, o, rest, c, keep, totals, rows, qs, q2s, ks, k2s, vs, os, N, H, G, blocks, scale,
    NORM: tl.constexpr, W: tl.constexpr, UNIT: tl.constexpr, SAVE: tl.constexpr, ALIGN: tl.constexpr, D: tl.constexpr,
    F1: tl.constexpr, F2: tl.constexpr, R: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr, DV: tl.constexpr,
    V1: tl.constexpr, V2: tl.constexpr, PARTS: tl.constexpr, PEEL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Compute o of a tile of queries.

    SAVE: store q.kbar, the mean of y^2 and, if R > 0, q2.k2bar per query in rows [2 or 3, B * H, padded(N)], and with
    NORM the rounding error of o in rest, with the layout of o.

    Tensor cores truncate q.k towards zero. The mean of x over keys, zero in exact arithmetic, is therefore the common
    error of a query, and is added to its q.kbar.
    """
    bh, tile = place(blocks)
    batch = bh // H
    h = bh % H
    key_head = h // G
    totals += (batch * (H // G) + key_head).to(tl.int64) * (PARTS * W)
    n = real_tokens(totals, PARTS, W)
    k = at_head(k, ks, batch, key_head, ALIGN)
    v = at_head(v, vs, batch, key_head, ALIGN)
    first = tile * BM
    i = first + tl.arange(0, BM)
    live = live_at(keep, batch, first, N, BM)
    tq = load_at(at_head(q, qs, batch, h, ALIGN), first, qs[1] * ALIGN, live, D, F1, F2)
    shift = rowdot(tq, as_row(mean(totals, n, PARTS, W, D, F1, F2)), F2)
    tq2, shift2, k2n = tq, shift, 0
    if R > 0:
        k2 = at_head(k2, k2s, batch, key_head, ALIGN)
        k2n = k2s[1] * ALIGN
        tq2 = load_at(at_head(q2, q2s, batch, h, ALIGN), first, q2s[1] * ALIGN, live, R, R1, R2)
        shift2 = rowdot(tq2, as_row(mean(totals + D, n, PARTS, W, R, R1, R2)), R2)
    a, b = factors(c, h, scale)
    zero = tl.zeros([BM, 4], tl.float32)
    acc, sums = zero_rows(BM, V1, V2), (zero, zero, zero)
    kn, vn = ks[1] * ALIGN, vs[1] * ALIGN
    whole = N // BN * BN if PEEL else 0
    for last in tl.static_range(1 - PEEL, 2):
        for start in range(whole if last else 0, N if last else whole, BN):
            acc, sums = add_keys(
                acc, sums, tq, tq2, shift, shift2, a, b, k, k2, v, start, kn, k2n, vn, keep, batch, N,
                last or keep is not None, UNIT, SAVE, D, F1, F2, R, R1, R2, DV, V1, V2, BN,
            )  # fmt: skip
    square = tl.sum(sums[0], 1) / n
    if NORM:
        y = times(acc, 1.0 / (UNIT * n * (1.0 + 0.5 * b * square)), V2)
    else:
        y = times(acc, tl.full([BM], 1.0, tl.float32) / (UNIT * n), V2)
        y = axpy2(y, (-0.5 * b * square)[:, None], as_row(mean(totals + D + R, n, PARTS, W, DV, V1, V2)), V2)
    y = times(y, live.to(tl.float32), V2)
    on = os[1] * ALIGN
    store_at(at_head(o, os, batch, h, ALIGN), first, on, i < N, y, DV, V1, V2)
    if SAVE:
        BH = tl.num_programs(0) // blocks
        at = bh.to(tl.int64) * padded(N) + i
        tl.store(rows + at, shift + tl.sum(sums[1], 1) / n, mask=i < padded(N))
        tl.store(rows + BH.to(tl.int64) * padded(N) + at, square, mask=i < padded(N))
        if R > 0:
            shift2 += tl.sum(sums[2], 1) / n
            tl.store(rows + 2 * BH.to(tl.int64) * padded(N) + at, shift2, mask=i < padded(N))
    if SAVE and NORM:
        y = rounded_off(y, o.dtype.element_ty, V2)
        store_at(at_head(rest, os, batch, h, ALIGN), first, on, i < N, y, DV, V1, V2)
