"""Positions of the tokens of a block, computed from the grid without tables or copies.

GEO = (prefix, T, H, W, mt, mh, mw, share): tokens before the grid, lengths of three axes, blocks along each (axes that
a grid lacks have length and blocks 1). An axis of L positions is cut at floor(i L / m), as in `layout`. share: None, or
for tokens that devices share and for each block [M, 3] the first position of this device, the number of its positions,
and the first token of the device.
"""

import triton
import triton.language as tl


@triton.jit
def box(GEO, block):
    """Return (number of tokens, first token, rows, columns, tokens per plane, tokens per line) of a block, and of a
    device's share of it the first position."""
    prefix, t, h, w, mt, mh, mw, share = GEO
    c = block - (prefix > 0).to(tl.int32)
    i = tl.maximum(c, 0)
    iw = i % mw
    ih = (i // mw) % mh
    it = i // (mw * mh)
    t0 = it * t // mt
    h0 = ih * h // mh
    w0 = iw * w // mw
    rows = (ih + 1) * h // mh - h0
    columns = (iw + 1) * w // mw - w0
    count = ((it + 1) * t // mt - t0) * rows * columns
    first = prefix + (t0 * h + h0) * w + w0
    before = c < 0  # the prefix is a single line
    out = (
        tl.where(before, prefix, count), tl.where(before, 0, first), tl.where(before, 1, rows),
        tl.where(before, prefix, columns), h * w, w,
    )  # fmt: skip
    if share is not None:
        begin, n, start = tl.load(share + 3 * block), tl.load(share + 3 * block + 1), tl.load(share + 3 * block + 2)
        out = (n, out[1] - start, out[2], out[3], out[4], out[5], begin)  # type: ignore[assignment]
    return out


@triton.jit
def token(j, b):
    """Return the tokens [BN] (int64) at positions j of a block."""
    line = ((j.to(tl.float32) + 0.5) * (1.0 / b[3])).to(tl.int32)  # j // columns, exact for j < 2**21
    plane = ((line.to(tl.float32) + 0.5) * (1.0 / b[2])).to(tl.int32)
    return (b[1] + (j - line * b[3]) + (line - plane * b[2]) * b[5]).to(tl.int64) + plane.to(tl.int64) * b[4]


@triton.jit
def tile(start, hi, b, keep, BN: tl.constexpr):
    """Return (tokens, mask) of a tile of BN positions; keep: mask of real tokens of this sample in bytes, or None."""
    j = start + tl.arange(0, BN)
    live = j < hi
    if len(b) == 7:
        j += b[6]
    tokens = token(j, b)
    if keep is not None:
        live = live & (tl.load(keep + tokens, mask=live, other=0) != 0)
    return tokens, live


@triton.jit
def at_head(ptr, strides, bh, H, G, ALIGN: tl.constexpr):
    """Return the pointer to token 0 of a head, in a tensor where G heads share one."""
    head = (bh % H // G).to(tl.int64) * (strides[2] // 2)
    return ptr + ((bh // H).to(tl.int64) * (strides[0] // 2) + head) * ALIGN


@triton.jit
def keep_of(keep, bh, H, N):
    """Return the pointer to the mask of a head's sample, or None."""
    out = keep
    if keep is not None:
        out = keep + (bh // H).to(tl.int64) * N
    return out


@triton.jit
def scale_of(scales, scale, bh, H):
    """Return s for the sample of a head: one number, or an entry of [B] if sequences differ."""
    s = scale
    if scales is not None:
        s = tl.load(scales + bh // H)
    return s


@triton.jit
def work(GEO, BH, M, chunk, SPLIT: tl.constexpr = 1):
    """Return what a program works on: the head in the batch, the place of its block among the moments, the box, and
    the first and the last position.

    Neighbouring programs read neighbouring heads of the same tokens; SPLIT consecutive ones share tokens.
    """
    pid = tl.program_id(0) // SPLIT
    bh = pid % BH
    block = (pid // BH) % M
    part = pid // (BH * M)
    b = box(GEO, block)
    at = (block * BH + bh).to(tl.int64)
    return bh, at, b, part * chunk, tl.minimum((part + 1) * chunk, b[0])
