"""Higher orders by one program per head, and centred keys of first order.

Without options, as ratios, or with centred keys; float16 factors (`halves`). The forward is one launch; it keeps its
vectors, factors and operator. The backward sums dM (and dm1) over queries by `split.hla_reduce_readout`, computes the
weights of a head by `hla_summed_middle` and the gradients of tokens by `split.hla_apply_grads`. Equations as in
`algebra`.
"""

import triton
import triton.language as tl

from ..algebra import centre_rows, less_mean, ones_moments, scale_moments
from ..loops import means, read_out, span, sum_moments
from ..spec import summed_factors
from ..split.grads import load_weights
from ..tiles import (
    axpy2,
    cast4,
    load4,
    load_vec,
    matvec,
    rank1,
    scale4,
    store4,
    store_vec,
    trans4,
    vecmat,
    zeros2,
)
from . import NO_SPECIALIZE, at_head
from .halves import (
    again,
    factors_of,
    get_factors,
    half,
    half_operator,
    half_weight,
    put_three,
    times,
)

factor_count = triton.constexpr_function(summed_factors)


@triton.jit
def one_by_one(m, ORDER: tl.constexpr, F: tl.constexpr):
    """Return (factors, units), three of either, of the moments that an order multiplies."""
    x, y, z = factors_of(m, ORDER)
    x, ux = half(x, F, F)
    y, uy = half(y, F, F)
    if ORDER == "hla3":
        z, uz = half(z, F, F)
    else:
        z, uz = y, uy
    return (x, y, z), (ux, uy, uz)


@triton.jit
def ones_through(y, p1, q1, ORDER: tl.constexpr, F: tl.constexpr):
    """Return m1 = S q1 (hla2) or R p1 (ahla). S is symmetric, and sums along rows need fewer exchanges of threads."""
    x = p1
    if ORDER == "hla2":
        x = q1
    return matvec(y, x, F, F)


@triton.jit
def anchor_ones(mt, m1, F: tl.constexpr):
    """Return a of `algebra.anchor` for the features 1: 1'(M - m1 a') = 0. M is nearly of rank one: others are alike."""
    e = tl.sum(m1[0])
    if F.D2 > 0:
        e += tl.sum(m1[1])
    top = sum_rows(mt, F, F)
    over = tl.where(e == 0.0, 0.0, 1.0 / e)
    return top[0] * over, top[1] * over


