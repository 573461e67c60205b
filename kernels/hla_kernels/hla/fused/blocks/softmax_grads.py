"""Both softmaxes of wide heads, a ratio of higher order: their features, which products of features read as they are,
and what comes back from those."""

import triton
import triton.language as tl

from ..heads import at_head
from ..loops import longest, span
from ..loops.extent import alive
from ..tiles import load4, load_rows, rowmul, store_rows, zero_rows
from .features import first_row, offset, tile_place
from .softmaxes import NO_SPECIALIZE, as_product, column, half_of, load_weights, plus_row, through, times_weights


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
def add_features(
    acc, f, i, fn, live, weights, plane, half, TURNED: tl.constexpr, D: tl.constexpr, R1: tl.constexpr,
    R2: tl.constexpr, PITCH: tl.constexpr,
):  # fmt: skip
    """acc + f w for kept features f and the columns, TURNED: rows, of one half of weights [2 D, 2 D] in two terms."""
    for s in tl.static_range(2):
        tf = load_rows(f + s * D, i, fn, live, D, R1, R2, False)
        if TURNED:
            at = weights + half * D * PITCH + s * D
            high = load4(at, D, R1, R2, D, R1, R2, 1, PITCH)
            low = load4(at + offset(plane), D, R1, R2, D, R1, R2, 1, PITCH)
        else:
            at = weights + s * D * PITCH + half * D
            high = load4(at, D, R1, R2, D, R1, R2, PITCH, 1)
            low = load4(at + offset(plane), D, R1, R2, D, R1, R2, PITCH, 1)
        acc = rowmul(acc, tf, low, R2, R2, "tf32")
        acc = rowmul(acc, tf, high, R2, R2, "tf32")
    return acc


@triton.jit
def gradient_of_half(
    x, y, g, f0, f1, fn, i, live, first, last, scale, state, work, matrix, weights, planes, half,
    RATIO: tl.constexpr, VALUES: tl.constexpr, FEATURES: tl.constexpr, D: tl.constexpr, R1: tl.constexpr,
    R2: tl.constexpr, DV: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, M1: tl.constexpr, PITCH: tl.constexpr,
    WIDE: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """What comes back through one softmax."""
    acc = zero_rows(BN, R1, R2)
    if VALUES[0] >= 0:
        acc = times_weights(y, load_weights(weights + VALUES[0], planes[1], half, D, R1, R2, DV, V1, V2, PITCH),
                            BN, R1, R2, V2)  # fmt: skip
    if FEATURES[0][0] >= 0:
        acc = add_features(
            acc, f0, i, fn[0], live, weights + FEATURES[0][0], planes[1], half, FEATURES[0][1], D, R1, R2, WIDE
        )
    if FEATURES[1][0] >= 0:
        acc = add_features(
            acc, f1, i, fn[1], live, weights + FEATURES[1][0], planes[1], half, FEATURES[1][1], D, R1, R2, WIDE
        )
    one = tl.where(live, 1.0, 0.0)
    if VALUES[0] >= 0:
        acc = plus_row(acc, one, column(work + VALUES[1], half, D, R1, R2, PITCH), R2)
    a1 = acc[0] * scale
    a2 = acc[1] * scale
    if RATIO:
        t = times_weights(g, load_weights(matrix, planes[0], half, D, R1, R2, DV, V1, V2, PITCH), BN, R1, R2, V2)
        a1 += t[0] * first[:, None]
        if R2 > 0:
            a2 += t[1] * first[:, None]
        a1, a2 = plus_row((a1, a2), last, column(state + M1, half, D, R1, R2, PITCH), R2)
    return through(half_of(x, live, 1.0 - 2.0 * half, D, R1, R2), (a1, a2), R2)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def pair_grads(
    x, y, g, f0, f1, out, ratio, state, work, matrix, weights, xs, ys, gs, fs, hs, os, planes, N, H, G, GX, TILES,
    scale, RATIO: tl.constexpr, VALUES: tl.constexpr, FEATURES: tl.constexpr, ALIGNS: tl.constexpr,
    LENGTHS: tl.constexpr, D: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr, DV: tl.constexpr, V1: tl.constexpr,
    V2: tl.constexpr, M1: tl.constexpr, PITCH: tl.constexpr, WIDE: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """out [B, N, H, D] = the gradient of q (RATIO) or of k through both softmaxes: of values y, and of kept features f0
    of q and f1 of k.

    VALUES = (weights in `weights`, column of ones in `work`), or (-1, -1). FEATURES: (weights, whether those are
    turned) of f0 and of f1, or (-1, .). LENGTHS of a head in state, work, matrix, weights.
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
    tx = as_product(tx, R1, R2)
    first = tl.where(live, 1.0, 0.0)
    last = first
    if RATIO:
        tg = load_rows(first_row(at_head(g, gs, at, h, ALIGNS[2]), tile * BN, gn), i, gn, live, DV, V1, V2, False)
        first = tl.load(ratio + head * 2 * most + tile * BN + i, mask=live, other=0.0)
        last = tl.load(ratio + (head * 2 + 1) * most + tile * BN + i, mask=live, other=0.0)
    f0 = first_row(at_head(f0, fs, at, h, ALIGNS[3]), tile * BN, fn[0])
    f1 = first_row(at_head(f1, hs, at, h // G, ALIGNS[4]), tile * BN, fn[1])
    state += head * LENGTHS[0]
    work += head * LENGTHS[1]
    matrix += head * LENGTHS[2]
    weights += head * LENGTHS[3]
    d = zero_rows(BN, R1, R2)
    for half in range(2):
        back = gradient_of_half(
            tx, ty, tg, f0, f1, fn, i, live, first, last, scale, state, work, matrix, weights, planes, half, RATIO,
            VALUES, FEATURES, D, R1, R2, DV, V1, V2, M1, PITCH, WIDE, BN,
        )  # fmt: skip
        sign = 1.0 - 2.0 * half
        d2 = d[1]
        if R2 > 0:
            d2 += sign * back[1]
        d = (d[0] + sign * back[0], d2)
    to = first_row(at_head(out, os, at, h, ALIGNS[5]), tile * BN, on)
    store_rows(to, i, on, live, d, D, R1, R2)
