"""Tiles of the delta rule's kernels: rows of a chunk of tokens, their decays, and products in TF32.

Rows of a chunk are ordered by time, and within a token by rank. In reversed time the last token comes first.

Tiles have at most 32 rows, for which Triton's products take a computed first operand (see `hla.stages.tiles`).
"""

import triton
import triton.language as tl


@triton.jit
def tokens_of(first, C: tl.constexpr, RP: tl.constexpr, REVERSE: tl.constexpr):
    """Return the tokens of the C RP rows of the chunk that starts at token `first`."""
    i = tl.arange(0, C * RP) // RP
    return first + (C - 1 - i if REVERSE else i)


@triton.jit
def _rows(token, bn, h, heads, N, W: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, start, BLOCK: tl.constexpr):
    """Return (offsets, which exist) of [C RP, BLOCK] elements of [B, N, H, R, W]: channels from `start` on."""
    rank, d = tl.arange(0, token.shape[0]) % RP, start + tl.arange(0, BLOCK)
    row = ((bn + token) * heads + h) * R + rank
    return row[:, None] * W + d[None, :], ((token < N) & (rank < R))[:, None] & (d < W)[None, :]


@triton.jit
def load_rows(ptr, token, bn, h, heads, N, W: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, start,
              BLOCK: tl.constexpr):  # fmt: skip
    """Load [C RP, BLOCK] elements of [B, N, H, R, W] in float32, channels from `start` on; 0 where there is none."""
    place, exists = _rows(token, bn, h, heads, N, W, R, RP, start, BLOCK)
    return tl.load(ptr + place, exists, other=0.0).to(tl.float32)


@triton.jit
def store_rows(ptr, x, token, bn, h, heads, N, W: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, start):
    """Store what `load_rows` loads."""
    place, exists = _rows(token, bn, h, heads, N, W, R, RP, start, x.shape[1])
    tl.store(ptr + place, x.to(ptr.dtype.element_ty), exists)


@triton.jit
def decays_of(F, token, bn, h, heads, N, D: tl.constexpr, FD: tl.constexpr, RP: tl.constexpr, C: tl.constexpr, start,
              BLOCK: tl.constexpr, LEAST: tl.constexpr):  # fmt: skip
    """Return the sums of log_f from the start of a chunk, with a row's token (gi) and without it (ge), over its first
    half (m) and over all of it: [C RP, BLOCK] twice, [BLOCK] twice; one column if FD = 1."""
    i = tl.arange(0, C * RP)
    if FD == 1:
        one = tl.maximum(tl.load(F + (bn + token) * heads + h, token < N, other=0.0), LEAST)
        first = tl.where(i % RP == 0, one, 0.0)
        seen = (i // RP)[:, None] >= (i // RP)[None, :]
        gi = tl.sum(tl.where(seen, first[None, :], 0.0), 1)[:, None]  # no tl.cumsum: it fails for one column
        f, once = one[:, None], first[:, None]
    else:
        d = start + tl.arange(0, BLOCK)
        place = ((bn + token) * heads + h)[:, None] * FD + d[None, :]
        f = tl.maximum(tl.load(F + place, (token < N)[:, None] & (d < D)[None, :], other=0.0), LEAST)
        once = tl.where((i % RP == 0)[:, None], f, 0.0)
        gi = tl.cumsum(once, 0)
    middle = tl.sum(tl.where((i // RP < C // 2)[:, None], once, 0.0), 0)
    return gi, gi - f, middle, tl.sum(once, 0)


@triton.jit
def _state(start, block, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr):
    d, e = start + tl.arange(0, BD), block + tl.arange(0, BV)
    return d[None, :] * DV + e[:, None], (d < D)[None, :] & (e < DV)[:, None]


@triton.jit
def load_state(ptr, start, block, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr):
    """Load a tile [BV, BD] of the transpose of a state [D, Dv]."""
    place, exists = _state(start, block, D, DV, BD, BV)
    return tl.load(ptr + place, exists, other=0.0)


@triton.jit
def store_state(ptr, x, start, block, D: tl.constexpr, DV: tl.constexpr):
    """Store what `load_state` loads."""
    place, exists = _state(start, block, D, DV, x.shape[1], x.shape[0])
    tl.store(ptr + place, x, exists)


@triton.jit
def rounded(x):
    """Round to the nearest number of TF32. Tensor cores cut off the last 13 bits, so that states would shrink."""
    return (x.to(tl.int32, bitcast=True) + 4096).to(tl.float32, bitcast=True)


@triton.jit
def product(a, b, acc):
    """Return acc + a b, in TF32."""
    return tl.dot(rounded(a), rounded(b), acc, input_precision="tf32")


@triton.jit
def accurate(a, b, acc):
    """Return acc + a b, as accurate as float32."""
    return tl.dot(a, b, acc, input_precision="tf32x3")
