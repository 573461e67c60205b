"""Shared functions of the passes: positions of heads and tiles, and products of token tiles.

Tiles are pairs (`hla.fused.tiles`).

x_ij = q_i.k_j - q_i.kbar are the centred products before scaling, and y_ij the same for the narrow pair (R > 0);
without one, R = 0 and y = x. With a = c1 scale and b = c2 scale^2, the weight is w = a x + b y^2 / 2, with derivatives
a and b y.
"""

import triton
import triton.language as tl

from ....hla.fused.loops.writes import as_row
from ....hla.fused.tiles import axpy2, load_rows, load_vec, store_rows

NO_SPECIALIZE = [
    "qs", "ks", "vs", "os", "gs", "dqs", "dks", "dvs", "q2s", "k2s", "dq2s", "dk2s", "N", "H", "G", "scale", "blocks",
    "count",
]  # fmt: skip


@triton.jit
def place(blocks):
    """Return (head in the batch, tile) of this program; tiles of a head run consecutively, to share tokens in cache."""
    pid = tl.program_id(0)
    return pid // blocks, pid % blocks


@triton.jit
def at_head(ptr, strides, b, h, ALIGN: tl.constexpr):
    """Return the pointer to token 0 of a head."""
    return ptr + (b.to(tl.int64) * (strides[0] // 2) + h.to(tl.int64) * (strides[2] // 2)) * ALIGN


@triton.jit
def at_token(ptr, start, stride):
    """Return the pointer to token `start` of a head."""
    return ptr + (tl.full([], 0, tl.int64) + start) * stride  # in the interpreter, a loop variable has no .to


@triton.jit
def load_at(ptr, start, stride, live, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr):
    """Load the tokens of a head from `start` on, zero where not live."""
    return load_rows(at_token(ptr, start, stride), tl.arange(0, live.shape[0]), stride, live, D, D1, D2, False)


@triton.jit
def store_at(ptr, start, stride, inside, x, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr):
    """Store tokens of a head, the inverse of `load_at`."""
    store_rows(at_token(ptr, start, stride), tl.arange(0, inside.shape[0]), stride, inside, x, D, D1, D2)


@triton.jit
def padded(N):
    """Return the padded number of queries per head in a buffer: full tiles, so that loads need no mask (as
    `spec.padded`)."""
    return (N + 63) // 64 * 64


@triton.jit
def live_at(keep, b, start, N, BN: tl.constexpr):
    """Return which of BN tokens from `start` on are real; keep [B, N]: mask of real tokens in bytes, or None."""
    i = start + tl.arange(0, BN)
    live = i < N
    if keep is not None:
        live = live & (tl.load(keep + b.to(tl.int64) * N + i, mask=live, other=0) != 0)
    return live


@triton.jit
def factors(c, h, scale):
    """Return a and b of a head."""
    return tl.load(c + 2 * h).to(tl.float32) * scale, tl.load(c + 2 * h + 1).to(tl.float32) * scale * scale


@triton.jit
def products(x, y, D2: tl.constexpr):
    """Return x y' for two token tiles."""
    s = tl.dot(x[0], tl.trans(y[0]))
    if D2 > 0:
        s = tl.dot(x[1], tl.trans(y[1]), s)
    return s


@triton.jit
def add_weighted(acc, w, x, D2: tl.constexpr):
    """Return acc + w x for a tile of weights w and a token tile x."""
    a1 = tl.dot(w, x[0], acc[0])
    a2 = a1
    if D2 > 0:
        a2 = tl.dot(w, x[1], acc[1])
    return a1, a2


@triton.jit
def weights(one, first, half, x, y, R: tl.constexpr):
    """Return one + first x + half y^2."""
    if R > 0:
        w = one + first * x + half * (y * y)
    else:
        w = one + x * (first + half * x)
    return w


@triton.jit
def sum_vectors(ptr, count, step, ROWS: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr):
    """Sum `count` vectors of D numbers, `step` apart, as a pair; ROWS vectors per iteration."""
    r = tl.arange(0, ROWS)
    c1 = tl.arange(0, D1)
    c2 = D1 + tl.arange(0, D2 if D2 > 0 else 1)
    x1 = tl.zeros([D1], tl.float32)
    x2 = tl.zeros([D2 if D2 > 0 else 1], tl.float32)
    for start in range(0, count, ROWS):
        at = ptr + (start + r)[:, None] * step
        keep = (start + r < count)[:, None]
        x1 += tl.sum(tl.load(at + c1[None, :], mask=keep & (c1 < D)[None, :], other=0.0), 0)
        if D2 > 0:
            x2 += tl.sum(tl.load(at + c2[None, :], mask=keep & (c2 < D)[None, :], other=0.0), 0)
    return x1, x2


@triton.jit
def real_tokens(totals, PARTS: tl.constexpr, W: tl.constexpr):
    """Return the number of real tokens of a head, at least 1."""
    n = tl.load(totals + W - 1)
    for part in tl.static_range(1, PARTS):
        n += tl.load(totals + part * W + W - 1)
    return tl.maximum(n, 1.0)


@triton.jit
def mean(totals, n, PARTS: tl.constexpr, W: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr):
    """Return kbar (or vbar, at offset D) of a head from the sums of its parts."""
    x1, x2 = load_vec(totals, D, D1, D2)
    for part in tl.static_range(1, PARTS):
        y1, y2 = load_vec(totals + part * W, D, D1, D2)
        x1 += y1
        x2 += y2
    return x1 / n, x2 / n


@triton.jit
def times(x, factor, D2: tl.constexpr):
    """Multiply the rows of a pair of float32 tiles by factors."""
    x2 = x[1]
    if D2 > 0:
        x2 = x[1] * factor[:, None]
    return x[0] * factor[:, None], x2


@triton.jit
def lane_sums(x):
    """Return partial row sums [M, 4] of a tile [M, N], one per thread of a quad, so that no data is exchanged between
    threads inside a loop."""
    x = tl.reshape(x, [x.shape[0], x.shape[1] // 8, 4, 2])
    return tl.sum(tl.sum(x, 3), 1)


@triton.jit
def rounded_off(x, dtype: tl.constexpr, D2: tl.constexpr):
    """Return the error of rounding a pair of float32 tiles to `dtype`."""
    x2 = x[1]
    if D2 > 0:
        x2 = x[1] - x[1].to(dtype).to(tl.float32)
    return x[0] - x[0].to(dtype).to(tl.float32), x2


@triton.jit
def row_dots(x, y, D2: tl.constexpr):
    """Return x_i.y_i of two token tiles, in float32."""
    d = tl.sum(x[0].to(tl.float32) * y[0].to(tl.float32), 1)
    if D2 > 0:
        d += tl.sum(x[1].to(tl.float32) * y[1].to(tl.float32), 1)
    return d


@triton.jit
def centred(x, row, D2: tl.constexpr):
    """Subtract a vector from a token tile, with one rounding."""
    y = axpy2((x[0].to(tl.float32), x[1].to(tl.float32)), -1.0, as_row(row), D2)
    return y[0].to(x[0].dtype), y[1].to(x[1].dtype)


@triton.jit
def weighted_sum(x, w, D2: tl.constexpr):
    """Return sum_i w_i x_i of a token tile as a pair of vectors."""
    y1 = tl.sum(x[0].to(tl.float32) * w[:, None], 0)
    y2 = y1
    if D2 > 0:
        y2 = tl.sum(x[1].to(tl.float32) * w[:, None], 0)
    return y1, y2
