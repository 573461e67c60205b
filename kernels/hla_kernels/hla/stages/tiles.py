"""Tiles of tokens, decays and products of the causal kernels.

The first operand of a product is always a loaded tile, possibly transposed; computed factors (weights, states) are the
second operand: products with a first operand in registers are miscompiled.
"""

import triton
import triton.language as tl

FREE = ["at", "partner_at", "sizes", "scale", "eps"]


@triton.jit
def rows_of(ptr, at, i: tl.constexpr, b, h):
    """Return the pointer to token 0 of head h of tensor i, and its token stride. `at` holds the strides of batch, token
    and head in units of 8 channels, which tells Triton that 16-byte loads are aligned, and the number of query heads
    per head, of each tensor."""
    start = b.to(tl.int64) * at[4 * i] + (h // at[4 * i + 3]).to(tl.int64) * at[4 * i + 2]
    return ptr + start * 8, at[4 * i + 1].to(tl.int64) * 8


@triton.jit
def tile(rows, row, inside, first, D: tl.constexpr, DP: tl.constexpr):
    """Load channels first .. first + DP - 1 of rows as [rows, DP], zeros outside. rows: from `rows_of`."""
    d = first + tl.arange(0, DP)
    place = row.to(tl.int64)[:, None] * rows[1] + d[None, :]
    return tl.load(rows[0] + place, inside[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def column(EXTRAS, at, i: tl.constexpr, b, h, row, inside, heads, N):
    """Load the extra channel, float32 [B, N, heads / group], of rows of tensor i."""
    group = at[4 * i + 3]
    place = (b.to(tl.int64) * N + row) * (heads // group) + h // group
    return tl.load(EXTRAS[i] + place, inside, other=0.0)


@triton.jit
def rounded(x, like, TF32: tl.constexpr):
    """Round a computed factor to the precision of products with `like`; tensor cores would truncate TF32."""
    found = x.to(like.dtype)
    if TF32:
        found = ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return found


@triton.jit
def product(a, b, acc, TF32: tl.constexpr):
    """Return acc + a b."""
    return tl.dot(a, b, acc, input_precision="tf32" if TF32 else "ieee")


@triton.jit
def log2_of(LOG2, h):
    """Return log2 of the decay of head h."""
    found = 0.0
    if LOG2 is not None:
        found = tl.load(LOG2 + h)
    return found


@triton.jit
def powers(log2, exponent, DECAY: tl.constexpr):
    """Return decay^exponent, or 1 without DECAY; 0 for a negative exponent."""
    found = tl.where(exponent >= 0, 1.0, 0.0)
    if DECAY:
        found = tl.where(exponent >= 0, tl.exp2(log2 * tl.maximum(exponent, 0).to(tl.float32)), 0.0)
    return found


@triton.jit
def weighted(a, log2, i, REVERSE: tl.constexpr, DECAY: tl.constexpr):
    """Return scores [j, i] times decay^(i - j), 0 for j > i; with REVERSE times decay^(j - i), 0 for i > j."""
    if DECAY:
        t = -log2 * i.to(tl.float32) if REVERSE else log2 * i.to(tl.float32)
        a = a * tl.exp2(t[None, :] - t[:, None])
    return tl.where(i[:, None] >= i[None, :] if REVERSE else i[:, None] <= i[None, :], a, 0.0)
