"""Softmax pair of wide heads with a ratio: passes over tokens, one half of the features at a time.

Products read features rounded to bfloat16 and weights to two such numbers; what goes back through the softmaxes is
float32, so that what the features of a token have in common cancels.
"""

import triton
import triton.language as tl

from ..heads import at_head
from ..loops import as_row, longest, span, upto
from ..loops.extent import alive
from ..tiles import load4, load_rows, load_tail, rowdot, rowmul, store4, store_rows, trans4, zero_rows, zeros2, zeros4
from .features import NO_SPECIALIZE as FEATURES
from .features import first_row, offset, tile_place

NO_SPECIALIZE = [*FEATURES, "ys", "GX", "GY", "scale", "eps", "planes"]


@triton.jit
def half_of(x, live, SIGN, D: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr):
    """softmax(SIGN x) of raw tokens in float32."""
    log = 1.4426950408889634 * SIGN
    x1 = tl.where((tl.arange(0, R1) < D)[None, :], x[0].to(tl.float32) * log, -float("inf"))
    top = tl.max(x1, 1)
    x2 = x1
    if R2 > 0:
        x2 = tl.where((R1 + tl.arange(0, R2) < D)[None, :], x[1].to(tl.float32) * log, -float("inf"))
        top = tl.maximum(top, tl.max(x2, 1))
    x1 = tl.exp2(x1 - top[:, None])
    total = tl.sum(x1, 1)
    if R2 > 0:
        x2 = tl.exp2(x2 - top[:, None])
        total += tl.sum(x2, 1)
    weight = tl.where(live, 1.0 / total, 0.0)[:, None]
    return x1 * weight, x2 * weight


@triton.jit
def unit(R: tl.constexpr, dtype: tl.constexpr):
    """Return the identity."""
    i = tl.arange(0, R)
    return tl.where(i[:, None] == i[None, :], 1.0, 0.0).to(dtype)


@triton.jit
def units(R1: tl.constexpr, R2: tl.constexpr, dtype: tl.constexpr):
    """Identities of the two parts of a tile."""
    e1 = unit(R1, dtype)
    e2 = e1
    if R2 > 0:
        e2 = unit(R2, dtype)
    return e1, e2


@triton.jit
def as_product(x, e, R2: tl.constexpr):
    """Return a tile of tokens in float32 as products lie in registers, by a product with identities e: threads exchange
    nothing later."""
    x1 = tl.dot(x[0], e[0])
    x2 = x1
    if R2 > 0:
        x2 = tl.dot(x[1], e[1])
    return x1, x2


@triton.jit
def minus_mean(f, g, mean, R2: tl.constexpr):
    """f times what g is more than a number of each token."""
    y2 = f[1]
    if R2 > 0:
        y2 = f[1] * (g[1] - mean[:, None])
    return f[0] * (g[0] - mean[:, None]), y2


@triton.jit
def through(f, g, R2: tl.constexpr):
    """What the Jacobian of a softmax f makes of g."""
    return minus_mean(f, g, rowdot(f, g, R2), R2)


