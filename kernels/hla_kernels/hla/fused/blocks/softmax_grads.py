"""Softmax pair of wide heads with a higher-order ratio: features, products and their gradients."""

import triton
import triton.language as tl

from ..heads import at_head
from ..loops import longest, span
from ..loops.extent import alive
from ..tiles import load4, load_rows, rowmul, store_rows, zero_rows
from .features import first_row, offset, tile_place
from .softmaxes import NO_SPECIALIZE, as_product, column, half_of, load_weights, plus_row, through, times_weights, units


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def pair_features(
    x, out, xs, os, N, H, TILES, ALIGNS: tl.constexpr, D: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """out [B, N, H, 2 D] = phi(x), rounded."""
    _, b, h, tile = tile_place(H, TILES, 1)
    at, N, _ = span(N, b, b * H + h, 0.0)
    i = tl.arange(0, BN)
    live = alive(tile * BN + i, N)
    xn, on = xs[1] * ALIGNS[0], os[1] * ALIGNS[1]
    tx = load_rows(first_row(at_head(x, xs, at, h, ALIGNS[0]), tile * BN, xn), i, xn, live, D, R1, R2, False)
    to = first_row(at_head(out, os, at, h, ALIGNS[1]), tile * BN, on)
    store_rows(to, i, on, live, half_of(tx, live, 1.0, D, R1, R2), D, R1, R2)
    store_rows(to + D, i, on, live, half_of(tx, live, -1.0, D, R1, R2), D, R1, R2)


@triton.jit
def load_features(
    f, start, i, stride, live, tile, ON: tl.constexpr, D: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr,
):  # fmt: skip
    """Both halves of the features of a tile, unless ON `tile` twice."""
    plus = tile
    minus = tile
    if ON:
        f = first_row(f, start, stride)
        plus = load_rows(f, i, stride, live, D, R1, R2, False)
        minus = load_rows(f + D, i, stride, live, D, R1, R2, False)
    return plus, minus


@triton.jit
def add_features(
    acc, f, weights, plane, half, TURNED: tl.constexpr, D: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr,
    PITCH: tl.constexpr,
):  # fmt: skip
    """acc + f w for kept features f and the columns, TURNED: rows, of one half of weights [2 D, 2 D] in two terms."""
    for s in tl.static_range(2):
        if TURNED:
            at = weights + half * D * PITCH + s * D
            high = load4(at, D, R1, R2, D, R1, R2, 1, PITCH)
            low = load4(at + offset(plane), D, R1, R2, D, R1, R2, 1, PITCH)
        else:
            at = weights + s * D * PITCH + half * D
            high = load4(at, D, R1, R2, D, R1, R2, PITCH, 1)
            low = load4(at + offset(plane), D, R1, R2, D, R1, R2, PITCH, 1)
        acc = rowmul(acc, f[s], low, R2, R2, "tf32")
        acc = rowmul(acc, f[s], high, R2, R2, "tf32")
    return acc


@triton.jit
def gradient_of_half(
    x, e, y, g, f0, f1, live, first, last, scale, state, work, matrix, weights, planes, half,
    RATIO: tl.constexpr, VALUES: tl.constexpr, FEATURES: tl.constexpr, D: tl.constexpr, R1: tl.constexpr,
    R2: tl.constexpr, DV: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, M1: tl.constexpr, PITCH: tl.constexpr,
    WIDE: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Return the gradient through one softmax. RATIO: one chain of products, with g in units of `scale` (if it is zero,
    all products are)."""
    acc = zero_rows(BN, R1, R2)
    if RATIO:
        acc = times_weights(g, load_weights(matrix, planes[0], half, D, R1, R2, DV, V1, V2, PITCH), BN, R1, R2, V2)
        unit = (first / tl.where(scale == 0.0, 1.0, scale))[:, None]
        acc = (acc[0] * unit, acc[1] * unit)
    if VALUES[0] >= 0:
        m = load_weights(weights + VALUES[0], planes[1], half, D, R1, R2, DV, V1, V2, PITCH)
        acc = rowmul(rowmul(acc, y, m[1], V2, R2, "tf32"), y, m[0], V2, R2, "tf32")
    if FEATURES[0][0] >= 0:
        acc = add_features(acc, f0, weights + FEATURES[0][0], planes[1], half, FEATURES[0][1], D, R1, R2, WIDE)
    if FEATURES[1][0] >= 0:
        acc = add_features(acc, f1, weights + FEATURES[1][0], planes[1], half, FEATURES[1][1], D, R1, R2, WIDE)
    if VALUES[0] >= 0:
        one = tl.where(live, 1.0, 0.0)
        acc = plus_row(acc, one, column(work + VALUES[1], half, D, R1, R2, PITCH), R2)
    acc = (acc[0] * scale, acc[1] * scale)
    if RATIO:
        acc = plus_row(acc, last, column(state + M1, half, D, R1, R2, PITCH), R2)
    f = half_of(as_product(x, e, R2), live, 1.0 - 2.0 * half, D, R1, R2)
    return through(f, acc, R2)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def pair_grads(
    x, y, g, f0, f1, out, ratio, state, work, matrix, weights, xs, ys, gs, fs, hs, os, planes, N, H, G, GX, TILES,
    scale, RATIO: tl.constexpr, VALUES: tl.constexpr, FEATURES: tl.constexpr, ALIGNS: tl.constexpr,
    LENGTHS: tl.constexpr, D: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr, DV: tl.constexpr, V1: tl.constexpr,
    V2: tl.constexpr, M1: tl.constexpr, PITCH: tl.constexpr, WIDE: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """out [B, N, H, D] = the gradient of q (RATIO) or of k through both softmaxes: of values y, and of kept features f0
    of q and f1 of k.

    VALUES = (weights in `weights`, column of ones in `work`), or (-1, -1). FEATURES: (weights, whether transposed) for
    f0 and for f1, or (-1, .). LENGTHS: per head in state, work, matrix, weights.
    """
    _, b, h, tile = tile_place(H, TILES, 1)
    most = longest(N)
    at, N, scale = span(N, b, b * H + h, scale)
    head = (b * H + h).to(tl.int64)
    i = tl.arange(0, BN)
    live = alive(tile * BN + i, N)
    xn, yn, gn, on = xs[1] * ALIGNS[0], ys[1] * ALIGNS[1], gs[1] * ALIGNS[2], os[1] * ALIGNS[5]
    fn = (fs[1] * ALIGNS[3], hs[1] * ALIGNS[4])
    tx = load_rows(first_row(at_head(x, xs, at, h // GX, ALIGNS[0]), tile * BN, xn), i, xn, live, D, R1, R2, False)
    ty = tx
    if VALUES[0] >= 0:
        ty = load_rows(first_row(at_head(y, ys, at, h // G, ALIGNS[1]), tile * BN, yn), i, yn, live, DV, V1, V2, False)
    tg = tx
    e = units(R1, R2, x.dtype.element_ty)
    first = tl.where(live, 1.0, 0.0)
    last = first
    if RATIO:
        tg = load_rows(first_row(at_head(g, gs, at, h, ALIGNS[2]), tile * BN, gn), i, gn, live, DV, V1, V2, False)
        first = tl.load(ratio + head * 2 * most + tile * BN + i, mask=live, other=0.0)
        last = tl.load(ratio + (head * 2 + 1) * most + tile * BN + i, mask=live, other=0.0)
    f0 = load_features(at_head(f0, fs, at, h, ALIGNS[3]), tile * BN, i, fn[0], live, tg, FEATURES[0][0] >= 0, D, R1, R2)
    f1 = load_features(
        at_head(f1, hs, at, h // G, ALIGNS[4]), tile * BN, i, fn[1], live, tg, FEATURES[1][0] >= 0, D, R1, R2
    )
    state += head * LENGTHS[0]
    work += head * LENGTHS[1]
    matrix += head * LENGTHS[2]
    weights += head * LENGTHS[3]
    d = zero_rows(BN, R1, R2)
    for half in tl.range(0, 2, disable_licm=True):
        back = gradient_of_half(
            tx, e, ty, tg, f0, f1, live, first, last, scale, state, work, matrix, weights, planes, half, RATIO,
            VALUES, FEATURES, D, R1, R2, DV, V1, V2, M1, PITCH, WIDE, BN,
        )  # fmt: skip
        sign = 1.0 - 2.0 * half
        d2 = d[1]
        if R2 > 0:
            d2 += sign * back[1]
        d = (d[0] + sign * back[0], d2)
    to = first_row(at_head(out, os, at, h, ALIGNS[5]), tile * BN, on)
    store_rows(to, i, on, live, d, D, R1, R2)
