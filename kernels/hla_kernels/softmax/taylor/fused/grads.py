"""Kernels of dq and the gradient of the coefficients, then of dk and dv.

With NORM: r_i = 1 / z_i and u_ij = g_i.(v_j - o_i). Otherwise r_i = 1 and u_ij = g_i.(v_j - vbar).

    gradient of a weight   r_i u_ij / n
    gradient of x_ij       e_ij / n with e_ij = r_i u_ij (a + b x_ij); centring subtracts its mean over j
    with a narrow pair     e_ij = a r_i u_ij, and the gradient of y_ij is f_ij / n with f_ij = b r_i u_ij y_ij
"""

import triton
import triton.language as tl

from ....hla.fused.loops.writes import as_row
from ....hla.fused.tiles import axpy2, rowdot, store_vec, zero_rows
from .tokens import (
    NO_SPECIALIZE,
    add_weighted,
    at_head,
    centred,
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
    weighted_sum,
    weights,
)


@triton.jit
def add_keys(
    acc, acc2, sums, tq, tq2, tg, shift, shift2, delta, first, second, k, k2, v, start, kn, k2n, vn, keep, batch, N,
    MASK: tl.constexpr, D: tl.constexpr, F1: tl.constexpr, F2: tl.constexpr, R: tl.constexpr, R1: tl.constexpr,
    R2: tl.constexpr, DV: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Add a tile of keys to the sums of e k, f k2, u, u x, u y^2, u y, and of e and f as rounded in the products."""
    live = live_at(keep, batch, start, N, BN)
    tk = load_at(k, start, kn, live, D, F1, F2)
    tv = load_at(v, start, vn, live, DV, V1, V2)
    x = products(tq, tk, F2) - shift[:, None]
    u = products(tg, tv, V2) - delta[:, None]
    if MASK:
        u = tl.where(live[None, :], u, 0.0)
    ux = u * x
    uy, squares = sums[3], ux * x
    f_sum = sums[5]
    if R > 0:
        tk2 = load_at(k2, start, k2n, live, R, R1, R2)
        y = products(tq2, tk2, R2) - shift2[:, None]
        e = u * first[:, None]
        product = u * y
        squares = product * y
        f = (product * second[:, None]).to(tk[0].dtype)
        uy += lane_sums(product)
        f_sum += lane_sums(f.to(tl.float32))
        acc2 = add_weighted(acc2, f, tk2, R2)
    else:
        e = u * (first[:, None] + second[:, None] * x)
    rounded = e.to(tk[0].dtype)
    e_sum = sums[4] + lane_sums(rounded.to(tl.float32))
    sums = sums[0] + lane_sums(u), sums[1] + lane_sums(ux), sums[2] + lane_sums(squares), uy, e_sum, f_sum
    return add_weighted(acc, rounded, tk, F2), acc2, sums


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def query_grads(
    q, q2, k, k2, v, g, o, rest, dq, dq2, c, keep, totals, rows, deltas, parts, pulls, qs, q2s, ks, k2s, vs, gs, os,
    dqs, dq2s, N, H, G, blocks, scale, NORM: tl.constexpr, W: tl.constexpr, ALIGN: tl.constexpr, D: tl.constexpr,
    F1: tl.constexpr, F2: tl.constexpr, R: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr, DV: tl.constexpr,
    V1: tl.constexpr, V2: tl.constexpr, PARTS: tl.constexpr, PEEL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Compute dq and dq2 of a tile of queries.

    deltas [2, B * H, padded(N)]: per query g.o (or g.vbar) and r (or 1 - mean w). parts [H, B, blocks, 2]: the tile's
    part of the gradient of (c1, c2). pulls [B * H, blocks, D + R]: sums over the tile of mean e q and mean f q2, which
    centring subtracts from every dk and dk2.
    """
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
    tq2, shift2, k2n = tq, shift, 0
    if R > 0:
        k2 = at_head(k2, k2s, batch, key_head, ALIGN)
        k2n = k2s[1] * ALIGN
        q2 = at_head(q2, q2s, batch, h, ALIGN)
        tq2 = load_at(q2, start, q2s[1] * ALIGN, live, R, R1, R2)
        shift2 = tl.load(rows + 2 * BH.to(tl.int64) * padded(N) + at, mask=inside, other=0.0)
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
        delta = rowdot(tg, as_row(mean(totals + D + R, n, PARTS, W, DV, V1, V2)), V2)
    zero = tl.zeros([BM, 4], tl.float32)
    acc, acc2, sums = zero_rows(BM, F1, F2), zero_rows(BM, R1, R2), (zero, zero, zero, zero, zero, zero)
    kn, vn = ks[1] * ALIGN, vs[1] * ALIGN
    whole = N // BN * BN if PEEL else 0
    for last in tl.static_range(1 - PEEL, 2):
        for j in range(whole if last else 0, N if last else whole, BN):
            acc, acc2, sums = add_keys(
                acc, acc2, sums, tq, tq2, tg, shift, shift2, delta, a * inverse, b * inverse, k, k2, v, j, kn, k2n, vn,
                keep, batch, N, last or keep is not None, D, F1, F2, R, R1, R2, DV, V1, V2, BN,
            )  # fmt: skip
    total, product = tl.sum(sums[0], 1), tl.sum(sums[1], 1)
    squares, rounded = tl.sum(sums[2], 1), tl.sum(sums[4], 1)
    off = total / n  # the (weighted, if NORM) sum of u is zero but for rounding of delta, the same for all keys
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
    pulls += tl.program_id(0).to(tl.int64) * (D + R)
    pull = a * total
    if R > 0:
        pull2 = tl.sum(sums[3], 1) * b * inverse / n
        acc2 = axpy2(acc2, -tl.sum(sums[5], 1)[:, None], as_row(mean(totals + D, n, PARTS, W, R, R1, R2)), R2)
        acc2 = times(acc2, live.to(tl.float32) / n, R2)
        store_at(at_head(dq2, dq2s, batch, h, ALIGN), start, dq2s[1] * ALIGN, inside, acc2, R, R1, R2)
        tq2 = load_at(q2, start, q2s[1] * ALIGN, live, R, R1, R2)
        store_vec(pulls + D, weighted_sum(tq2, pull2, R2), R, R1, R2)
    else:
        pull += b * product
    tq = load_at(hq, start, qs[1] * ALIGN, live, D, F1, F2)  # loaded again to save registers
    store_vec(pulls, weighted_sum(tq, pull * inverse / n, F2), D, F1, F2)
    parts += ((h * (BH // H) + batch).to(tl.int64) * blocks + tile) * 2
    tl.store(parts, tl.sum(product * inverse, 0) * scale / n)
    tl.store(parts + 1, tl.sum(squares * inverse, 0) * (0.5 * scale * scale) / n)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def key_grads(
    q, q2, k, k2, v, g, dk, dk2, dv, c, keep, totals, deltas, pulls, qs, q2s, ks, k2s, vs, gs, dks, dk2s, dvs, N, H, G,
    blocks, scale, count, NORM: tl.constexpr, W: tl.constexpr, UNIT: tl.constexpr, ALIGN: tl.constexpr,
    D: tl.constexpr, F1: tl.constexpr, F2: tl.constexpr, R: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr,
    DV: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, PARTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Compute dk, dk2 and dv of a tile of keys, over the queries of all heads that share them; count: number of tiles
    in `query_grads`.

    Keys are centred before the product and rounded once, unlike in `query_grads`: terms per query are more expensive
    here, since a thread holds eight columns (queries) and two rows of a tile.
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
    tk = centred(tk, mean(totals, n, PARTS, W, D, F1, F2), F2)
    tk2 = tk
    if R > 0:
        tk2 = load_at(at_head(k2, k2s, batch, key_head, ALIGN), tile * BN, k2s[1] * ALIGN, live, R, R1, R2)
        tk2 = centred(tk2, mean(totals + D, n, PARTS, W, R, R1, R2), R2)
    acc_k, acc_k2, acc_v = zero_rows(BN, F1, F2), zero_rows(BN, R1, R2), zero_rows(BN, V1, V2)
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
            y, tq2 = x, tq
            if R > 0:
                hq2 = at_head(q2, q2s, batch, h, ALIGN)
                tq2 = load_at(hq2, start, q2s[1] * ALIGN, real, R, R1, R2)
                y = products(tk2, tq2, R2)
            inverse = kept if NORM else tl.full([BM], 1.0, tl.float32)
            first, half = (inverse * (a * UNIT))[None, :], (inverse * (0.5 * b * UNIT))[None, :]
            weight = weights((kept * UNIT)[None, :], first, half, x, y, R)
            acc_v = add_weighted(acc_v, weight.to(dtype), tg, V2)
            u = products(tv, tg, V2) - delta[None, :]
            if R > 0:
                e = u * (inverse * a)[None, :]
                f = u * ((inverse * b)[None, :] * y)
                acc_k2 = add_weighted(acc_k2, f.to(dtype), tq2, R2)
            else:
                e = u * ((inverse * a)[None, :] + (inverse * b)[None, :] * x)
            acc_k = add_weighted(acc_k, e.to(dtype), tq, F2)
    pulls += (pid * G).to(tl.int64) * count * (D + R)
    pull = sum_vectors(pulls, count * G, D + R, 8, D, F1, F2)
    acc_k = axpy2(acc_k, -1.0, as_row(pull), F2)
    over = live.to(tl.float32) / n
    acc_k, acc_v = times(acc_k, over, F2), times(acc_v, over / UNIT, V2)
    store_at(at_head(dk, dks, batch, key_head, ALIGN), tile * BN, dks[1] * ALIGN, inside, acc_k, D, F1, F2)
    store_at(at_head(dv, dvs, batch, key_head, ALIGN), tile * BN, dvs[1] * ALIGN, inside, acc_v, DV, V1, V2)
    if R > 0:
        acc_k2 = axpy2(acc_k2, -1.0, as_row(sum_vectors(pulls + D, count * G, D + R, 8, R, R1, R2)), R2)
        acc_k2 = times(acc_k2, over, R2)
        store_at(at_head(dk2, dk2s, batch, key_head, ALIGN), tile * BN, dk2s[1] * ALIGN, inside, acc_k2, R, R1, R2)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def sum_parts(parts, out, count, BP: tl.constexpr):
    """Compute out [H, 2], the sum of parts [H, count, 2] in a fixed order."""
    h = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BP)
    first, second = tl.zeros([BP], tl.float32), tl.zeros([BP], tl.float32)
    for start in range(0, count, BP):
        at = parts + (h * count + start + i) * 2
        first += tl.load(at, mask=start + i < count, other=0.0)
        second += tl.load(at + 1, mask=start + i < count, other=0.0)
    tl.store(out + 2 * h, tl.sum(first, 0).to(out.dtype.element_ty))
    tl.store(out + 2 * h + 1, tl.sum(second, 0).to(out.dtype.element_ty))
