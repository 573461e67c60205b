"""The kernels: a tile of queries against all keys (output, dq), and a tile of keys against all queries (the others).

Every token is given as the mean key A of its block and C = k - A, so that a score is q.A + q.C; POS [3, N] has its
place on the grid, negative for a token that is not on it. Sums have one order: the same bits every time.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def places(POS, index, n):
    """The place of tokens along three axes; those beyond the last one are nowhere near."""
    inside = index < n
    y = tl.load(POS + index, inside, other=0)
    x = tl.load(POS + n + index, inside, other=0)
    t = tl.load(POS + 2 * n + index, inside, other=0)
    return y, x, t


@triton.jit
def near_of(yi, xi, ti, yj, xj, tj, radius):
    """Which pairs are exact, [I, J]."""
    close = (tl.abs(yi[:, None] - yj[None, :]) <= radius) & (tl.abs(xi[:, None] - xj[None, :]) <= radius)
    close = close & (tl.abs(ti[:, None] - tj[None, :]) <= radius)
    return close | (yi < 0)[:, None] | (yj < 0)[None, :]


@triton.jit
def factors(power, rest, near, DEGREE: tl.constexpr):
    """(exponent, factor f of the exponential, its derivative by q.C) of a tile of scores q.A and q.C."""
    exponent = tl.where(near, power + rest, power)
    if DEGREE == 0:
        f = rest * 0 + 1
        slope = tl.where(near, 1.0, 0.0)
    elif DEGREE == 1:
        f = tl.where(near, 1.0, 1 + rest)
        slope = rest * 0 + 1
    else:
        f = tl.where(near, 1.0, 1 + rest + rest * rest * 0.5)
        slope = tl.where(near, 1.0, 1 + rest)
    return exponent, f, slope


@triton.jit(do_not_specialize=["n", "radius"])
def output(
    Q, A, C, V, O, TOP, POS, qb, qn, qh, ab, an, ah, vb, vn, vh, n, heads, scale,
    radius, DEGREE: tl.constexpr, D: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    """o and TOP = log of the divisor, of a tile of queries. O is contiguous [B, N, H, D], TOP [B, H, N]."""
    tile, bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, h = bh // heads, bh % heads
    i, d = tile * BI + tl.arange(0, BI), tl.arange(0, D)
    q = tl.load(Q + b * qb + h * qh + i[:, None] * qn + d[None, :], (i < n)[:, None], other=0.0)
    yi, xi, ti = places(POS, i, n)
    top = tl.full([BI], -float("inf"), tl.float32)
    z = tl.zeros([BI], tl.float32)
    o = tl.zeros([BI, D], tl.float32)
    for first in range(0, n, BJ):
        j = first + tl.arange(0, BJ)
        inside = (j < n)[:, None]
        a = tl.load(A + b * ab + h * ah + j[:, None] * an + d[None, :], inside, other=0.0)
        c = tl.load(C + b * ab + h * ah + j[:, None] * an + d[None, :], inside, other=0.0)
        v = tl.load(V + b * vb + h * vh + j[:, None] * vn + d[None, :], inside, other=0.0)
        yj, xj, tj = places(POS, j, n)
        power = tl.dot(q, tl.trans(a), input_precision="ieee") * scale
        rest = tl.dot(q, tl.trans(c), input_precision="ieee") * scale
        exponent, f, _ = factors(power, rest, near_of(yi, xi, ti, yj, xj, tj, radius), DEGREE)
        exponent = tl.where((j < n)[None, :], exponent, -float("inf"))
        higher = tl.maximum(top, tl.max(exponent, 1))
        w = tl.exp(exponent - higher[:, None]) * f
        shrink = tl.exp(top - higher)
        z = z * shrink + tl.sum(w, 1)
        o = o * shrink[:, None] + tl.dot(w.to(v.dtype), v, input_precision="ieee")
        top = higher
    o = o / z[:, None]
    tl.store(O + ((b * n + i[:, None]) * heads + h) * D + d[None, :], o.to(O.dtype.element_ty), (i < n)[:, None])
    tl.store(TOP + bh * n + i, top + tl.log(z), i < n)


@triton.jit(do_not_specialize=["n", "radius"])
def for_queries(
    Q, A, C, V, O, DO, TOP, DELTA, DQ, POS, qb, qn, qh, ab, an, ah, vb, vn, vh, n, heads, scale,
    radius, DEGREE: tl.constexpr, D: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    """dq and DELTA = o.do of a tile of queries. O, DO and DQ are contiguous."""
    tile, bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, h = bh // heads, bh % heads
    i, d = tile * BI + tl.arange(0, BI), tl.arange(0, D)
    mine = (i < n)[:, None]
    own = ((b * n + i[:, None]) * heads + h) * D + d[None, :]
    q = tl.load(Q + b * qb + h * qh + i[:, None] * qn + d[None, :], mine, other=0.0)
    do = tl.load(DO + own, mine, other=0.0)
    delta = tl.sum(tl.load(O + own, mine, other=0.0).to(tl.float32) * do.to(tl.float32), 1)
    tl.store(DELTA + bh * n + i, delta, i < n)
    top = tl.load(TOP + bh * n + i, i < n, other=0.0)
    yi, xi, ti = places(POS, i, n)
    dq = tl.zeros([BI, D], tl.float32)
    for first in range(0, n, BJ):
        j = first + tl.arange(0, BJ)
        inside = (j < n)[:, None]
        a = tl.load(A + b * ab + h * ah + j[:, None] * an + d[None, :], inside, other=0.0)
        c = tl.load(C + b * ab + h * ah + j[:, None] * an + d[None, :], inside, other=0.0)
        v = tl.load(V + b * vb + h * vh + j[:, None] * vn + d[None, :], inside, other=0.0)
        yj, xj, tj = places(POS, j, n)
        power = tl.dot(q, tl.trans(a), input_precision="ieee") * scale
        rest = tl.dot(q, tl.trans(c), input_precision="ieee") * scale
        exponent, f, slope = factors(power, rest, near_of(yi, xi, ti, yj, xj, tj, radius), DEGREE)
        exponent = tl.where((j < n)[None, :], exponent, -float("inf"))
        e = tl.exp(exponent - top[:, None])
        e = e * (tl.dot(do, tl.trans(v), input_precision="ieee") - delta[:, None]) * scale
        dq += tl.dot((e * f).to(a.dtype), a, input_precision="ieee")
        dq += tl.dot((e * slope).to(c.dtype), c, input_precision="ieee")
    tl.store(DQ + own, dq.to(DQ.dtype.element_ty), mine)


@triton.jit(do_not_specialize=["n", "radius"])
def for_keys(
    Q, A, C, V, DO, TOP, DELTA, DA, DC, DV, POS, qb, qn, qh, ab, an, ah, vb, vn, vh, n, heads, scale,
    radius, DEGREE: tl.constexpr, D: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    """da, dc, dv of a tile of keys, contiguous [B, N, H, D]."""
    tile, bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, h = bh // heads, bh % heads
    j, d = tile * BJ + tl.arange(0, BJ), tl.arange(0, D)
    mine = (j < n)[:, None]
    a = tl.load(A + b * ab + h * ah + j[:, None] * an + d[None, :], mine, other=0.0)
    c = tl.load(C + b * ab + h * ah + j[:, None] * an + d[None, :], mine, other=0.0)
    v = tl.load(V + b * vb + h * vh + j[:, None] * vn + d[None, :], mine, other=0.0)
    yj, xj, tj = places(POS, j, n)
    da = tl.zeros([BJ, D], tl.float32)
    dc = tl.zeros([BJ, D], tl.float32)
    dv = tl.zeros([BJ, D], tl.float32)
    for first in range(0, n, BI):
        i = first + tl.arange(0, BI)
        inside = (i < n)[:, None]
        q = tl.load(Q + b * qb + h * qh + i[:, None] * qn + d[None, :], inside, other=0.0)
        do = tl.load(DO + ((b * n + i[:, None]) * heads + h) * D + d[None, :], inside, other=0.0)
        top = tl.load(TOP + bh * n + i, i < n, other=float("inf"))  # queries beyond the last weigh nothing
        delta = tl.load(DELTA + bh * n + i, i < n, other=0.0)
        yi, xi, ti = places(POS, i, n)
        power = tl.dot(q, tl.trans(a), input_precision="ieee") * scale
        rest = tl.dot(q, tl.trans(c), input_precision="ieee") * scale
        exponent, f, slope = factors(power, rest, near_of(yi, xi, ti, yj, xj, tj, radius), DEGREE)
        e = tl.exp(exponent - top[:, None])
        dv += tl.dot(tl.trans((e * f).to(do.dtype)), do, input_precision="ieee")
        e = e * (tl.dot(do, tl.trans(v), input_precision="ieee") - delta[:, None]) * scale
        da += tl.dot(tl.trans((e * f).to(q.dtype)), q, input_precision="ieee")
        dc += tl.dot(tl.trans((e * slope).to(q.dtype)), q, input_precision="ieee")
    own = ((b * n + j[:, None]) * heads + h) * D + d[None, :]
    tl.store(DA + own, da.to(DA.dtype.element_ty), mine)
    tl.store(DC + own, dc.to(DC.dtype.element_ty), mine)
    tl.store(DV + own, dv.to(DV.dtype.element_ty), mine)
