"""Gradients of S, R and W in the split path, in blocks of rows, and two sums of the backward."""

import triton
import triton.language as tl

from ..algebra import has
from ..heads import load_coefficients
from ..loops import means
from ..tiles import axpy2, load4, load_vec, power_of_two, rank1, rowdot, vecmat, zero_rows, zeros2
from . import (
    dot_rows,
    load_symmetric,
    mul2,
    plus_rank1,
    plus_times,
    plus_times_late,
    put_rows,
    rows_of,
    times,
    vec,
)


@triton.jit
def ones_grads(g, s, r, scale, NORM: tl.constexpr, L: tl.constexpr, F: tl.constexpr, V: tl.constexpr, BR: tl.constexpr):
    """Return (d1, d1_i, p1_i, q1, q1_i): the gradient of m1, and P and C of v = 1; _i are rows r..r+BR."""
    d1 = zeros2(F)
    d1i = tl.zeros([BR], tl.float32)
    p1i = d1i
    q1 = d1
    q1i = d1i
    if NORM:
        d1 = load_vec(g + V.D * F.D, F)
        d1i = vec(g + V.D * F.D, r, BR, F.D)
        p1i = scale * vec(s + L.SUM_K, r, BR, F.D)
        q1 = mul2(load_vec(s + L.SUM_Q, F), scale, F)
        q1i = scale * vec(s + L.SUM_Q, r, BR, F.D)
    return d1, d1i, p1i, q1, q1i


@triton.jit
def dot_columns(ptr, x, r, BR: tl.constexpr, A: tl.constexpr, B: tl.constexpr, HALF: tl.constexpr):
    """Elements r..r+BR of x'm for a contiguous [A, B] matrix m, read along its rows; HALF: of m as `cast_weights`
    rounds it to float16, whatever the unit."""
    j = r + tl.arange(0, BR)
    i = tl.arange(0, A.D1)
    m1 = tl.load(ptr + i[:, None] * B + j[None, :], mask=(i < A.D)[:, None] & (j < B)[None, :], other=0.0)
    if HALF:
        m1 = rounded(m1)
    out = tl.sum(m1 * x[0][:, None], 0)
    if A.D2 > 0:
        i2 = A.D1 + tl.arange(0, A.D2)
        m2 = tl.load(ptr + i2[:, None] * B + j[None, :], mask=(i2 < A.D)[:, None] & (j < B)[None, :], other=0.0)
        if HALF:
            m2 = rounded(m2)
        out += tl.sum(m2 * x[1][:, None], 0)
    return out


@triton.jit
def rounded(x):
    """x with the digits of float16."""
    unit = power_of_two(tl.max(tl.abs(x)))
    return (x / unit).to(tl.float16).to(tl.float32) * unit


