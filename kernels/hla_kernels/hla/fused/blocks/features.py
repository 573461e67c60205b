"""Split of tokens into sums of bfloat16 numbers, and gradients through a feature map. Both read full rows.

A float32 number is the sum of three bfloat16 numbers, a float16 number the sum of two; these terms are called planes.
Products of planes are exact on tensor cores, and their operands are loaded without conversion.
"""

import triton
import triton.language as tl

from ..heads import at_head
from ..loops import longest, span, upto
from ..loops.extent import alive
from ..maps import phi32, phi_grad
from ..tiles import load_rows

NO_SPECIALIZE = [
    "xs", "os", "ds", "N", "H", "G", "TILES", "PARTS", "chunk", "heads", "plane", "K", "START", "LENGTH", "BLOCKS",
]  # fmt: skip


@triton.jit
def tile_place(H, TILES, BLOCKS: tl.constexpr):
    """Return (block of columns, batch, head, tile) of this program; neighbouring programs read the same tokens."""
    pid = tl.program_id(0)
    rest = pid // BLOCKS
    return pid % BLOCKS, rest // (H * TILES), rest % H, (rest // H) % TILES


@triton.jit
def first_row(ptr, start, stride):
    """Return the address of token `start`."""
    return ptr + (tl.full([], 0, tl.int64) + start) * stride


@triton.jit
def offset(plane):
    """Return the stride e between planes from 2 e / 8 + 1, which is odd, so that no number of tokens recompiles."""
    return (tl.full([], 0, tl.int64) + plane // 2) * 8


@triton.jit
def features(x, i, stride, live, FMAP: tl.constexpr, D: tl.constexpr, R: tl.constexpr):
    """Return phi of rows i in float32."""
    return phi32(load_rows(x, i, stride, live, D, R, 0, False), live, FMAP, D, R, 0, True)


@triton.jit
def store_planes(ptr, x, plane, keep, PLANES: tl.constexpr):
    """Store float32 x as PLANES numbers, with the stride `offset` of `plane` between planes."""
    for p in tl.static_range(PLANES):
        high = x.to(ptr.dtype.element_ty)
        tl.store(ptr + p * offset(plane), high, mask=keep)
        x = x - high.to(tl.float32)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def block_sums(
    x, out, xs, N, H, G, PARTS, chunk, heads, FMAP: tl.constexpr, ALIGN: tl.constexpr, D: tl.constexpr,
    R: tl.constexpr, PITCH: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Compute partial sums of phi(x) in out [PARTS, B * H, PITCH]."""
    _, b, h, part = tile_place(H, PARTS, 1)
    at, N, _ = span(N, b, b * H + h, 0.0)
    x = at_head(x, xs, at, h // G, ALIGN)
    xn = xs[1] * ALIGN
    i = tl.arange(0, BN)
    hi = upto(part * chunk + chunk, N)
    sum1 = tl.zeros([BN, R], tl.float32)
    sum2 = sum1
    for start in range(part * chunk, hi[0], BN):
        live = alive(start + i, hi)
        f1, f2 = features(first_row(x, start, xn), i, xn, live, FMAP, D, R)
        sum1 += f1
        if FMAP == 4:
            sum2 += f2
    c = tl.arange(0, R)
    to = out + (part.to(tl.int64) * heads + b * H + h) * PITCH + c
    tl.store(to, tl.sum(sum1, 0), mask=c < D)
    if FMAP == 4:
        tl.store(to + D, tl.sum(sum2, 0), mask=c < D)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def block_split(
    x, ratio, sums, out, xs, os, plane, N, H, G, TILES, K, FMAP: tl.constexpr, DIVIDED: tl.constexpr,
    CENTRED: tl.constexpr, PLANES: tl.constexpr, ALIGNS: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """Compute out [PLANES, B, N, H, F] = phi(x [B, N, H, D]); CENTRED: minus its mean, from the sums per query head (G
    per head of x); DIVIDED: x over the denominators of a ratio."""
    _, b, h, tile = tile_place(H, TILES, 1)
    most = longest(N)
    head = ((b * H + h) * G).to(tl.int64)
    at, N, _ = span(N, b, head, 0.0)
    i = tl.arange(0, BN)
    live = alive(tile * BN + i, N)
    xn = xs[1] * ALIGNS[0]
    on = os[1] * ALIGNS[1]
    f1, f2 = features(first_row(at_head(x, xs, at, h, ALIGNS[0]), tile * BN, xn), i, xn, live, FMAP, D, R)
    c = tl.arange(0, R)
    if DIVIDED:
        f1 = f1 * tl.load(ratio + head * 2 * most + tile * BN + i, mask=live, other=0.0)[:, None]
    if CENTRED:
        f1 = f1 - (tl.load(sums + head * K + c, mask=c < D, other=0.0) / N[1])[None, :]
    if CENTRED and FMAP == 4:
        f2 = f2 - (tl.load(sums + head * K + D + c, mask=c < D, other=0.0) / N[1])[None, :]
    keep = live[:, None] & (c < D)[None, :]
    to = first_row(at_head(out, os, at, h, ALIGNS[1]), tile * BN, on) + i[:, None] * on + c[None, :]
    store_planes(to, f1, plane, keep, PLANES)
    if FMAP == 4:
        store_planes(to + D, f2, plane, keep, PLANES)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def block_slopes(
    x, df, out, xs, ds, os, N, H, G, TILES, FMAP: tl.constexpr, ALIGNS: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """Compute out [B, N, H, D] = d loss / d x from x [B, N, H / G, D] and d loss / d phi(x) [B, N, H, F]."""
    _, b, h, tile = tile_place(H, TILES, 1)
    at, N, _ = span(N, b, b * H + h, 0.0)
    i = tl.arange(0, BN)
    live = alive(tile * BN + i, N)
    xn, dn, on = xs[1] * ALIGNS[0], ds[1] * ALIGNS[1], os[1] * ALIGNS[2]
    f = features(first_row(at_head(x, xs, at, h // G, ALIGNS[0]), tile * BN, xn), i, xn, live, FMAP, D, R)
    df = first_row(at_head(df, ds, at, h, ALIGNS[1]), tile * BN, dn)
    g1, _ = load_rows(df, i, dn, live, D, R, 0, False)
    g2 = g1
    if FMAP == 4:
        g2, _ = load_rows(df + D, i, dn, live, D, R, 0, False)
    dx, _ = phi_grad(f, (g1, g2), FMAP, 0)
    c = tl.arange(0, R)
    to = first_row(at_head(out, os, at, h, ALIGNS[2]), tile * BN, on) + i[:, None] * on + c[None, :]
    tl.store(to, dx.to(out.dtype.element_ty), mask=live[:, None] & (c < D)[None, :])


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def block_planes(x, out, plane, K, START, LENGTH, BLOCKS, PLANES: tl.constexpr, WIDE: tl.constexpr):
    """Compute out [PLANES, B * H, LENGTH], the planes of elements START.. of a workspace x [B * H, K]."""
    head = (tl.program_id(0) // BLOCKS).to(tl.int64)
    e = (tl.program_id(0) % BLOCKS) * WIDE + tl.arange(0, WIDE)
    keep = e < LENGTH
    store_planes(
        out + head * LENGTH + e, tl.load(x + head * K + START + e, mask=keep, other=0.0), plane, keep, PLANES
    )
