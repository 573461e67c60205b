"""Tiles of token pairs: scores, weights and weighted sums."""

import triton
import triton.language as tl

from ....hla.fused.maps import phi, phi32
from ....hla.fused.tiles import load_rows
from ..features import cast2, rest


@triton.jit
def tokens_at(keep, start, N, BN: tl.constexpr):
    """Return (positions, mask of real tokens) of a tile."""
    i = start + tl.arange(0, BN)
    live = i < N
    if keep is not None:
        live = live & (tl.load(keep + i, mask=live, other=0) != 0)
    return i, live


@triton.jit
def load_features(
    ptr, i, stride, live, FMAP: tl.constexpr, DIGITS: tl.constexpr, D: tl.constexpr, F1: tl.constexpr,
    F2: tl.constexpr,
):  # fmt: skip
    """Load phi of tokens in `DIGITS` (1 or 2) values of their dtype, zero for padded tokens."""
    raw = load_rows(ptr, i.to(tl.int64), stride, live, D, F1, F2, False)
    if DIGITS > 1:
        f = phi32(raw, live, FMAP, D, F1, F2)
        high = cast2(f, raw[0].dtype, F2)
        low = cast2(rest(f, high, F2), raw[0].dtype, F2)
    else:
        high = phi(raw, live, FMAP, D, F1, F2)
        low = high
    return high, low


@triton.jit
def products(x, y, D2: tl.constexpr, PREC: tl.constexpr):
    """Return x y' for two token tiles."""
    out = tl.dot(x[0], tl.trans(y[0]), input_precision=PREC)
    if D2 > 0:
        out = tl.dot(x[1], tl.trans(y[1]), out, input_precision=PREC)
    return out


@triton.jit
def scores(x, y, DIGITS: tl.constexpr, D2: tl.constexpr, PREC: tl.constexpr):
    """Return x y' for two tiles of features in `DIGITS` digits."""
    out = products(x[0], y[0], D2, PREC)
    if DIGITS > 1:
        out += products(x[1], y[0], D2, PREC) + products(x[0], y[1], D2, PREC)
    return out


@triton.jit
def mixed_at(m, rows, columns, ms):
    """Load m for the blocks of pairs, float32; rows and columns [BM, 1] and [1, BN], in either order."""
    return tl.load(m + rows * ms[1] + columns * ms[2]).to(tl.float32)


@triton.jit
def add_rows(acc, w, y, D2: tl.constexpr, PREC: tl.constexpr):
    """Return acc + w y for weights in the dtype of the tokens y."""
    o1 = tl.dot(w, y[0], acc[0], input_precision=PREC)
    o2 = acc[1]
    if D2 > 0:
        o2 = tl.dot(w, y[1], acc[1], input_precision=PREC)
    return o1, o2


@triton.jit
def add_weighted(acc, w, y, DIGITS: tl.constexpr, D2: tl.constexpr, PREC: tl.constexpr):
    """Return acc + w y for float32 weights and features y, both in `DIGITS` digits."""
    dtype: tl.constexpr = y[0][0].dtype
    high = w.to(dtype)
    if DIGITS > 1:
        acc = add_rows(acc, (w - high.to(tl.float32)).to(dtype), y[0], D2, PREC)
        acc = add_rows(acc, high, y[1], D2, PREC)
    return add_rows(acc, high, y[0], D2, PREC)


@triton.jit
def of_blocks(ids, live, MP: tl.constexpr):
    """Return whether a token is real and lies in a block, [BN, MP]."""
    return (ids[:, None] == tl.arange(0, MP)[None, :]) & live[:, None]