@triton.jit
def sum_rows(a, A: tl.constexpr, B: tl.constexpr):
    """a 1."""
    y1 = tl.sum(a[0], 1)
    y2 = y1
    if B.D2 > 0:
        y1 += tl.sum(a[1], 1)
    if A.D2 > 0:
        y2 = tl.sum(a[2], 1)
        if B.D2 > 0:
            y2 += tl.sum(a[3], 1)
    return y1, y2


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def hla_summed_forward(
    q, k, v, o, vectors, matrix, factors, units, qs, ks, vs, os, N, H, scale, eps, ORDER: tl.constexpr,
    NORM: tl.constexpr, CENTER: tl.constexpr, MEAN: tl.constexpr, ALIGN: tl.constexpr, F: tl.constexpr, L: tl.constexpr,
    P: tl.constexpr, SAVE: tl.constexpr, BN: tl.constexpr, BO: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """o of one head. SAVE: its sums, if there are any (NORM: m1 and mean value too), at vectors [B * H, K], its
    factors [B * H, 2 or 3, P, P] and units [B * H, 4], and M [B * H, D, D]."""
    SUMMED: tl.constexpr = NORM or MEAN or CENTER is not None
    pid = tl.program_id(0)
    head, h = pid.to(tl.int64), pid % H
    at, N, scale = span(N, pid // H, pid, scale)
    q, qn = at_head(q, qs, at, h, ALIGN), qs[1] * ALIGN
    k, kn = at_head(k, ks, at, h, ALIGN), ks[1] * ALIGN
    v, vn = at_head(v, vs, at, h, ALIGN), vs[1] * ALIGN
    n = N[1]
    row = zeros2(F)
    # what a backward reads goes through memory anyway, whence tensor cores read it, and a ratio fills the registers
    HERE: tl.constexpr = not (SAVE or (NORM and F.D2 > 0))
    raw, sums, _ = sum_moments(
        q, k, v, q, qn, kn, vn, qn, 0, N, ORDER, "all" if SUMMED else None, False, True, F, F, BN, PREC
    )
    m = scale_moments(raw, sums, scale, n, 0.0, ORDER, CENTER, NORM or MEAN, False, F, F)
    vectors += head * L.K
    if SAVE and SUMMED:
        store_vec(vectors + L.SUM_Q, sums[0], F)
        store_vec(vectors + L.SUM_K, sums[1], F)
        store_vec(vectors + L.SUM_V, sums[2], F)
    if NORM or MEAN:
        row = axpy2(row, 1.0 / n, sums[2], F)
    p1, q1 = ones_moments(sums, scale, CENTER, F)
    m1 = row
    if HERE:
        x = m[0]
        if NORM and ORDER != "hla3":  # before the factors are rounded, while they are in registers
            m1 = ones_through(factors_of(m, ORDER)[1], p1, q1, ORDER, F)
        if ORDER != "linear_attention":
            factor, u = one_by_one(m, ORDER, F)
            t = factor[1]
    else:
        # one in float32 at a time: what is not read of a call is not computed; then through memory, whence tensor cores
        # get factors without registers
        x, y, z = factors_of(m, ORDER)
        if ORDER != "linear_attention":
            factors += head * factor_count(ORDER) * P.D * P.D
            units += head * 4
            x, ux = half(x, F, F)
            store4(factors, x, P, P, P.D, 1)
            if NORM and ORDER != "hla3":
                m1 = ones_through(y, p1, q1, ORDER, F)
            y, uy = half(y, F, F)
            store4(factors + P.D * P.D, y, P, P, P.D, 1)
            uz = uy
            if ORDER == "hla3":
                z, uz = half(z, F, F)
                store4(factors + 2 * P.D * P.D, z, P, P, P.D, 1)
            put_three(units, (ux, uy, uz))
            tl.debug_barrier()  # every thread reads what others wrote
            factor, _ = get_factors(factors, units, ORDER, P)
            u = (ux, uy, uz)
            t = factor[1]
    if ORDER == "hla3":
        whole = times(factor[1], factor[2], F, F, F)
        t = cast4(whole, tl.float16)
        if NORM:
            m1 = matvec(whole, axpy2(zeros2(F), u[1] * u[2], p1, F), F, F)
    if ORDER == "linear_attention":
        out = cast4(x, q.dtype.element_ty)
    else:
        mt = half_operator(factor, u, t, ORDER, F)
        if NORM:
            a = anchor_ones(mt, m1, F)
            row = axpy2(row, 1.0, a, F)
            mt = rank1(mt, (-a[0], -a[1]), m1, F, F)
        out = trans4(cast4(mt, q.dtype.element_ty))
    if SAVE:
        if NORM:
            store_vec(vectors + L.M1, m1, F)
            store_vec(vectors + L.ROW, row, F)
        store4(matrix + head * F.D * F.D, out, F, F, F.D, 1)
    o, on = at_head(o, os, at, h, ALIGN), os[1] * ALIGN
    read_out(q, o, qn, on, 0, N, out, m1, row, eps, NORM, MEAN, F, F, BO, PREC)


@triton.jit
def weights_hla2(to, m, u, t, dm, s, scale, q1, one, mean, NORM: tl.constexpr, F: tl.constexpr, L: tl.constexpr):
    """Write WC' and WS of hla2, the latter + s (q1 dm1' + dm1 q1') of a ratio; return the rows."""
    dtype: tl.constexpr = to.dtype.element_ty
    z = zeros2(F)
    row_q = z
    wc = half_weight(m, u, t, dm, dm, s, "C", "hla2", F, dtype)
    store4(to + L.C, wc, F, F, F.D, 1)
    if NORM:
        row_q = less_mean(row_q, wc, mean, F)
        row_q = axpy2(row_q, 1.0, matvec(cast4(m[1], tl.float32), axpy2(z, scale * u[1], one, F), F, F), F)
    ws = half_weight(m, u, t, dm, dm, s, "S", "hla2", F, tl.float32)
    if NORM:
        ws = rank1(ws, axpy2(z, scale, q1, F), one, F, F)
        ws = rank1(ws, axpy2(z, scale, one, F), q1, F, F)
    store4(to + L.S, ws, F, F, F.D, 1)
    return row_q, z, z


@triton.jit
def weights_ahla(to, m, u, t, dm, s, scale, p1, one, mean, NORM: tl.constexpr, F: tl.constexpr, L: tl.constexpr):
    """Write WP' and WR' of ahla, the latter + s p1 dm1' of a ratio; return the rows."""
    z = zeros2(F)
    row_k = z
    wp = half_weight(m, u, t, dm, dm, s, "P", "ahla", F, to.dtype.element_ty)
    store4(to + L.P, wp, F, F, F.D, 1)
    if NORM:  # before WR' takes registers
        row_k = less_mean(row_k, wp, mean, F)
        row_k = axpy2(row_k, 1.0, vecmat(axpy2(z, scale * u[1], one, F), cast4(t, tl.float32), F, F), F)
    wr = half_weight(m, u, t, dm, dm, s, "R", "ahla", F, tl.float32)
    if NORM:
        wr = rank1(wr, axpy2(z, scale, p1, F), one, F, F)
    store4(to + L.R, wr, F, F, F.D, 1)
    return z, row_k, z


@triton.jit
def weights_hla3(to, m, u, t, dm, pd, s, more, scale, one, mean, NORM: tl.constexpr, F: tl.constexpr, L: tl.constexpr):
    """Write WP', WS and WW of hla3 and return the rows; pd = P dM' (+ p1 dm1' of a ratio) in `more` times the units of
    P and dM'."""
    dtype: tl.constexpr = to.dtype.element_ty
    z = zeros2(F)
    row_k = z
    if NORM:  # before WP' takes registers
        row_k = vecmat(axpy2(z, scale * u[1] * u[2], one, F), cast4(t, tl.float32), F, F)
    wp = half_weight(m, u, t, dm, pd, s, "P", "hla3", F, dtype)
    store4(to + L.P, wp, F, F, F.D, 1)
    if NORM:
        row_k = less_mean(row_k, wp, mean, F)
    store4(to + L.S, half_weight(m, u, t, dm, pd, s * more, "S", "hla3", F, dtype), F, F, F.D, 1)
    store4(to + L.W, half_weight(m, u, t, dm, pd, s * more, "W", "hla3", F, dtype), F, F, F.D, 1)
    return z, row_k, z


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def hla_summed_middle(
    vectors, factors, units, grads, room, weights, rows, N, scale, ORDER: tl.constexpr, NORM: tl.constexpr,
    CENTER: tl.constexpr, MEAN: tl.constexpr, F: tl.constexpr, L: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Compute the weights [B * H, KW] of one head, as far as the order has them (`algebra.weights`), and the rows of
    dq, dk, dv [B * H, 3 D], from the sums [B * H, KG] of `split.hla_reduce_readout`. room: three matrices [P, P]."""
    head = tl.program_id(0).to(tl.int64)
    n, scale = means(N, head, scale)
    vectors += head * L.K
    grads += head * L.KG
    room += head * 3 * P.D * P.D
    weights += head * L.KW
    z = zeros2(F)
    sums = (z, z, z)
    if NORM or MEAN or CENTER is not None:
        sums = (load_vec(vectors + L.SUM_Q, F), load_vec(vectors + L.SUM_K, F), load_vec(vectors + L.SUM_V, F))
    dm = load4(grads, F, F, F.D, 1)
    one = z  # the gradient of m1
    ones = z
    row_v = z
    if NORM:
        one = load_vec(grads + F.D * F.D, F)
        p1, q1 = ones_moments(sums, scale, CENTER, F)
        ones = q1 if ORDER == "hla2" else p1
    if MEAN:
        row_v = axpy2(z, 1.0 / n, load_vec(grads + F.D * F.D + F.D, F), F)
    mean = (vectors + L.SUM_V, n)
    if ORDER == "linear_attention":
        store4(weights + L.P, scale4(dm, scale), F, F, F.D, 1)
    else:
        dm, unit = half(dm, F, F)
        dm = again(room, dm, P)
        m, u = get_factors(factors + head * factor_count(ORDER) * P.D * P.D, units + head * 4, ORDER, P)
        s = scale * unit
    if ORDER == "hla2":
        rows_of = weights_hla2(weights, m, u, m[1], dm, s, scale, ones, one, mean, NORM, F, L)
    elif ORDER == "ahla":
        rows_of = weights_ahla(weights, m, u, m[1], dm, s, scale, ones, one, mean, NORM, F, L)
    elif ORDER == "hla3":
        t = again(room + P.D * P.D, times(m[1], m[2], F, F, F), P)
        pd = times(m[0], dm, F, F, F)
        more = 1.0
        if NORM:
            pd, more = half(rank1(scale4(pd, u[0] * unit), ones, one, F, F), F, F)
            more = more / (u[0] * unit)
        pd = again(room + 2 * P.D * P.D, pd, P)
        rows_of = weights_hla3(weights, m, u, t, dm, pd, s, more, scale, one, mean, NORM, F, L)
    if MEAN or CENTER is not None:
        tl.debug_barrier()  # every thread reads what others wrote: registers hold one weight at a time
        w = load_weights(weights, ORDER, L, F, F)
        rows_of = centre_rows(w, 1.0, sums, z, z, row_v, n, ORDER, CENTER, MEAN, F, F)
    rows += head * 3 * F.D
    for i in tl.static_range(3):
        store_vec(rows + i * F.D, rows_of[i], F)
