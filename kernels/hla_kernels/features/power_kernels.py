"""Kernels of `power`: one program per token tile and head, one pass over memory per direction."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..dispatch.recording import launch

ELEMENTS = 2048  # per tile
TINY = tl.constexpr(1.1754943508222875e-38)  # smallest normal number of float32


@triton.jit
def offsets(rows, head, N, sb, sn, sh, BD: tl.constexpr):
    """Return the offsets [BT, BD] of the channels of tokens; rows = b N + n. int64, since large inputs need it."""
    rows = rows.to(tl.int64)
    return ((rows // N) * sb + (rows % N) * sn + head * sh)[:, None] + tl.arange(0, BD)[None, :]


@triton.jit
def own_offsets(rows, head, H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """Return the offsets in a contiguous tensor."""
    return ((rows.to(tl.int64) * H + head) * D)[:, None] + tl.arange(0, BD)[None, :]


@triton.jit
def raised(x, p):
    """Return (y / max y, its base-2 logarithm or 0, u, |y| / max y, max y) for channels x [BT, BD], y = relu(x)."""
    y = tl.where(x <= 0, 0.0, x)  # keeps NaN
    top = tl.max(y, 1)
    part = y / tl.maximum(top, TINY)[:, None]
    log = tl.log2(tl.where(part <= 0, 1.0, part))
    w = tl.where(part <= 0, 0.0, tl.exp2(p * log))
    unit = w * (1.0 / tl.sqrt(tl.maximum(tl.sum(w * w, 1), 1.0)))[:, None]  # the largest w is 1, or all are 0
    return part, log, unit, tl.sqrt(tl.sum(part * part, 1)), top


@triton.jit(do_not_specialize=["ROWS", "N"])
def power_features(
    x, exponent, out, ROWS, N, sb, sn, sh, H: tl.constexpr, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr
):
    """Store |y| u of BT tokens of a head."""
    head = tl.program_id(1)
    rows = tl.program_id(0) * BT + tl.arange(0, BT)
    keep = (rows < ROWS)[:, None] & (tl.arange(0, BD) < D)[None, :]
    tokens = tl.load(x + offsets(rows, head, N, sb, sn, sh, BD), mask=keep, other=0.0).to(tl.float32)
    _, _, unit, length, top = raised(tokens, tl.load(exponent + head).to(tl.float32))
    at = own_offsets(rows, head, H, D, BD)
    tl.store(out + at, (unit * (top * length)[:, None]).to(out.dtype.element_ty), mask=keep)


@triton.jit(do_not_specialize=["ROWS", "N"])
def power_grads(
    g, x, exponent, dx, parts, ROWS, N, gb, gn, gh, sb, sn, sh, H: tl.constexpr, D: tl.constexpr, BT: tl.constexpr,
    BD: tl.constexpr,
):  # fmt: skip
    """Store dx of BT tokens of a head, and the sum of their dp in parts [H, programs]."""
    head = tl.program_id(1)
    rows = tl.program_id(0) * BT + tl.arange(0, BT)
    keep = (rows < ROWS)[:, None] & (tl.arange(0, BD) < D)[None, :]
    p = tl.load(exponent + head).to(tl.float32)
    tokens = tl.load(x + offsets(rows, head, N, sb, sn, sh, BD), mask=keep, other=0.0).to(tl.float32)
    grad = tl.load(g + offsets(rows, head, N, gb, gn, gh, BD), mask=keep, other=0.0).to(tl.float32)
    part, log, unit, length, top = raised(tokens, p)
    along = tl.sum(grad * unit, 1)[:, None]
    across = unit * (grad - unit * along)
    alive = tokens > 0
    size = tl.maximum(length, 1.0)[:, None]  # below 1 only if all are 0
    dy = tl.where(alive, along * part / size + p * size * across / tl.where(alive, part, 1.0), 0.0)
    at = own_offsets(rows, head, H, D, BD)
    tl.store(dx + at, dy.to(dx.dtype.element_ty), mask=keep)
    sums = tl.sum(across * log, 1) * length * top * 0.6931471805599453  # ln 2
    tl.store(parts + head * tl.num_programs(0) + tl.program_id(0), tl.sum(sums, 0))


def tile(x: Tensor) -> dict[str, int]:
    """Return the sizes of x [B, N, H, D] and of a tile."""
    width = triton.next_power_of_2(x.shape[-1])
    return {"H": x.shape[2], "D": x.shape[3], "BD": width, "BT": max(1, ELEMENTS // width), "num_warps": 4}


def forward(x: Tensor, exponent: Tensor) -> Tensor:
    """Return the features of x [B, N, H, D]."""
    x, out, sizes = inner(x), torch.empty_like(x, memory_format=torch.contiguous_format), tile(x)
    if x.numel():
        rows = x.shape[0] * x.shape[1]
        grid = triton.cdiv(rows, sizes["BT"]), x.shape[2]
        launch(power_features, grid, x, exponent, out, rows, x.shape[1], *x.stride()[:3], **sizes)
    return out


def backward(grad: Tensor, x: Tensor, exponent: Tensor) -> tuple[Tensor, Tensor]:
    """Return (dx, dp)."""
    x, grad, sizes = inner(x), inner(grad), tile(x)
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not x.numel():
        return dx, torch.zeros_like(exponent)
    rows = x.shape[0] * x.shape[1]
    grid = triton.cdiv(rows, sizes["BT"]), x.shape[2]
    parts = torch.empty(x.shape[2], grid[0], dtype=torch.float32, device=x.device)
    launch(
        power_grads, grid,
        grad, x, exponent, dx, parts, rows, x.shape[1], *grad.stride()[:3], *x.stride()[:3], **sizes,
    )  # fmt: skip
    return dx, parts.sum(1).to(exponent.dtype)


def inner(x: Tensor) -> Tensor:
    """Return x with contiguous channels."""
    return x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()