@triton.jit
def token_rows(
    s, g, w, mi, d1, d1i, r, n, scale, c, NORM: tl.constexpr, CENTER: tl.constexpr, ORDER: tl.constexpr,
    L: tl.constexpr, F: tl.constexpr, V: tl.constexpr, BR: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Elements r..r+BR of the rows of dq and dk that come from the column of ones, less what WC' and WP' give the mean
    value as products read them, and from the row of the read-out."""
    row_q = tl.zeros([BR], tl.float32)
    row_k = tl.zeros([BR], tl.float32)
    if CENTER == "qk":
        row_q -= dot_rows(mi, load_vec(g + V.D * F.D + F.D, V), V) / n
    if NORM:
        if CENTER != "qk" and has("C", ORDER):
            row_q += scale * c[1] * dot_rows(rows_of(s + L.S, r, BR, F.D, F, F.D, 1), d1, F)
        if CENTER is None and (ORDER == "linear_attention" or ORDER == "polynomial"):
            row_k += scale * c[0] * d1i
        if CENTER is None and has("R", ORDER):
            row_k += scale * c[2] * dot_columns(s + L.R, d1, r, BR, F, F.D, False)
        if CENTER is None and has("W", ORDER):
            sd = vecmat(d1, load_symmetric(s + L.S, F), F, F)
            row_k += scale * c[3] * dot_rows(rows_of(s + L.W, r, BR, F.D, F, F.D, 1), sd, F)
        total = load_vec(s + L.SUM_V, V)
        if has("C", ORDER):
            row_q -= dot_columns(w + L.C, total, r, BR, V, F.D, HALF) / n
        if has("P", ORDER):
            row_k -= dot_columns(w + L.P, total, r, BR, V, F.D, HALF) / n
    return row_q, row_k


@triton.jit
def readout_rows(
    s, g, r, n, CENTER: tl.constexpr, L: tl.constexpr, F: tl.constexpr, V: tl.constexpr, BR: tl.constexpr,
    TURNED: tl.constexpr,
):  # fmt: skip
    """Rows r..r+BR of dM. TURNED: dM [F, V] is stored, not dM' [V, F]."""
    x = rows_of(g, r, BR, F.D, V, V.D if TURNED else 1, 1 if TURNED else F.D)
    if CENTER == "qk":
        sg = mul2(load_vec(g + V.D * F.D + F.D, V), -1.0 / n, V)
        x = plus_rank1(x, vec(s + L.SUM_Q, r, BR, F.D), sg, V)
    return x


@triton.jit
def readout_whole(
    s, g, n, CENTER: tl.constexpr, L: tl.constexpr, F: tl.constexpr, V: tl.constexpr, TURNED: tl.constexpr
):
    """Return the full dM'."""
    dmt = load4(g, V, F, 1 if TURNED else F.D, V.D if TURNED else 1)
    if CENTER == "qk":
        sg = mul2(load_vec(g + V.D * F.D + F.D, V), -1.0 / n, V)
        dmt = rank1(dmt, sg, load_vec(s + L.SUM_Q, F), V, F)
    return dmt


@triton.jit
def times_readout(
    a, s, g, r, ai, dmt, n, CENTER: tl.constexpr, L: tl.constexpr, F: tl.constexpr, V: tl.constexpr, BR: tl.constexpr,
    MID: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """Rows r..r+BR of A dM' for a moment A [F, V] in memory, ai its rows; dM' as `readout_whole` gives it."""
    SV: tl.constexpr = 1 if TURNED else F.D
    SF: tl.constexpr = V.D if TURNED else 1
    if V.D2 >= 64 and CENTER != "qk":
        out = plus_times_late(zero_rows(BR, F), ai, g, V, F, SV, SF, MID)
    else:
        out = times(ai, dmt, BR, V, F, MID)
    return out


@triton.jit
def query_moment_grad(
    s, g, r, n, scale, NORM: tl.constexpr, CENTER: tl.constexpr, L: tl.constexpr, F: tl.constexpr, V: tl.constexpr,
    BR: tl.constexpr, MID: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """Rows of C dM' and of C dM' + dM C'."""
    ci = rows_of(s + L.C, r, BR, F.D, V, V.D, 1)
    dmt = readout_whole(s, g, n, CENTER, L, F, V, TURNED)
    ct = times_readout(s + L.C, s, g, r, ci, dmt, n, CENTER, L, F, V, BR, MID, TURNED)
    x = readout_rows(s, g, r, n, CENTER, L, F, V, BR, TURNED)
    if V.D2 < 64:
        y = plus_times(ct, x, load4(s + L.C, V, F, 1, V.D), V, F, MID)
    else:
        y = plus_times_late(ct, x, s + L.C, V, F, 1, V.D, MID)
    d1, d1i, _, q1, q1i = ones_grads(g, s, r, scale, NORM, L, F, V, BR)
    ct = plus_rank1(ct, q1i, d1, F)
    y = plus_rank1(plus_rank1(y, q1i, d1, F), d1i, q1, F)
    return ct, y


@triton.jit(do_not_specialize=["N", "H", "scale"])
def hla_middle_grads_key(
    state, grads, weights, rows, coefficients, dcoefficients, matrix, cross, N, H, scale, ORDER: tl.constexpr,
    NORM: tl.constexpr, CENTER: tl.constexpr, F: tl.constexpr, V: tl.constexpr, L: tl.constexpr, BR: tl.constexpr,
    MID: tl.constexpr, TURNED: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Rows over F, after `hla_middle_grads_value`: WR', WS of hla2, the rows of dq and dk, and Z' = P dM' (cross
    [B * H, F, F], float32) where `hla_middle_grads_pair` follows. HALF: products with float16 tokens read the weights
    and the operator as they are here."""
    BLOCKS: tl.constexpr = (F.D + BR - 1) // BR
    head = (tl.program_id(0) // BLOCKS).to(tl.int64)
    n, scale = means(N, head, scale)
    r = (tl.program_id(0) % BLOCKS) * BR
    s = state + head * L.K
    g = grads + head * L.KG
    c = load_coefficients(coefficients, (head % H).to(tl.int32), ORDER)
    w = weights + head * L.KW
    if ORDER == "hla2":
        _, ds = query_moment_grad(s, g, r, n, scale, NORM, CENTER, L, F, V, BR, MID, TURNED)
        put_rows(w + L.S, r, BR, F.D, F, mul2(ds, scale, F))
    if has("R", ORDER) or has("W", ORDER):
        dmt = readout_whole(s, g, n, CENTER, L, F, V, TURNED)
        pi = rows_of(s + L.P, r, BR, F.D, V, V.D, 1)
        zt = times_readout(s + L.P, s, g, r, pi, dmt, n, CENTER, L, F, V, BR, MID, TURNED)
        x = readout_rows(s, g, r, n, CENTER, L, F, V, BR, TURNED)
        d1, d1i, p1i, _, _ = ones_grads(g, s, r, scale, NORM, L, F, V, BR)
        zt = plus_rank1(zt, p1i, d1, F)
        if has("W", ORDER):
            put_rows(cross + head * F.D * F.D, r, BR, F.D, F, zt)
        if has("R", ORDER):
            put_rows(w + L.R, r, BR, F.D, F, mul2(zt, scale * c[2], F))
        if dcoefficients is not None:
            p = dcoefficients + (head * BLOCKS + tl.program_id(0) % BLOCKS) * 4
            tl.store(p, tl.sum(rowdot(pi, x, V)) + tl.sum(p1i * d1i))
            tl.store(p + 2, tl.sum(rowdot(rows_of(s + L.R, r, BR, F.D, F, 1, F.D), zt, F)))
    mi = rows_of(matrix + head * F.D * V.D, r, BR, F.D, V, V.D, 1)
    if HALF:
        mi = (rounded(mi[0]), rounded(mi[1]))
    d1 = zeros2(F)
    d1i = tl.zeros([BR], tl.float32)
    if NORM:
        d1 = load_vec(g + V.D * F.D, F)
        d1i = vec(g + V.D * F.D, r, BR, F.D)
    row_q, row_k = token_rows(s, g, w, mi, d1, d1i, r, n, scale, c, NORM, CENTER, ORDER, L, F, V, BR, HALF)
    i = r + tl.arange(0, BR)
    o = rows + head * (2 * F.D + V.D)
    tl.store(o + i, row_q, mask=i < F.D)
    tl.store(o + F.D + i, row_k, mask=i < F.D)


@triton.jit(do_not_specialize=["N", "H", "scale"])
def hla_middle_grads_pair(
    state, grads, weights, coefficients, dcoefficients, cross, N, H, scale, ORDER: tl.constexpr, NORM: tl.constexpr,
    CENTER: tl.constexpr, F: tl.constexpr, V: tl.constexpr, L: tl.constexpr, BR: tl.constexpr, MID: tl.constexpr,
    TURNED: tl.constexpr,
):  # fmt: skip
    """Rows over F of WS and WW for M = S W P, by two programs: s (W Z' + Z W) and s (Z' S + S Z), Z' = P dM' in
    `cross`.

    polynomial: c4 times these, plus c2 (C dM' + dM C') in WS. S and W are symmetric.
    """
    BLOCKS: tl.constexpr = (F.D + BR - 1) // BR
    block = (tl.program_id(0) // 2) % BLOCKS
    head = (tl.program_id(0) // (2 * BLOCKS)).to(tl.int64)
    n, scale = means(N, head, scale)
    r = block * BR
    s = state + head * L.K
    w = weights + head * L.KW
    z = cross + head * F.D * F.D
    c = load_coefficients(coefficients, (head % H).to(tl.int32), ORDER)
    if tl.program_id(0) % 2 == 0:
        zti = rows_of(z, r, BR, F.D, F, F.D, 1)
        dw = times(zti, load_symmetric(s + L.S, F), BR, F, F, MID)
        if dcoefficients is not None:
            e = rowdot(rows_of(s + L.W, r, BR, F.D, F, F.D, 1), dw, F)
            tl.store(dcoefficients + (head * BLOCKS + block) * 4 + 3, tl.sum(e))
        si = rows_of(s + L.S, r, BR, F.D, F, F.D, 1)
        dw = plus_times(dw, si, load4(z, F, F, 1, F.D), F, F, MID)
        put_rows(w + L.W, r, BR, F.D, F, mul2(dw, scale * c[3], F))
    else:
        wi = rows_of(s + L.W, r, BR, F.D, F, F.D, 1)
        ds = times(wi, load4(z, F, F, F.D, 1), BR, F, F, MID)
        zi = rows_of(z, r, BR, F.D, F, 1, F.D)
        ds = mul2(plus_times(ds, zi, load_symmetric(s + L.W, F), F, F, MID), c[3], F)
        if ORDER == "polynomial":
            g = grads + head * L.KG
            ct, y = query_moment_grad(s, g, r, n, scale, NORM, CENTER, L, F, V, BR, MID, TURNED)
            if dcoefficients is not None:
                e = rowdot(rows_of(s + L.S, r, BR, F.D, F, F.D, 1), ct, F)
                tl.store(dcoefficients + (head * BLOCKS + block) * 4 + 1, tl.sum(e))
            ds = axpy2(ds, c[1], y, F)
        put_rows(w + L.S, r, BR, F.D, F, mul2(ds, scale, F))


@triton.jit(do_not_specialize=["B", "H", "BLOCKS"])
def hla_sum_coefficients(parts, out, B, H, BLOCKS, WIDTH: tl.constexpr):
    """Compute d coefficients [H, 4] from parts [B, H, BLOCKS, 4], in a fixed order."""
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
def hla_sum_groups(x, out, rows, G, W: tl.constexpr, WP: tl.constexpr, BLOCK: tl.constexpr):
    """out [rows, W] = sum over the G query heads of a key head of x [rows, G, W] (gradients of grouped keys and
    values)."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    j = tl.arange(0, WP)
    keep = (i < rows)[:, None] & (j < W)[None, :]
    total = tl.zeros([BLOCK, WP], tl.float32)
    for g in range(G):
        total += tl.load(x + (i * G + g)[:, None] * W + j[None, :], mask=keep, other=0.0).to(tl.float32)
    tl.store(out + i[:, None] * W + j[None, :], total.to(out.dtype.element_ty), mask=keep)
