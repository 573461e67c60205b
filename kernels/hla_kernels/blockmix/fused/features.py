"""Rotated features of a token tile, and products with them in extended precision.

Rotated features are float32: they enter a product as their rounding to the dtype of the tokens plus the remainder (two
digits), or three digits if the gradient of the mixing matrix must be accurate to float32. TURN: None, no
rotation; "pairs", of channels (2i, 2i + 1); "halves", of (i, i + D / 2).
"""

import triton
import triton.language as tl

from ...hla.fused.tiles import outer4, rowmul


@triton.constexpr_function
def digits(dtype, FLOATS, EXACT):
    """Return the number of digits (values of `dtype`) for a float32 operand (FLOATS), or for an operand that is a
    token."""
    if dtype == tl.float32 or not FLOATS:
        return 1
    return 3 if EXACT else 2


@triton.jit
def angles_at(cos, sin, bh, H, HT, first, D: tl.constexpr):
    """Return the pointers to one head of the tables [N, HT, D / 2], HT 1 or H, at channel `first`; without tables what
    `turn` does not read."""
    out = (bh, bh)
    if cos is not None:
        at = bh % H % HT * (D // 2) + first // 2
        out = (cos + at, sin + at)
    return out


@triton.jit
def load_angles(ptr, tokens, live, HT, AGAIN: tl.constexpr, W: tl.constexpr):
    """Load D / 2 numbers per token as the halves of a pair. AGAIN: second load for a tile, from the cache; another
    eviction policy makes it a separate load, so that the first one does not hold registers in between."""
    POLICY: tl.constexpr = "" if AGAIN else "evict_last"
    at = ptr + tokens[:, None] * (HT * (W.D // 2))
    c1 = tl.arange(0, W.D1 // 2)
    x1 = tl.load(at + c1[None, :], mask=live[:, None] & (c1 < W.D // 2)[None, :], other=0.0, eviction_policy=POLICY)
    x1 = x1.to(tl.float32)
    x2 = x1
    if W.D2 > 0:
        c2 = W.D1 // 2 + tl.arange(0, W.D2 // 2)
        x2 = tl.load(at + c2[None, :], mask=live[:, None] & (c2 < W.D // 2)[None, :], other=0.0, eviction_policy=POLICY)
        x2 = x2.to(tl.float32)
    return x1, x2


@triton.jit
def turn_part(x, c, s, TURN: tl.constexpr):
    """Rotate one part of a tile, in float32."""
    BN: tl.constexpr = x.shape[0]
    WIDTH: tl.constexpr = x.shape[1]
    if TURN == "pairs":
        a, b = tl.split(tl.reshape(x, [BN, WIDTH // 2, 2]))
    else:
        a, b = tl.split(tl.permute(tl.reshape(x, [BN, 2, WIDTH // 2]), (0, 2, 1)))
    y = tl.join(a * c - b * s, b * c + a * s)
    if TURN == "halves":
        y = tl.permute(y, (0, 2, 1))
    return tl.reshape(y, [BN, WIDTH])


@triton.jit
def turn(x, angles, tokens, live, HT, BACK: tl.constexpr, TURN: tl.constexpr, W: tl.constexpr):
    """Rotate a tile by the angles of its tokens, in float32; BACK: by the opposite angles."""
    out = x
    if TURN is not None:
        c = load_angles(angles[0], tokens, live, HT, BACK, W)
        s = load_angles(angles[1], tokens, live, HT, BACK, W)
        sign = -1.0 if BACK else 1.0
        y1 = turn_part(x[0].to(tl.float32), c[0], sign * s[0], TURN)
        y2 = y1
        if W.D2 > 0:
            y2 = turn_part(x[1].to(tl.float32), c[1], sign * s[1], TURN)
        out = (y1, y2)
    return out


@triton.jit
def cast2(x, dtype: tl.constexpr, W: tl.constexpr):
    """Cast a tile."""
    x2 = x[1]
    if W.D2 > 0:
        x2 = x[1].to(dtype)
    return x[0].to(dtype), x2


@triton.jit
def rest(x, high, W: tl.constexpr):
    """Return x minus its rounding, in float32."""
    x2 = x[1]
    if W.D2 > 0:
        x2 = x[1] - high[1].to(tl.float32)
    return x[0] - high[0].to(tl.float32), x2


@triton.jit
def digits_of(x, dtype: tl.constexpr, DIGITS: tl.constexpr, W: tl.constexpr):
    """Return a tile as three tiles of `dtype`, the first `DIGITS` of which sum to it."""
    high = cast2(x, dtype, W)
    low = high
    lowest = high
    if DIGITS > 1:
        left = rest(x, high, W)
        low = cast2(left, dtype, W)
        if DIGITS > 2:
            lowest = cast2(rest(left, low, W), dtype, W)
    return high, low, lowest


@triton.jit
def add_outer(
    acc, x, y, live, dtype: tl.constexpr, DIGITS: tl.constexpr, X: tl.constexpr, Y: tl.constexpr, PREC: tl.constexpr
):
    """Return acc + x'y over the tokens of a tile; x has `dtype`, y has `dtype` or is float32 in `DIGITS` digits."""
    parts = digits_of(y, dtype, DIGITS, Y)
    for i in tl.static_range(DIGITS):
        acc = outer4(acc, x, parts[DIGITS - 1 - i], live, X, Y, False, PREC)
    return acc


@triton.jit
def add_rows(
    acc, x, m, dtype: tl.constexpr, DIGITS: tl.constexpr, K: tl.constexpr, B: tl.constexpr, PREC: tl.constexpr
):
    """Return acc + x m for a tile x in `DIGITS` (1 or 2) digits."""
    high, low, _ = digits_of(x, dtype, DIGITS, K)
    out = rowmul(acc, high, m, K, B, PREC)
    if DIGITS > 1:
        # a nonzero constant keeps this sum from being folded into the product, which would change its layout
        o1 = out[0] + tl.dot(low[0], m[0], input_precision=PREC, max_num_imprecise_acc=16)
        o2 = out[1]
        if K.D2 > 0:
            o1 += tl.dot(low[1], m[2], input_precision=PREC, max_num_imprecise_acc=16)
        if B.D2 > 0:
            o2 = out[1] + tl.dot(low[0], m[1], input_precision=PREC, max_num_imprecise_acc=16)
            if K.D2 > 0:
                o2 += tl.dot(low[1], m[3], input_precision=PREC, max_num_imprecise_acc=16)
        out = (o1, o2)
    return out
