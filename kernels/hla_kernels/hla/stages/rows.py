"""Passes over rows of tokens before and after the causal sums: feature maps and gradients of ratios.

Each launch reads and writes its tokens once; the same in torch code took longer than the sums themselves.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...dispatch.recording import launch
from ...features.power_kernels import inner, offsets, own_offsets, tile
from .tiles import rounded

MAPS = ("relu", "elu1")  # others are computed in torch


@triton.jit(do_not_specialize=["ROWS", "N"])
def mapped(
    X, G, OUT, at, grad_at, ROWS, N, ELU: tl.constexpr, TF32: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Store phi(x) of BT tokens of a head, or with G, gradients of phi(x), gradients of x. TF32: round to it. at:
    strides of batch, token and head."""
    head = tl.program_id(1)
    rows = tl.program_id(0) * BT + tl.arange(0, BT)
    keep = (rows < ROWS)[:, None] & (tl.arange(0, BD) < D)[None, :]
    x = tl.load(X + offsets(rows, head, N, at[0], at[1], at[2], BD), mask=keep, other=0.0).to(tl.float32)
    low = tl.exp(x) if ELU else tl.where(x <= 0, 0.0, x)  # phi(x) and its slope where x <= 0; keeps NaN
    if G is None:
        y = tl.where(x > 0, x + 1.0 if ELU else x, low)
    else:
        of_g = offsets(rows, head, N, grad_at[0], grad_at[1], grad_at[2], BD)
        g = tl.load(G + of_g, mask=keep, other=0.0).to(tl.float32)
        y = tl.where(x > 0, g, g * low)
    near = rounded(y, y.to(OUT.dtype.element_ty), TF32)
    tl.store(OUT + own_offsets(rows, head, H, D, BD), near, mask=keep)


@triton.jit(do_not_specialize=["ROWS", "N"])
def undivided(
    G, O, REST, DIVISOR, OUT, EXTRA, grad_at, ROWS, N, TF32: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Store the gradients of numerator and divisor of o = numerator / divisor for BT tokens of a head: G / divisor,
    rounded, and minus its product with o, which is O + REST."""
    head = tl.program_id(1)
    rows = tl.program_id(0) * BT + tl.arange(0, BT)
    keep = (rows < ROWS)[:, None] & (tl.arange(0, BD) < D)[None, :]
    own = own_offsets(rows, head, H, D, BD)
    of_g = offsets(rows, head, N, grad_at[0], grad_at[1], grad_at[2], BD)
    g = tl.load(G + of_g, mask=keep, other=0.0).to(tl.float32)
    one = rows.to(tl.int64) * H + head
    g = g / tl.load(DIVISOR + one, rows < ROWS, other=1.0)[:, None]
    near = rounded(g, g.to(OUT.dtype.element_ty), TF32)
    o = tl.load(O + own, mask=keep, other=0.0).to(tl.float32)
    o += tl.load(REST + own, mask=keep, other=0.0).to(tl.float32)
    tl.store(OUT + own, near, mask=keep)
    tl.store(EXTRA + one, -tl.sum(near.to(tl.float32) * o, 1), rows < ROWS)


def features(x: Tensor, name: str, dtype: torch.dtype, tf32: bool, grad: Tensor | None = None) -> Tensor:
    """Return phi(x) [B, N, H, D] in `dtype`, or with the gradient of phi(x) the gradient of x."""
    x, out = inner(x), torch.empty(x.shape, dtype=dtype, device=x.device)
    g = None if grad is None else inner(grad)
    rows, sizes = x.shape[0] * x.shape[1], tile(x)
    launch(
        mapped, (triton.cdiv(rows, sizes["BT"]), x.shape[2]), x, g, out, x.stride()[:3],
        (x if g is None else g).stride()[:3], rows, x.shape[1], ELU=name == "elu1", TF32=tf32, **sizes,
    )  # fmt: skip
    return out


def of_ratio(
    grad: Tensor, o: Tensor, rest: Tensor, divisor: Tensor, dtype: torch.dtype, tf32: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the numerator [B, N, H, Dv] in `dtype` and of the divisor [B, N, H] of a ratio o."""
    grad, out, extra = inner(grad), torch.empty(o.shape, dtype=dtype, device=o.device), torch.empty_like(divisor)
    rows, sizes = o.shape[0] * o.shape[1], tile(o)
    launch(
        undivided, (triton.cdiv(rows, sizes["BT"]), o.shape[2]), grad, o, rest, divisor, out, extra,
        grad.stride()[:3], rows, o.shape[1], TF32=tf32, **sizes,
    )  # fmt: skip
    return out, extra
