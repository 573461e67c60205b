"""Passes over tokens stored as planes (`features`): sums of tokens, and products with matrices."""

import triton
import triton.language as tl

from ..heads import at_head
from ..loops import longest, span, upto
from ..loops.extent import alive
from .features import first_row, offset, tile_place

NO_SPECIALIZE = [
    "xs", "ys", "os", "qs", "ks", "vs", "gs", "N", "H", "G", "GX", "GY", "TILES", "PARTS", "chunk", "heads", "scale",
    "eps", "xp", "yp", "mp", "planes", "K", "KM",
]  # fmt: skip


@triton.jit
def load_columns(ptr, i, stride, live, c, WIDTH: tl.constexpr):
    """Columns c of rows i, zero where not live and beyond WIDTH."""
    return tl.load(ptr + i[:, None] * stride + c[None, :], mask=live[:, None] & (c < WIDTH)[None, :], other=0.0)


@triton.jit
def load_planes(ptr, plane, i, si, rows, j, sj, cols, COUNT: tl.constexpr):
    """Elements (i, j) of a matrix with strides (si, sj) as up to three tiles, zero where not `rows` and `cols`."""
    at = ptr + i[:, None] * si + j[None, :] * sj
    keep = rows[:, None] & cols[None, :]
    x0 = tl.load(at, mask=keep, other=0.0)
    x1 = x0
    x2 = x0
    if COUNT > 1:
        x1 = tl.load(at + offset(plane), mask=keep, other=0.0)
    if COUNT > 2:
        x2 = tl.load(at + 2 * offset(plane), mask=keep, other=0.0)
    return x0, x1, x2


@triton.jit
def whole(x, COUNT: tl.constexpr):
    """Return the sum of planes."""
    y = x[0].to(tl.float32)
    if COUNT > 1:
        y += x[1].to(tl.float32)
    if COUNT > 2:
        y += x[2].to(tl.float32)
    return y


@triton.jit
def add_tile(acc, x, y):
    """Return acc + x y. Tensor cores, which truncate their accumulator, sum only within the tile: a nonzero constant
    keeps the addition of acc from being folded into the product."""
    return acc + tl.dot(x, y, input_precision="ieee", max_num_imprecise_acc=16)


@triton.jit
def more(acc, x, y):
    """Return acc + x y, accumulated on tensor cores."""
    return tl.dot(x, y, acc, input_precision="ieee")


@triton.jit
def add_whole(acc, x, y, XP: tl.constexpr, YP: tl.constexpr, DIGITS: tl.constexpr):
    """Run `add_products` for 2 or 3 DIGITS."""
    first = add_tile(tl.zeros(acc.shape, tl.float32), x[0], y[0])
    rest = tl.zeros(acc.shape, tl.float32)
    if DIGITS == 3:
        rest = more(-first, x[0], y[0])
    if XP > 2:
        rest = more(rest, x[2], y[0])
    if YP > 2:
        rest = more(rest, x[0], y[2])
    if XP > 1 and YP > 1:
        rest = more(rest, x[1], y[1])
    if XP > 1:
        rest = more(rest, x[1], y[0])
    if YP > 1:
        rest = more(rest, x[0], y[1])
    return acc + (first + rest)