@triton.jit
def fold(x):
    """Rows 16 apart added: those that one thread holds."""
    return tl.sum(tl.reshape(x, [x.shape[0] // 16, 16, x.shape[1]]), 0)


@triton.jit
def begin_half(V1: tl.constexpr, V2: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr):
    """Return the accumulators of `add_half`."""
    s2 = tl.zeros([1, 1], tl.float32)
    if R2 > 0:
        s2 = tl.zeros([16, R2], tl.float32)
    return zeros4(V1, 64 if V2 > 0 else 0, R1, R2), tl.zeros([16, R1], tl.float32), s2


@triton.jit
def add_outer(acc, y, f, V2: tl.constexpr, R2: tl.constexpr):
    """Return acc + y'f: tiles that are computed stand on the right."""
    a11, a12, a21, a22 = acc
    a11 = tl.dot(tl.trans(y[0]), f[0], a11)
    if R2 > 0:
        a12 = tl.dot(tl.trans(y[0]), f[1], a12)
    if V2 > 0:
        a21 = tl.dot(tl.trans(y[1]), f[0], a21)
        if R2 > 0:
            a22 = tl.dot(tl.trans(y[1]), f[1], a22)
    return a11, a12, a21, a22


@triton.jit
def add_half(acc, f, y, first, last, DIVIDED: tl.constexpr, R2: tl.constexpr, V2: tl.constexpr):
    """Sum y f' first, and Sum f first last, of one half of the features: both of the same rounded numbers, or what
    cancels between them would leave the rounding."""
    matrix, s1, s2 = acc
    f1 = f[0]
    f2 = f[1]
    if DIVIDED:
        f1 = f1 * first[:, None]
        f2 = f2 * first[:, None]
    f1 = f1.to(y[0].dtype)
    f2 = f2.to(y[0].dtype)
    matrix = add_outer(matrix, y, (f1, f2), V2, R2)
    s1 += fold(f1.to(tl.float32) * last[:, None])
    if R2 > 0:
        s2 += fold(f2.to(tl.float32) * last[:, None])
    return matrix, s1, s2


@triton.jit
def store_half(
    out, acc, D: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr, DV: tl.constexpr, V1: tl.constexpr,
    V2: tl.constexpr, PITCH: tl.constexpr,
):  # fmt: skip
    """Rows of one half of a partial moment, the sums in column DV."""
    store4(out, trans4(acc[0]), D, R1, R2, DV, V1, 64 if V2 > 0 else 0, PITCH, 1)
    c = tl.arange(0, R1)
    tl.store(out + DV + c * PITCH, tl.sum(acc[1], 0), mask=c < D)
    if R2 > 0:
        c2 = R1 + tl.arange(0, R2)
        tl.store(out + DV + c2 * PITCH, tl.sum(acc[2], 0), mask=c2 < D)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def pair_values(
    x, y, ratio, out, xs, ys, N, H, GX, GY, PARTS, chunk, heads, DIVIDED: tl.constexpr, ALIGNS: tl.constexpr,
    D: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr, DV: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr,
    PITCH: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Partial moments Sum phi(x) y', out [PARTS, B * H, 2 D, PITCH], of column DV Sum phi(x). DIVIDED: over the
    denominators of a ratio, of column DV times their gradients. One half of the features a program."""
    half, b, h, part = tile_place(H, PARTS, 2)
    most = longest(N)
    at, N, _ = span(N, b, b * H + h, 0.0)
    head = (b * H + h).to(tl.int64)
    x = at_head(x, xs, at, h // GX, ALIGNS[0])
    y = at_head(y, ys, at, h // GY, ALIGNS[1])
    xn, yn = xs[1] * ALIGNS[0], ys[1] * ALIGNS[1]
    i = tl.arange(0, BN)
    hi = upto(part * chunk + chunk, N)
    sign = 1.0 - 2.0 * half
    acc = begin_half(V1, V2, R1, R2)
    for start in tl.range(part * chunk, hi[0], BN, disable_licm=True):
        live = alive(start + i, hi)
        tx = load_rows(first_row(x, start, xn), i, xn, live, D, R1, R2, False)
        y1, y2 = load_rows(first_row(y, start, yn), i, yn, live, DV, V1, 0, False)
        if V2 > 0:
            y2 = load_tail(first_row(y, start, yn), i, yn, live, DV, V1)
        first = tl.where(live, 1.0, 0.0)
        last = first
        if DIVIDED:
            to = ratio + head * 2 * most + start + i
            first = tl.load(to, mask=live, other=0.0)
            last = tl.load(to + most, mask=live, other=0.0) / tl.where(live, first, 1.0)
        acc = add_half(acc, half_of(tx, live, sign, D, R1, R2), (y1, y2), first, last, DIVIDED, R2, V2)
    out += ((part.to(tl.int64) * heads + head) * 2 + half) * D * PITCH
    store_half(out, acc, D, R1, R2, DV, V1, V2, PITCH)


@triton.jit
def column(state, half, D: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr, PITCH: tl.constexpr):
    """Return a column of a matrix, of the features of one half."""
    state += half * D * PITCH
    c = tl.arange(0, R1)
    y1 = tl.load(state + c * PITCH, mask=c < D, other=0.0)
    y2 = y1
    if R2 > 0:
        c2 = R1 + tl.arange(0, R2)
        y2 = tl.load(state + c2 * PITCH, mask=c2 < D, other=0.0)
    return y1, y2


@triton.jit
def turned_product(acc, m, f, R2: tl.constexpr, V2: tl.constexpr):
    """Return acc + m f', a pair of rows of values, for m [V, D] and rounded features f of tokens."""
    t1 = tl.trans(f[0])
    t2 = t1
    if R2 > 0:
        t2 = tl.trans(f[1])
    o1 = tl.dot(m[0], t1, acc[0])
    o2 = acc[1]
    if R2 > 0:
        o1 = tl.dot(m[1], t2, o1)
    if V2 > 0:
        o2 = tl.dot(m[2], t1, o2)
        if R2 > 0:
            o2 = tl.dot(m[3], t2, o2)
    return o1, o2


@triton.jit
def read_features(
    acc, den, x, w, m1, n1, live, DIVIDE: tl.constexpr, D: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr,
    V2: tl.constexpr,
):  # fmt: skip
    """Return (acc + M' phi(x)', den + phi(x).m1), w of `read_weights`."""
    dtype: tl.constexpr = w[0][0].dtype
    f = half_of(x, live, 1.0, D, R1, R2)
    acc = turned_product(acc, w[0], (f[0].to(dtype), f[1].to(dtype)), R2, V2)
    if DIVIDE:
        den += rowdot(f, as_row(m1), R2)
    f = half_of(x, live, -1.0, D, R1, R2)
    acc = turned_product(acc, w[1], (f[0].to(dtype), f[1].to(dtype)), R2, V2)
    if DIVIDE:
        den += rowdot(f, as_row(n1), R2)
    return acc, den


@triton.jit
def read_weights(
    matrix, D: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr, DV: tl.constexpr, V1: tl.constexpr,
    V2: tl.constexpr, PITCH: tl.constexpr,
):  # fmt: skip
    """Return M' of both halves of the features."""
    plus = trans4(load4(matrix, D, R1, R2, DV, V1, V2, PITCH, 1))
    return plus, trans4(load4(matrix + D * PITCH, D, R1, R2, DV, V1, V2, PITCH, 1))


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def pair_readout(
    x, out, state, matrix, xs, os, N, H, GX, TILES, chunk, scale, eps, DIVIDE: tl.constexpr,
    ALIGNS: tl.constexpr, LENGTHS: tl.constexpr, D: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr,
    DV: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, M1: tl.constexpr, OFF: tl.constexpr, PITCH: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """out [B, N, H, DV] = phi(x) M / (phi(x).m1 + eps), or scale phi(x) M unless DIVIDE; matrix: M rounded, OFF of
    LENGTHS[1] numbers per head; m1 is the column M1 of LENGTHS[0] of a workspace."""
    _, b, h, part = tile_place(H, TILES, 1)
    at, N, scale = span(N, b, b * H + h, scale)
    head = (b * H + h).to(tl.int64)
    w = read_weights(matrix + head * LENGTHS[1] + OFF, D, R1, R2, DV, V1, V2, PITCH)
    m1 = zeros2(R1, R2)
    n1 = m1
    if DIVIDE:
        m1 = column(state + head * LENGTHS[0] + M1, 0, D, R1, R2, PITCH)
        n1 = column(state + head * LENGTHS[0] + M1, 1, D, R1, R2, PITCH)
    x = at_head(x, xs, at, h // GX, ALIGNS[0])
    out = at_head(out, os, at, h, ALIGNS[1])
    xn, on = xs[1] * ALIGNS[0], os[1] * ALIGNS[1]
    i = tl.arange(0, BN)
    hi = upto(part * chunk + chunk, N)
    for start in tl.range(part * chunk, hi[0], BN, disable_licm=True):
        live = alive(start + i, hi)
        tx = load_rows(first_row(x, start, xn), i, xn, live, D, R1, R2, False)
        o2 = tl.zeros([1, 1], tl.float32)
        if V2 > 0:
            o2 = tl.zeros([V2, BN], tl.float32)
        acc = (tl.zeros([V1, BN], tl.float32), o2)
        acc, den = read_features(acc, tl.zeros([BN], tl.float32), tx, w, m1, n1, live, DIVIDE, D, R1, R2, V2)
        by = den + scale
        if DIVIDE:
            by = 1.0 / (den + eps)
        o1 = tl.trans(acc[0] * by[None, :])
        o2 = o1
        if V2 > 0:
            o2 = tl.trans(acc[1] * by[None, :])
        store_rows(first_row(out, start, on), i, on, live, (o1, o2), DV, V1, V2)


@triton.jit
def load_weights(
    matrix, plane, half, D: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr, DV: tl.constexpr,
    V1: tl.constexpr, V2: tl.constexpr, PITCH: tl.constexpr,
):  # fmt: skip
    """What values are multiplied by for the features of one half, [V, D]: two terms."""
    matrix += half * D * PITCH
    high = load4(matrix, D, R1, R2, DV, V1, V2, PITCH, 1)
    low = load4(matrix + offset(plane), D, R1, R2, DV, V1, V2, PITCH, 1)
    return trans4(high), trans4(low)


@triton.jit
def times_weights(y, m, BN: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr, V2: tl.constexpr):
    """y m of a tile of tokens y, for two terms of m. Eight warps share the columns of 64 rows unless a product starts
    from another one, and the compiler makes an addition of two that (a multiplication by one it does not)."""
    if BN == 64 and R1 == 128:
        low = rowmul(zero_rows(BN, R1, R2), y, m[1], V2, R2, "tf32")
        high = rowmul(zero_rows(BN, R1, R2), y, m[0], V2, R2, "tf32")
        o1 = tl.fma(low[0], tl.full([BN, R1], 1.0, tl.float32), high[0])
        return o1, o1
    acc = rowmul(zero_rows(BN, R1, R2), y, m[1], V2, R2, "tf32")
    return rowmul(acc, y, m[0], V2, R2, "tf32")


@triton.jit
def plus_row(x, c, row, R2: tl.constexpr):
    """Return x + c row of a tile of tokens x and a number c of each."""
    x2 = x[1]
    if R2 > 0:
        x2 = x[1] + c[:, None] * row[1][None, :]
    return x[0] + c[:, None] * row[0][None, :], x2


@triton.jit
def back_half(
    x, y, m, m1, live, SIGN: tl.constexpr, RATIO: tl.constexpr, D: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr,
    V2: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Through the softmax f of one half: y m and, apart with RATIO, m1; f.(y m), f.m1."""
    t = times_weights(y, m, BN, R1, R2, V2)
    f = half_of(x, live, SIGN, D, R1, R2)
    row = as_row(m1)
    if RATIO:
        dot = rowdot(f, t, R2)
        den = rowdot(f, row, R2)
        b2 = f[1]
        if R2 > 0:
            b2 = f[1] * (row[1] - den[:, None])
        a = minus_mean(f, t, dot, R2)
        b = (f[0] * (row[0] - den[:, None]), b2)
    else:
        t2 = t[1]
        if R2 > 0:
            t2 = t[1] + row[1]
        t = (t[0] + row[0], t2)
        dot = rowdot(f, t, R2)
        den = dot
        a = minus_mean(f, t, dot, R2)
        b = a
    return a, b, dot, den


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def pair_tokens(
    x, y, out, state, matrix, ratio, xs, ys, os, plane, N, H, GX, GY, TILES, chunk, scale, eps,
    RATIO: tl.constexpr, ALIGNS: tl.constexpr, LENGTHS: tl.constexpr, D: tl.constexpr, R1: tl.constexpr,
    R2: tl.constexpr, DV: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, M1: tl.constexpr, OFF: tl.constexpr,
    PITCH: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """out [B, N, H, D] = the gradient of x through both softmaxes of a (y M') + b m1. RATIO: of queries, y the
    gradient of (phi(x) M) / (phi(x).m1 + eps): a = 1 / denominator and b, the gradient of the denominator, which are
    written; out may be None. Otherwise both are `scale`."""
    _, b, h, part = tile_place(H, TILES, 1)
    most = longest(N)
    at, N, scale = span(N, b, b * H + h, scale)
    head = (b * H + h).to(tl.int64)
    matrix += head * LENGTHS[1] + OFF
    mp = load_weights(matrix, plane, 0, D, R1, R2, DV, V1, V2, PITCH)
    mm = load_weights(matrix, plane, 1, D, R1, R2, DV, V1, V2, PITCH)
    m1 = column(state + head * LENGTHS[0] + M1, 0, D, R1, R2, PITCH)
    n1 = column(state + head * LENGTHS[0] + M1, 1, D, R1, R2, PITCH)
    x = at_head(x, xs, at, h // GX, ALIGNS[0])
    y = at_head(y, ys, at, h // GY, ALIGNS[1])
    xn, yn, on = xs[1] * ALIGNS[0], ys[1] * ALIGNS[1], os[1] * ALIGNS[2]
    e = units(R1, R2, x.dtype.element_ty)
    i = tl.arange(0, BN)
    hi = upto(part * chunk + chunk, N)
    for start in tl.range(part * chunk, hi[0], BN, disable_licm=True):
        live = alive(start + i, hi)
        tx = load_rows(first_row(x, start, xn), i, xn, live, D, R1, R2, False)
        ty = load_rows(first_row(y, start, yn), i, yn, live, DV, V1, V2, False)
        tx = as_product(tx, e, R2)
        plus = back_half(tx, ty, mp, m1, live, 1.0, RATIO, D, R1, R2, V2, BN)
        minus = back_half(tx, ty, mm, n1, live, -1.0, RATIO, D, R1, R2, V2, BN)
        first = tl.where(live, scale, 0.0)
        last = first
        if RATIO:
            first = tl.where(live, 1.0 / (plus[3] + minus[3] + eps), 0.0)
            last = -(plus[2] + minus[2]) * first * first
            to = ratio + head * 2 * most + start + i
            tl.store(to, first, mask=live)
            tl.store(to + most, last, mask=live)
        if out is not None:
            d1 = (plus[0][0] - minus[0][0]) * first[:, None]
            d2 = d1
            if R2 > 0:
                d2 = (plus[0][1] - minus[0][1]) * first[:, None]
            if RATIO:
                d1 += (plus[1][0] - minus[1][0]) * last[:, None]
                if R2 > 0:
                    d2 += (plus[1][1] - minus[1][1]) * last[:, None]
            to = at_head(out, os, at, h, ALIGNS[2])
            store_rows(first_row(to, start, on), i, on, live, (d1, d2), D, R1, R2)
