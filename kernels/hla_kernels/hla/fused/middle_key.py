"""The split path's gradients of S, R and W, cut into blocks of rows as in `middle`, and the two small sums of a
backward."""

import triton
import triton.language as tl

from .heads import load_coefficients
from .middle import dot_rows, mul2, plus_rank1, put_rows, rows_of, state_anchor, times, vec
from .tiles import axpy2, load4, load_vec, rank1, rowdot, trans4, vecmat, zeros2


@triton.jit
def ones_grads(
    g, s, x, dmt, r, n, scale, ORDER: tl.constexpr, NORM: tl.constexpr, CENTER: tl.constexpr, MEAN: tl.constexpr,
    OFF: tl.constexpr, FD: tl.constexpr, F1: tl.constexpr, F2: tl.constexpr, DV: tl.constexpr, V1: tl.constexpr,
    V2: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """(d1, d1_i, p1, p1_i, q1, q1_i): the gradient of m1, and P and C of v = 1 where not centred; _i are rows
    r..r+BR."""
    d1 = zeros2(F1, F2)
    d1i = tl.zeros([BR], tl.float32)
    p1 = d1
    p1i = d1i
    q1 = d1
    q1i = d1i
    if NORM:
        a = state_anchor(s, scale, ORDER, OFF, FD, F1, F2, DV, V1, V2)
        d1 = axpy2(load_vec(g + DV * FD, FD, F1, F2), -1.0, vecmat(a, dmt, V2, F2), F2)
        d1i = vec(g + DV * FD, r, BR, FD) - dot_rows(x, a, V2)
    elif MEAN:
        sv = load_vec(s + OFF[7], DV, V1, V2)
        d1 = mul2(vecmat(sv, dmt, V2, F2), -1.0 / n, F2)
        d1i = dot_rows(x, sv, V2) * (-1.0 / n)
    if (NORM or MEAN) and CENTER == 0:
        p1 = mul2(load_vec(s + OFF[6], FD, F1, F2), scale, F2)
        p1i = scale * vec(s + OFF[6], r, BR, FD)
    if (NORM or MEAN) and CENTER <= 1:
        q1 = mul2(load_vec(s + OFF[5], FD, F1, F2), scale, F2)
        q1i = scale * vec(s + OFF[5], r, BR, FD)
    return d1, d1i, p1, p1i, q1, q1i


@triton.jit
def third_order(
    s, x, dmt, pi, zt, d1, d1i, p1, r, OFF: tl.constexpr, FD: tl.constexpr, F1: tl.constexpr, F2: tl.constexpr,
    DV: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, BR: tl.constexpr, MID: tl.constexpr,
):  # fmt: skip
    """Rows of (dS + dS', dW + dW', dM P', Z'S) for M = S W P: dS = dM P' W, dW = S dM P', Z = dM P'."""
    pt = load4(s + OFF[0], DV, V1, V2, FD, F1, F2, 1, DV)
    z = plus_rank1(times(x, pt, BR, V2, F1, F2, MID), d1i, p1, F2)
    wi = rows_of(s + OFF[4], r, BR, FD, FD, F1, F2, FD, 1)
    ds = times(z, load4(s + OFF[4], FD, F1, F2, FD, F1, F2, FD, 1), BR, F2, F1, F2, MID)
    wip = times(wi, load4(s + OFF[0], FD, F1, F2, DV, V1, V2, DV, 1), BR, F2, V1, V2, MID)
    ds = axpy2(ds, 1.0, plus_rank1(times(wip, dmt, BR, V2, F1, F2, MID), dot_rows(wi, p1, F2), d1, F2), F2)
    si = rows_of(s + OFF[1], r, BR, FD, FD, F1, F2, FD, 1)
    h = times(zt, load4(s + OFF[1], FD, F1, F2, FD, F1, F2, FD, 1), BR, F2, F1, F2, MID)
    sdm = times(si, trans4(dmt), BR, F2, V1, V2, MID)
    dw = plus_rank1(times(sdm, pt, BR, V2, F1, F2, MID), dot_rows(si, d1, F2), p1, F2)
    return ds, axpy2(dw, 1.0, h, F2), z, h


@triton.jit
def token_rows(
    s, g, mi, d1, d1i, r, n, scale, c, NORM: tl.constexpr, CENTER: tl.constexpr, MEAN: tl.constexpr,
    ORDER: tl.constexpr, OFF: tl.constexpr, FD: tl.constexpr, F1: tl.constexpr, F2: tl.constexpr, DV: tl.constexpr,
    V1: tl.constexpr, V2: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Elements r..r+BR of the rows of dq and dk that come from the column of ones and from the row of the read-out."""
    row_q = tl.zeros([BR], tl.float32)
    row_k = tl.zeros([BR], tl.float32)
    if CENTER == 2:
        row_q -= dot_rows(mi, load_vec(g + DV * FD + FD, DV, V1, V2), V2) / n
    if NORM or MEAN:
        if CENTER <= 1 and (ORDER == 2 or ORDER == 5):
            row_q += scale * c[1] * dot_rows(rows_of(s + OFF[1], r, BR, FD, FD, F1, F2, FD, 1), d1, F2)
        if CENTER == 0 and (ORDER == 1 or ORDER == 5):
            row_k += scale * c[0] * d1i
        if CENTER == 0 and (ORDER == 3 or ORDER == 5):
            row_k += scale * c[2] * dot_rows(rows_of(s + OFF[3], r, BR, FD, FD, F1, F2, 1, FD), d1, F2)
        if CENTER == 0 and ORDER >= 4:
            sd = vecmat(d1, load4(s + OFF[1], FD, F1, F2, FD, F1, F2, FD, 1), F2, F2)
            row_k += scale * c[3] * dot_rows(rows_of(s + OFF[4], r, BR, FD, FD, F1, F2, FD, 1), sd, F2)
    return row_q, row_k


@triton.jit(do_not_specialize=["N", "H", "scale"])
def middle_grads_key(
    state, grads, weights, rows, coefficients, dcoefficients, matrix, N, H, scale, ORDER: tl.constexpr,
    NORM: tl.constexpr, CENTER: tl.constexpr, MEAN: tl.constexpr, FD: tl.constexpr, F1: tl.constexpr, F2: tl.constexpr,
    DV: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, OFF: tl.constexpr, K: tl.constexpr, WOFF: tl.constexpr,
    KW: tl.constexpr, KG: tl.constexpr, BR: tl.constexpr, MID: tl.constexpr,
):  # fmt: skip
    """Rows over F: WS, WR', WW (symmetrised, times s), the rows of dq and dk, and a part of d coefficients."""
    BLOCKS: tl.constexpr = (FD + BR - 1) // BR
    head = (tl.program_id(0) // BLOCKS).to(tl.int64)
    r = (tl.program_id(0) % BLOCKS) * BR
    s = state + head * K
    g = grads + head * KG
    n = N.to(tl.float32)
    c = load_coefficients(coefficients, (head % H).to(tl.int32), ORDER)
    x = rows_of(g, r, BR, FD, DV, V1, V2, 1, FD)  # dM_i [BR, V]
    dmt = load4(g, DV, V1, V2, FD, F1, F2, FD, 1)  # dM' [V, F]
    if CENTER == 2:
        sg = mul2(load_vec(g + DV * FD + FD, DV, V1, V2), -1.0 / n, V2)
        x = plus_rank1(x, vec(s + OFF[5], r, BR, FD), sg, V2)
        dmt = rank1(dmt, sg, load_vec(s + OFF[5], FD, F1, F2), V2, F2)
    d1, d1i, p1, p1i, q1, q1i = ones_grads(
        g, s, x, dmt, r, n, scale, ORDER, NORM, CENTER, MEAN, OFF, FD, F1, F2, DV, V1, V2, BR
    )
    w = weights + head * KW
    e0 = 0.0
    e1 = 0.0
    e2 = 0.0
    e3 = 0.0
    if ORDER >= 3:
        pi = rows_of(s + OFF[0], r, BR, FD, DV, V1, V2, DV, 1)
        zt = plus_rank1(times(pi, dmt, BR, V2, F1, F2, MID), p1i, d1, F2)  # (P dM')_i
    if ORDER == 3 or ORDER == 5:
        put_rows(w + WOFF[3], r, BR, FD, FD, F1, F2, mul2(zt, scale * c[2], F2))
    if ORDER >= 4:
        ds, dw, z, h = third_order(s, x, dmt, pi, zt, d1, d1i, p1, r, OFF, FD, F1, F2, DV, V1, V2, BR, MID)
        put_rows(w + WOFF[4], r, BR, FD, FD, F1, F2, mul2(dw, scale * c[3], F2))
        ds = mul2(ds, c[3], F2)
    if ORDER == 5:
        e0 = tl.sum(rowdot(pi, x, V2)) + tl.sum(p1i * d1i)
        e2 = tl.sum(rowdot(rows_of(s + OFF[3], r, BR, FD, FD, F1, F2, FD, 1), z, F2))
        e3 = tl.sum(rowdot(rows_of(s + OFF[4], r, BR, FD, FD, F1, F2, FD, 1), h, F2))
    if ORDER == 2 or ORDER == 5:
        ci = rows_of(s + OFF[2], r, BR, FD, DV, V1, V2, DV, 1)
        ct = plus_rank1(times(ci, dmt, BR, V2, F1, F2, MID), q1i, d1, F2)  # (C dM')_i
        full = load4(s + OFF[2], DV, V1, V2, FD, F1, F2, 1, DV)
        y = axpy2(ct, 1.0, plus_rank1(times(x, full, BR, V2, F1, F2, MID), d1i, q1, F2), F2)
        if ORDER == 2:
            ds = y
        else:
            ds = axpy2(ds, c[1], y, F2)
            e1 = tl.sum(rowdot(rows_of(s + OFF[1], r, BR, FD, FD, F1, F2, FD, 1), ct, F2))
    if ORDER == 2 or ORDER >= 4:
        put_rows(w + WOFF[1], r, BR, FD, FD, F1, F2, mul2(ds, scale, F2))
    if ORDER == 5:
        p = dcoefficients + (head * BLOCKS + tl.program_id(0) % BLOCKS) * 4
        tl.store(p, e0)
        tl.store(p + 1, e1)
        tl.store(p + 2, e2)
        tl.store(p + 3, e3)
    mi = x
    if CENTER == 2:
        mi = rows_of(matrix + head * FD * DV, r, BR, FD, DV, V1, V2, DV, 1)
    row_q, row_k = token_rows(
        s, g, mi, d1, d1i, r, n, scale, c, NORM, CENTER, MEAN, ORDER, OFF, FD, F1, F2, DV, V1, V2, BR
    )
    i = r + tl.arange(0, BR)
    o = rows + head * (2 * FD + DV)
    tl.store(o + i, row_q, mask=i < FD)
    tl.store(o + FD + i, row_k, mask=i < FD)


@triton.jit(do_not_specialize=["B", "H", "BLOCKS"])
def sum_coefficients(parts, out, B, H, BLOCKS, WIDTH: tl.constexpr):
    """d coefficients [H, 4] from parts [B, H, BLOCKS, 4], in a fixed order."""
    h = tl.program_id(0)
    i = tl.arange(0, WIDTH)
    j = tl.arange(0, 4)
    total = tl.zeros([WIDTH, 4], tl.float32)
    for start in range(0, B * BLOCKS, WIDTH):
        e = start + i
        at = ((e // BLOCKS).to(tl.int64) * H + h) * BLOCKS + e % BLOCKS
        total += tl.load(parts + at[:, None] * 4 + j[None, :], mask=(e < B * BLOCKS)[:, None], other=0.0)
    tl.store(out + h * 4 + j, tl.sum(total, 0).to(out.dtype.element_ty))


@triton.jit(do_not_specialize=["rows", "G"])
def sum_groups(x, out, rows, G, W: tl.constexpr, WP: tl.constexpr, BLOCK: tl.constexpr):
    """out [rows, W] = sum over the G query heads of a key head of x [rows, G, W] (gradients of grouped keys and
    values)."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    j = tl.arange(0, WP)
    keep = (i < rows)[:, None] & (j < W)[None, :]
    total = tl.zeros([BLOCK, WP], tl.float32)
    for g in range(G):
        total += tl.load(x + (i * G + g)[:, None] * W + j[None, :], mask=keep, other=0.0).to(tl.float32)
    tl.store(out + i[:, None] * W + j[None, :], total.to(out.dtype.element_ty), mask=keep)
