"""dq with the gradient of the coefficients, then dk and dv.

With r_i = 1 / z_i (NORM, else 1), u_ij = g_i.(v_j - o_i) (NORM, else g_i.(v_j - vbar)) the gradient of a weight is
r_i u_ij / n, that of x_ij e_ij / n with e_ij = r_i u_ij (a + b x_ij), and centring takes its mean over j from it.
"""

import triton
import triton.language as tl

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
    row_dots,
    store_at,
    sum_vectors,
    times,
)


@triton.jit
def add_keys(
    acc, sums, tq, tg, shift, delta, first, second, k, v, start, kn, vn, keep, batch, N, MASK: tl.constexpr,
    D: tl.constexpr, F1: tl.constexpr, F2: tl.constexpr, DV: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """Add a tile of keys to the sums of e k, and of u, u x, u x^2 and of e as the product has it, rounded."""
    live = live_at(keep, batch, start, N, BN)
    tk = load_at(k, start, kn, live, D, F1, F2)
    tv = load_at(v, start, vn, live, DV, V1, V2)
    x = products(tq, tk, F2) - shift[:, None]
    u = products(tg, tv, V2) - delta[:, None]
    if MASK:
        u = tl.where(live[None, :], u, 0.0)
    e = u * (first[:, None] + second[:, None] * x)
    ux = u * x
    rounded = e.to(tk[0].dtype)
    part = lane_sums(rounded.to(tl.float32))
    sums = sums[0] + lane_sums(u), sums[1] + lane_sums(ux), sums[2] + lane_sums(ux * x), sums[3] + part
    return add_weighted(acc, rounded, tk, F2), sums


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def query_grads(
    q, k, v, g, o, rest, dq, c, keep, totals, rows, deltas, parts, pulls, qs, ks, vs, gs, os, dqs, N, H, G, blocks,
    scale, NORM: tl.constexpr, W: tl.constexpr, ALIGN: tl.constexpr, D: tl.constexpr, F1: tl.constexpr,
    F2: tl.constexpr, DV: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, PARTS: tl.constexpr, PEEL: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """dq of a tile of queries; g.o (or g.vbar) and r (or 1 - mean w) of each -> deltas [2, B * H, padded(N)]; of
    the tile the part of the gradient of (c1, c2) -> parts [H, B, blocks, 2] and the sum of mean e q, which centring
    takes from each dk -> pulls [B * H, blocks, D]."""
    bh, tile = place(blocks)
    batch = bh // H
    h = bh % H
    key_head = h // G
    BH = tl.num_programs(0) // blocks
    totals += (batch * (H // G) + key_head).to(tl.int64) * (PARTS * W)
    n = real_tokens(totals, PARTS, W)
    k = at_head(k, ks, batch, key_head, ALIGN)
    v = at_head(v, vs, batch, key_head, ALIGN)
    start = tile * BM
    i = start + tl.arange(0, BM)
    inside = i < N
    live = live_at(keep, batch, start, N, BM)
    hq = at_head(q, qs, batch, h, ALIGN)
    tq = load_at(hq, start, qs[1] * ALIGN, live, D, F1, F2)
    tg = load_at(at_head(g, gs, batch, h, ALIGN), start, gs[1] * ALIGN, live, DV, V1, V2)
    at = bh.to(tl.int64) * padded(N) + i
    shift = tl.load(rows + at, mask=inside, other=0.0)
    square = tl.load(rows + BH.to(tl.int64) * padded(N) + at, mask=inside, other=0.0)
    a, b = factors(c, h, scale)
    inverse = tl.full([BM], 1.0, tl.float32)
    kept = 1.0 - 0.5 * b * square
    if NORM:
        inverse = 1.0 / (1.0 + 0.5 * b * square)
        kept = inverse
        on = os[1] * ALIGN
        delta = row_dots(tg, load_at(at_head(o, os, batch, h, ALIGN), start, on, live, DV, V1, V2), V2)
        delta += row_dots(tg, load_at(at_head(rest, os, batch, h, ALIGN), start, on, live, DV, V1, V2), V2)
    else:
        delta = rowdot(tg, as_row(mean(totals + D, n, PARTS, W, DV, V1, V2)), V2)
    zero = tl.zeros([BM, 4], tl.float32)
    acc, sums = zero_rows(BM, F1, F2), (zero, zero, zero, zero)
    kn, vn = ks[1] * ALIGN, vs[1] * ALIGN
    whole = N // BN * BN if PEEL else 0
    if PEEL:
        for j in range(0, whole, BN):
            acc, sums = add_keys(
                acc, sums, tq, tg, shift, delta, a * inverse, b * inverse, k, v, j, kn, vn, keep, batch, N,
                keep is not None, D, F1, F2, DV, V1, V2, BN,
            )  # fmt: skip
    for j in range(whole, N, BN):
        acc, sums = add_keys(
            acc, sums, tq, tg, shift, delta, a * inverse, b * inverse, k, v, j, kn, vn, keep, batch, N, True, D, F1,
            F2, DV, V1, V2, BN,
        )  # fmt: skip
    total, product = tl.sum(sums[0], 1), tl.sum(sums[1], 1)
    squares, rounded = tl.sum(sums[2], 1), tl.sum(sums[3], 1)
    off = total / n  # the sum of u (NORM: weighted) is zero: what is left is the rounding of delta, the same for all keys
    if NORM:
        off = (total + a * product + 0.5 * b * squares) * inverse / n
    total -= n * off
    squares -= n * off * square
    delta += off
    acc = axpy2(acc, -rounded[:, None], as_row(mean(totals, n, PARTS, W, D, F1, F2)), F2)
    acc = times(acc, live.to(tl.float32) / n, F2)
    store_at(at_head(dq, dqs, batch, h, ALIGN), start, dqs[1] * ALIGN, inside, acc, D, F1, F2)
    tl.store(deltas + at, delta, mask=i < padded(N))
    tl.store(deltas + BH.to(tl.int64) * padded(N) + at, kept, mask=i < padded(N))
    pull = (a * total + b * product) * inverse / n
    tq = load_at(hq, start, qs[1] * ALIGN, live, D, F1, F2)  # again: it would hold registers all the while
    p1 = tl.sum(tq[0].to(tl.float32) * pull[:, None], 0)
    p2 = p1
    if F2 > 0:
        p2 = tl.sum(tq[1].to(tl.float32) * pull[:, None], 0)
    store_vec(pulls + tl.program_id(0).to(tl.int64) * D, (p1, p2), D, F1, F2)
    parts += ((h * (BH // H) + batch).to(tl.int64) * blocks + tile) * 2
    tl.store(parts, tl.sum(product * inverse, 0) * scale / n)
    tl.store(parts + 1, tl.sum(squares * inverse, 0) * (0.5 * scale * scale) / n)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def key_grads(
    q, k, v, g, dk, dv, c, keep, totals, deltas, pulls, qs, ks, vs, gs, dks, dvs, N, H, G, blocks, scale, count,
    NORM: tl.constexpr, W: tl.constexpr, UNIT: tl.constexpr, ALIGN: tl.constexpr, D: tl.constexpr, F1: tl.constexpr,
    F2: tl.constexpr, DV: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, PARTS: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """dk and dv of a tile of keys, over the queries of all heads that share them; count: tiles of `query_grads`.

    Here keys are centred before the product, rounded once: what differs from query to query costs more than it does
    there, since a thread has eight columns of a tile and two rows.
    """
    pid, tile = place(blocks)
    HK = H // G
    batch = pid // HK
    key_head = pid % HK
    dtype: tl.constexpr = q.dtype.element_ty
    totals += pid.to(tl.int64) * (PARTS * W)
    n = real_tokens(totals, PARTS, W)
    many = (tl.num_programs(0) // blocks * G).to(tl.int64) * padded(N)
    inside = tile * BN + tl.arange(0, BN) < N
    live = live_at(keep, batch, tile * BN, N, BN)
    tk = load_at(at_head(k, ks, batch, key_head, ALIGN), tile * BN, ks[1] * ALIGN, live, D, F1, F2)
    tv = load_at(at_head(v, vs, batch, key_head, ALIGN), tile * BN, vs[1] * ALIGN, live, DV, V1, V2)
    kbar = as_row(mean(totals, n, PARTS, W, D, F1, F2))
    centred = axpy2((tk[0].to(tl.float32), tk[1].to(tl.float32)), -1.0, kbar, F2)
    tk = (centred[0].to(dtype), centred[1].to(dtype))
    acc_k, acc_v = zero_rows(BN, F1, F2), zero_rows(BN, V1, V2)
    for member in range(G):
        h = key_head * G + member
        a, b = factors(c, h, scale)
        at = (batch * H + h).to(tl.int64) * padded(N)
        hq = at_head(q, qs, batch, h, ALIGN)
        hg = at_head(g, gs, batch, h, ALIGN)
        for start in range(0, N, BM):
            real = live_at(keep, batch, start, N, BM)
            tq = load_at(hq, start, qs[1] * ALIGN, real, D, F1, F2)
            tg = load_at(hg, start, gs[1] * ALIGN, real, DV, V1, V2)
            i = start + tl.arange(0, BM)
            delta = tl.load(deltas + at + i)
            kept = tl.load(deltas + many + at + i)
            x = products(tk, tq, F2)
            inverse = kept if NORM else tl.full([BM], 1.0, tl.float32)
            first, half = (inverse * (a * UNIT))[None, :], (inverse * (0.5 * b * UNIT))[None, :]
            weight = (kept * UNIT)[None, :] + x * (first + half * x)
            acc_v = add_weighted(acc_v, weight.to(dtype), tg, V2)
            u = products(tv, tg, V2) - delta[None, :]
            e = u * ((inverse * a)[None, :] + (inverse * b)[None, :] * x)
            acc_k = add_weighted(acc_k, e.to(dtype), tq, F2)
    pull = sum_vectors(pulls + (pid * G).to(tl.int64) * count * D, count * G, D, 8, D, F1, F2)
    acc_k = axpy2(acc_k, -1.0, as_row(pull), F2)
    over = live.to(tl.float32) / n
    acc_k, acc_v = times(acc_k, over, F2), times(acc_v, over / UNIT, V2)
    store_at(at_head(dk, dks, batch, key_head, ALIGN), tile * BN, dks[1] * ALIGN, inside, acc_k, D, F1, F2)
    store_at(at_head(dv, dvs, batch, key_head, ALIGN), tile * BN, dvs[1] * ALIGN, inside, acc_v, DV, V1, V2)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def sum_parts(parts, out, count, BP: tl.constexpr):
    """out [H, 2] = the sum over parts [H, count, 2], in one order."""
    h = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BP)
    first, second = tl.zeros([BP], tl.float32), tl.zeros([BP], tl.float32)
    for start in range(0, count, BP):
        at = parts + (h * count + start + i) * 2
        first += tl.load(at, mask=start + i < count, other=0.0)
        second += tl.load(at + 1, mask=start + i < count, other=0.0)
    tl.store(out + 2 * h, tl.sum(first, 0).to(out.dtype.element_ty))
    tl.store(out + 2 * h + 1, tl.sum(second, 0).to(out.dtype.element_ty))
