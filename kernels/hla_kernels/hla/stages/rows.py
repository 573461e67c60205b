"""Passes over rows of tokens before and after the causal sums: feature maps and gradients of ratios.

Each launch reads and writes its tokens once; the same in torch code took longer than the sums themselves.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...dispatch.recording import launch
from ...features.row_tiles import grid, inner, part, rows_of, starts
from ..fused.spec import alignment, strides
from .tiles import rounded

MAPS = ("relu", "elu1")  # others are computed in torch


@triton.jit(do_not_specialize=["N"])
def causal_mapped(
    X, G, OUT, at, grad_at, N, H: tl.constexpr, ALIGN: tl.constexpr, ELU: tl.constexpr, TF32: tl.constexpr,
    D: tl.constexpr, W: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Store phi(x) of BT rows, or with G, gradients of phi(x), gradients of x. TF32: round to it."""
    row, place, keep = rows_of(tl.program_id(0), N, H, BT)
    start = starts(at, row, ALIGN)
    for i in tl.static_range(0, D, W):
        c, inside = part(start, keep, i, D, W)
        x = tl.load(X + c, mask=inside, other=0.0).to(tl.float32)
        low = tl.exp(x) if ELU else tl.where(x <= 0, 0.0, x)  # phi(x) and its slope where x <= 0; keeps NaN
        if G is None:
            y = tl.where(x > 0, x + 1.0 if ELU else x, low)
        else:
            c, _ = part(starts(grad_at, row, ALIGN), keep, i, D, W)
            g = tl.load(G + c, mask=inside, other=0.0).to(tl.float32)
            y = tl.where(x > 0, g, g * low)
        c, _ = part(place * D, keep, i, D, W)
        tl.store(OUT + c, rounded(y, y.to(OUT.dtype.element_ty), TF32), mask=inside)


@triton.jit(do_not_specialize=["N"])
def causal_undivided(
    G, O, REST, DIVISOR, OUT, EXTRA, grad_at, N, H: tl.constexpr, ALIGN: tl.constexpr, TF32: tl.constexpr,
    D: tl.constexpr, W: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Store the gradients of numerator and divisor of o = numerator / divisor for BT rows: G / divisor, rounded, and
    minus its product with o, which is O + REST."""
    row, place, keep = rows_of(tl.program_id(0), N, H, BT)
    start, divisor = starts(grad_at, row, ALIGN), tl.load(DIVISOR + place, keep, other=1.0)[:, None]
    total = tl.zeros([BT, W], tl.float32)
    for i in tl.static_range(0, D, W):
        c, inside = part(start, keep, i, D, W)
        g = tl.load(G + c, mask=inside, other=0.0).to(tl.float32) / divisor
        near = rounded(g, g.to(OUT.dtype.element_ty), TF32)
        c, _ = part(place * D, keep, i, D, W)
        o = tl.load(O + c, mask=inside, other=0.0).to(tl.float32)
        o += tl.load(REST + c, mask=inside, other=0.0).to(tl.float32)
        tl.store(OUT + c, near, mask=inside)
        total -= near.to(tl.float32) * o
    tl.store(EXTRA + place, tl.sum(total, 1), keep)


def features(x: Tensor, name: str, dtype: torch.dtype, tf32: bool, grad: Tensor | None = None) -> Tensor:
    """Return phi(x) [B, N, H, D] in `dtype`, or with the gradient of phi(x) the gradient of x."""
    x, out = inner(x), torch.empty(x.shape, dtype=dtype, device=x.device)
    g = None if grad is None else inner(grad)
    of_g = x if g is None else g
    units, (tiles, sizes) = min(alignment(x), alignment(of_g)), grid(x)
    launch(
        causal_mapped, tiles, x, g, out, strides(x, units), strides(of_g, units), x.shape[1], H=x.shape[2], ALIGN=units,
        ELU=name == "elu1", TF32=tf32, **sizes,
    )  # fmt: skip
    return out


def of_ratio(
    grad: Tensor, o: Tensor, rest: Tensor, divisor: Tensor, dtype: torch.dtype, tf32: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the numerator [B, N, H, Dv] in `dtype` and of the divisor [B, N, H] of a ratio o."""
    grad, out, extra = inner(grad), torch.empty(o.shape, dtype=dtype, device=o.device), torch.empty_like(divisor)
    units, (tiles, sizes) = alignment(grad), grid(o)
    launch(
        causal_undivided, tiles, grad, o, rest, divisor, out, extra, strides(grad, units), o.shape[1], H=o.shape[2],
        ALIGN=units, TF32=tf32, **sizes,
    )  # fmt: skip
    return out, extra
