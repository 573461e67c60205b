"""The kernels of `rms_norm`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 4 * 132  # of the backward, each of which sums the gradient of the weight over its tokens


@triton.jit
def load_row(ptr, C: tl.constexpr, BC: tl.constexpr):
    """The token, or the weights, at a pointer in float32."""
    c = tl.arange(0, BC)
    return tl.load(ptr + c, mask=c < C, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["eps"])
def norm_rows(x, w, y, inverses, stride, eps, C: tl.constexpr, BC: tl.constexpr):
    """y = x r w of one token, and r."""
    row = tl.program_id(0).to(tl.int64)
    t = load_row(x + row * stride, C, BC)
    inverse = 1.0 / tl.sqrt(tl.sum(t * t, 0) / C + eps)
    c = tl.arange(0, BC)
    out = t * inverse * load_row(w, C, BC)
    tl.store(y + row * C + c, out.to(y.dtype.element_ty), mask=c < C)
    tl.store(inverses + row, inverse)


@triton.jit(do_not_specialize=["rows"])
def norm_grads(g, x, w, inverses, dx, parts, rows, gs, xs, C: tl.constexpr, BC: tl.constexpr):
    """dx of every so many-th token, and the sum of g x r over them -> parts [programs, C]."""
    pid = tl.program_id(0)
    c = tl.arange(0, BC)
    weight = load_row(w, C, BC)
    acc = tl.zeros([BC], tl.float32)
    for row in range(pid, rows, tl.num_programs(0)):
        at = tl.cast(row, tl.int64)
        inverse = tl.load(inverses + at)
        t = load_row(x + at * xs, C, BC) * inverse
        tg = load_row(g + at * gs, C, BC)
        acc += tg * t
        tg *= weight
        out = (tg - t * (tl.sum(tg * t, 0) / C)) * inverse
        tl.store(dx + at * C + c, out.to(dx.dtype.element_ty), mask=c < C)
    tl.store(parts + pid * C + c, acc, mask=c < C)


def rows_of(x: Tensor) -> Tensor:
    """[tokens, C] with contiguous channels."""
    x = x.flatten(0, -2)
    return x if x.stride(1) == 1 else x.contiguous()


def config(c: int) -> dict[str, int]:
    """Channels of a token, and a tile that holds them."""
    width = triton.next_power_of_2(c)
    return {"C": c, "BC": width, "num_warps": min(8, max(1, width // 256))}


def forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(y, r)."""
    rows, y = rows_of(x), torch.empty_like(x, memory_format=torch.contiguous_format)
    inverses = torch.empty(rows.shape[0], dtype=torch.float32, device=x.device)
    if rows.shape[0]:
        norm_rows[(rows.shape[0],)](rows, weight.contiguous(), y, inverses, rows.stride(0), eps, **config(x.shape[-1]))
    return y, inverses


def backward(grad: Tensor, x: Tensor, weight: Tensor, inverses: Tensor) -> tuple[Tensor, Tensor]:
    """(dx, dw)."""
    rows, g, dx = rows_of(x), rows_of(grad), torch.empty_like(x, memory_format=torch.contiguous_format)
    if not rows.shape[0]:
        return dx, torch.zeros_like(weight)
    programs = min(rows.shape[0], PROGRAMS)
    parts = torch.empty(programs, x.shape[-1], dtype=torch.float32, device=x.device)
    norm_grads[(programs,)](
        g, rows, weight.contiguous(), inverses, dx, parts, rows.shape[0], g.stride(0), rows.stride(0),
        **config(x.shape[-1]),
    )  # fmt: skip
    return dx, parts.sum(0).to(weight.dtype)