@triton.jit
def add_products(acc, x, y, XP: tl.constexpr, YP: tl.constexpr, DIGITS: tl.constexpr):
    """Return acc + x y for XP and YP planes, with the products of planes whose indices sum to at most DIGITS (1 or 2);
    with 2, acc is rounded once. 3: as 2, plus the truncation error of the first product on tensor cores (the same
    product minus their result). 0: as 1, accumulated on tensor cores."""
    if DIGITS > 1:
        acc = add_whole(acc, x, y, XP, YP, DIGITS)
    elif DIGITS == 1:
        if XP > 1:
            acc = add_tile(acc, x[1], y[0])
        if YP > 1:
            acc = add_tile(acc, x[0], y[1])
        acc = add_tile(acc, x[0], y[0])
    else:
        if XP > 1:
            acc = more(acc, x[1], y[0])
        if YP > 1:
            acc = more(acc, x[0], y[1])
        acc = more(acc, x[0], y[0])
    return acc


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def block_moments(
    x, y, ratio, out, xs, ys, xp, yp, N, H, GX, GY, PARTS, chunk, heads, ALIGNS: tl.constexpr, X: tl.constexpr,
    Y: tl.constexpr, XP: tl.constexpr, YP: tl.constexpr, ONES: tl.constexpr, DIVIDED: tl.constexpr,
    PITCH: tl.constexpr, BN: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, DIGITS: tl.constexpr,
):  # fmt: skip
    """Compute partial moments Sum x y' in out [PARTS, B * H, X, PITCH]. ONES: y has an additional column of ones or,
    with DIVIDED, of the gradients of the denominators of a ratio."""
    BLOCKS: tl.constexpr = (Y + COLS - 1) // COLS
    block, b, h, part = tile_place(H, PARTS, ((X + ROWS - 1) // ROWS) * BLOCKS)
    most = longest(N)
    at, N, _ = span(N, b, b * H + h, 0.0)
    head = (b * H + h).to(tl.int64)
    x = at_head(x, xs, at, h // GX, ALIGNS[0])
    y = at_head(y, ys, at, h // GY, ALIGNS[1])
    xn, yn = xs[1] * ALIGNS[0], ys[1] * ALIGNS[1]
    cx = (block // BLOCKS) * ROWS + tl.arange(0, ROWS)
    cy = (block % BLOCKS) * COLS + tl.arange(0, COLS)
    i = tl.arange(0, BN)
    hi = upto(part * chunk + chunk, N)
    acc = tl.zeros([ROWS, COLS], tl.float32)
    ones = tl.zeros([BN, ROWS], tl.float32)
    for start in range(part * chunk, hi[0], BN):
        live = alive(start + i, hi)
        tx = load_planes(first_row(x, start, xn), xp, i, xn, live, cx, 1, cx < X, XP)
        ty = load_planes(first_row(y, start, yn), yp, i, yn, live, cy, 1, cy < Y, YP)
        if DIVIDED:
            last = tl.load(ratio + (head * 2 + 1) * most + start + i, mask=live, other=0.0)
            ones += whole(tx, XP) * last[:, None]
        elif ONES:
            ones += whole(tx, XP)
        acc = add_products(acc, (tl.trans(tx[0]), tl.trans(tx[1]), tl.trans(tx[2])), ty, XP, YP, DIGITS)
    to = out + ((part.to(tl.int64) * heads + head) * X + cx) * PITCH
    tl.store(to[:, None] + cy[None, :], acc, mask=(cx < X)[:, None] & (cy < Y)[None, :])
    if ONES and block % BLOCKS == 0:
        tl.store(to + Y, tl.sum(ones, 0), mask=cx < X)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def block_ratio(
    q, g, state, matrix, ratio, qs, gs, xp, mp, N, H, TILES, eps, K, KM, ALIGNS: tl.constexpr, QP: tl.constexpr,
    MP: tl.constexpr, F: tl.constexpr, DV: tl.constexpr, M: tl.constexpr, PITCH: tl.constexpr, BN: tl.constexpr,
    COLS: tl.constexpr, INNER: tl.constexpr, DIGITS: tl.constexpr,
):  # fmt: skip
    """Compute 1 / den and d loss / d den of every query in ratio [B * H, 2, N], for o = q M / den, den = q.m1 + eps;
    matrix: the planes of the state from place M on."""
    _, b, h, tile = tile_place(H, TILES, 1)
    most = longest(N)
    at, N, _ = span(N, b, b * H + h, 0.0)
    head = (b * H + h).to(tl.int64)
    i = tl.arange(0, BN)
    live = alive(tile * BN + i, N)
    qn, gn = qs[1] * ALIGNS[0], gs[1] * ALIGNS[1]
    q = first_row(at_head(q, qs, at, h, ALIGNS[0]), tile * BN, qn)
    g = first_row(at_head(g, gs, at, h, ALIGNS[1]), tile * BN, gn)
    state += head * K + M
    matrix += head * KM
    j = tl.arange(0, COLS)
    den = tl.zeros([BN], tl.float32)
    dot = tl.zeros([BN], tl.float32)
    one = dot + 1.0
    for c in range(0, DV, COLS):
        acc = tl.zeros([BN, COLS], tl.float32)
        for start in range(0, F, INNER):
            r = start + tl.arange(0, INNER)
            tq = load_planes(q, xp, i, qn, live, r, 1, r < F, QP)
            w = load_planes(matrix, mp, r, PITCH, r < F, c + j, 1, c + j < DV, MP)
            acc = add_products(acc, tq, w, QP, MP, DIGITS)
            if c == 0:
                m1 = tl.load(state + r * PITCH + DV, mask=r < F, other=0.0)
                den += tl.sum(whole(tq, QP) * m1[None, :], 1)
        dot += tl.sum(acc * load_columns(g, i, gn, live, c + j, DV).to(tl.float32), 1)
    inverse = tl.where(live, tl.div_rn(one, den + eps), 0.0)
    to = ratio + head * 2 * most + tile * BN + i
    tl.store(to, inverse, mask=live)
    tl.store(to + most, -dot * inverse * inverse, mask=live)


@triton.jit
def add_source(
    acc, row, den, x, xn, xp, i, live, c, last, state, sums, weights, wp, n, XP: tl.constexpr, HAVE: tl.constexpr,
    SR: tl.constexpr, SC: tl.constexpr, WIDTH: tl.constexpr, CENTRED: tl.constexpr, M1: tl.constexpr,
    OUT: tl.constexpr, INNER: tl.constexpr, MP: tl.constexpr, DIGITS: tl.constexpr,
):  # fmt: skip
    """Return (acc + source weight, row - mean of the source times weight, den + q.m1) of one pair of `block_apply`."""
    for start in range(0, HAVE, INNER):
        r = start + tl.arange(0, INNER)
        tx = load_planes(x, xp, i, xn, live, r, 1, r < HAVE, XP)
        w = load_planes(weights, wp, r, SR, r < HAVE, c, SC, c < OUT, MP)
        acc = add_products(acc, tx, w, XP, MP, DIGITS)
        if CENTRED:
            mean = tl.load(sums + r, mask=r < HAVE, other=0.0) / n
            row -= tl.sum(mean[:, None] * whole(w, MP), 0)
        if M1[0] >= 0:
            m1 = tl.load(state + M1[0] + r * M1[1], mask=r < HAVE, other=0.0)
            den += tl.sum(whole(tx, XP) * m1[None, :], 1)
    if WIDTH > HAVE:
        w = load_planes(weights, wp, HAVE + tl.arange(0, 1), SR, tl.arange(0, 1) == 0, c, SC, c < OUT, MP)
        acc += last[:, None] * whole(w, MP)
    return acc, row, den


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def block_apply(
    out, q, k, v, g, state, work, matrix, weights, ratio, os, qs, ks, vs, gs, planes, N, H, G, TILES, scale, eps,
    PAIRS: tl.constexpr, COUNT: tl.constexpr, SCALED: tl.constexpr, MEANS: tl.constexpr, ROW: tl.constexpr,
    M1: tl.constexpr, DIVIDED: tl.constexpr, ALIGNS: tl.constexpr, TP: tl.constexpr, F: tl.constexpr, DV: tl.constexpr,
    OUT: tl.constexpr, LENGTHS: tl.constexpr, MP: tl.constexpr, BN: tl.constexpr, COLS: tl.constexpr,
    INNER: tl.constexpr, DIGITS: tl.constexpr,
):  # fmt: skip
    """out [B, N, H, OUT] = Sum source weight over COUNT pairs, the first SCALED of them times the scale of a moment.

    PAIRS has seven numbers of each: source (0 q, 1 k, 2 v, 3 g), planes of the weight (0 `matrix`, 1 `weights`), its
    first element there, strides of its rows and columns, its rows (one more than the columns of the source for v = 1 or
    denominators), whether the source is centred (its sum lies at MEANS). ROW = (workspace, place) of a row, times
    1 / n, or (-1, 0). M1 = (place, pitch) of m1 by which the result is divided, or (-1, 0). DIVIDED: g is the gradient
    of a ratio. LENGTHS: per head in state, work, matrix, weights. TP: number of planes of the tokens; planes: strides
    between the planes of q, k, v, g, matrix, weights.
    """
    block, b, h, tile = tile_place(H, TILES, (OUT + COLS - 1) // COLS)
    most = longest(N)
    at, N, scale = span(N, b, b * H + h, scale)
    head = (b * H + h).to(tl.int64)
    i = tl.arange(0, BN)
    live = alive(tile * BN + i, N)
    n = N[1]
    state += head * LENGTHS[0]
    work += head * LENGTHS[1]
    given = (matrix + head * LENGTHS[2], weights + head * LENGTHS[3])
    tn = (qs[1] * ALIGNS[0], ks[1] * ALIGNS[1], vs[1] * ALIGNS[2], gs[1] * ALIGNS[3])
    tokens = (
        first_row(at_head(q, qs, at, h, ALIGNS[0]), tile * BN, tn[0]),
        first_row(at_head(k, ks, at, h // G, ALIGNS[1]), tile * BN, tn[1]),
        first_row(at_head(v, vs, at, h // G, ALIGNS[2]), tile * BN, tn[2]),
        first_row(at_head(g, gs, at, h, ALIGNS[3]), tile * BN, tn[3]),
    )
    one = tl.where(live, 1.0, 0.0)
    lost = one
    if DIVIDED:
        lost = tl.load(ratio + (head * 2 + 1) * most + tile * BN + i, mask=live, other=0.0)
    c = block * COLS + tl.arange(0, COLS)
    acc = tl.zeros([BN, COLS], tl.float32)
    row = tl.zeros([COLS], tl.float32)
    den = tl.zeros([BN], tl.float32)
    for p in tl.static_range(COUNT):
        acc, row, den = add_source(
            acc, row, den, tokens[PAIRS[7 * p]], tn[PAIRS[7 * p]], planes[PAIRS[7 * p]], i, live, c,
            lost if PAIRS[7 * p] == 3 else one, state,
            (work if PAIRS[7 * p] == 3 else state) + MEANS[PAIRS[7 * p]],
            given[PAIRS[7 * p + 1]] + PAIRS[7 * p + 2], planes[4 + PAIRS[7 * p + 1]], n, TP[PAIRS[7 * p]],
            F if PAIRS[7 * p] < 2 else DV, PAIRS[7 * p + 3], PAIRS[7 * p + 4], PAIRS[7 * p + 5], PAIRS[7 * p + 6], M1,
            OUT, INNER, MP, DIGITS,
        )  # fmt: skip
        if p == SCALED - 1:
            acc *= scale
            row *= scale
    if ROW[0] >= 0:
        row += tl.load((state, work)[ROW[0]] + ROW[1] + c, mask=c < OUT, other=0.0) / n
    acc += row[None, :]
    if M1[0] >= 0:
        acc = acc / (den + eps)[:, None]
    on = os[1] * ALIGNS[4]
    to = first_row(at_head(out, os, at, h, ALIGNS[4]), tile * BN, on) + i[:, None] * on + c[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=live[:, None] & (c < OUT)[None, :])
