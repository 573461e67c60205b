"""Kernel of the feature maps relu, elu1, elu (elu1 - 1) and softmax.

It writes features of q and k, or gradients of q and k from gradients of their features.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..dispatch.recording import launch
from ..hla.fused.spec import placed

ELEMENTS = 2048  # per tile
COLUMNS = (64, 128, 256, 512)  # of a tile
Pair = tuple[Tensor, Tensor]
NO_SPECIALIZE = ["q_at", "k_at", "gq_at", "gk_at", "yq_at", "yk_at", "rows", "N"]


@triton.jit
def start_of(at, b, n, block, ALIGN: tl.constexpr, NEAR: tl.constexpr, BC: tl.constexpr):
    """Return the offset of a block of columns of tokens n of samples b."""
    start = (b * (at[0] // 2) + n * at[1]) * ALIGN
    return start + block * (BC if NEAR else at[2] // 2 * ALIGN)


@triton.jit
def map_tile(
    X, G, Y, x_at, g_at, y_at, block, rows, N, NAME: tl.constexpr, ALIGN: tl.constexpr, NEAR: tl.constexpr,
    W: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Store phi(x) of BT tokens in Y, or with gradients G of phi(x), the gradients of x; G may be Y. A block of columns
    is part of a token, or without NEAR a head; at: `spec.strides` of batch, token and head."""
    row = tl.program_id(0) * BT + tl.arange(0, BT)
    c = tl.arange(0, BC)[None, :]
    keep = (row < rows)[:, None] & ((block * BC if NEAR else 0) + c < W)
    b, n = (row // N).to(tl.int64), (row % N).to(tl.int64)
    x = tl.load(X + start_of(x_at, b, n, block, ALIGN, NEAR, BC)[:, None] + c, mask=keep, other=0.0).to(tl.float32)
    Y += start_of(y_at, b, n, block, ALIGN, NEAR, BC)[:, None] + c
    g = x
    if G is not None:  # zero for padded tokens, which may be NaN, whose gradients stay zero
        G += start_of(g_at, b, n, block, ALIGN, NEAR, BC)[:, None] + c
        g = tl.load(G, mask=keep, other=0.0).to(tl.float32)
    if NAME == "softmax":  # a row is a head
        x = tl.where(keep, x, -float("inf"))
        y = tl.exp(x - tl.max(x, 1)[:, None])
        y = y / tl.sum(y, 1)[:, None]
        if G is not None:
            y = tl.where(tl.max(tl.abs(g), 1)[:, None] == 0, 0.0, y * (g - tl.sum(g * y, 1)[:, None]))
    else:
        slope = 0.0 if NAME == "relu" else tl.exp(x)  # where x <= 0
        if G is not None:
            y = tl.where(x <= 0, 0.0 if NAME == "relu" else g * slope, g)  # g may be infinite where relu ends
        else:
            y = tl.where(x <= 0, slope - 1.0 if NAME == "elu" else slope, x + 1.0 if NAME == "elu1" else x)
    tl.store(Y, y.to(Y.dtype.element_ty), mask=keep)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def map_tokens(
    Q, K, GQ, GK, YQ, YK, q_at, k_at, gq_at, gk_at, yq_at, yk_at, rows, N, OF_Q: tl.constexpr, OF_K: tl.constexpr,
    ALIGN: tl.constexpr, NEAR: tl.constexpr, WQ: tl.constexpr, WK: tl.constexpr, BLOCKS: tl.constexpr,
    BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """`map_tile` of a block of columns of q, or behind BLOCKS of them, of k."""
    block = tl.program_id(1)
    if block < BLOCKS:
        map_tile(Q, GQ, YQ, q_at, gq_at, yq_at, block, rows, N, OF_Q, ALIGN, NEAR, WQ, BT, BC)
    else:
        map_tile(K, GK, YK, k_at, gk_at, yk_at, block - BLOCKS, rows, N, OF_K, ALIGN, NEAR, WK, BT, BC)


def map_pair(names: tuple[str, str], tokens: Pair, to: Pair, grads: Pair | None = None) -> None:
    """Write phi(q) [B, N, H, D] and phi(k) [B, N, Hk, D] to `to`. With grads, the gradients of phi(q) and phi(k),
    write gradients of q and k instead; grads and `to` may be the same tensors. names: the maps of q and k. All tensors
    have contiguous channels."""
    given = (*tokens, *(grads or to), *to)
    (b, n, _, d), heads = tokens[0].shape, [x.shape[2] for x in tokens]
    # a row of columns is a token, otherwise a head
    near = "softmax" not in names and all(x.stride(2) == d for x in given)
    widths = [h * d if near else d for h in heads]
    columns = min(COLUMNS, key=lambda c: (-widths[0] % c, -c)) if near else triton.next_power_of_2(d)
    blocks = [-(-w // columns) for w in widths] if near else heads
    at, units = placed(*given)
    rows = max(1, ELEMENTS // columns)
    launch(
        map_tokens, (triton.cdiv(b * n, rows), sum(blocks)), *tokens, *(grads or (None, None)), *to, *at, b * n, n,
        OF_Q=names[0], OF_K=names[1], ALIGN=units, NEAR=near, WQ=widths[0], WK=widths[1], BLOCKS=blocks[0], BT=rows,
        BC=columns, num_warps=4,
    )  # fmt: skip
