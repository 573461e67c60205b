"""Custom operator `hla_kernels::multipole`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ....dispatch.operator import custom_op


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(3) == 1 else x.contiguous()


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@custom_op("multipole")
def multipole_op(
    q: Tensor, k: Tensor, v: Tensor, grid: Sequence[int], blocks: Sequence[int], outer: Sequence[int], radius: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return o [B, N, H, D] and tensors for the backward; q, k, v [B, N, H, D].

    For the backward: logarithm of the denominator [B, H, N]; per block mean keys and their rounding errors
    [2, B, H, M, D], mean values [B, H, M, D] and the logarithm of the size [M]; rounding error of o (g.o is subtracted
    from every g.v_j). grid and blocks have three axes; outer: number of tokens before and after the grid.
    """
    from .launch import Call, forward

    call = Call(grid, blocks, outer, radius, scale, q.shape)
    found = _outputs(q, blocks)
    if q.shape[0]:
        with torch.cuda.device_of(q):
            forward(call, (_rows(q), _rows(k), _rows(v)), *found)
    return found


def _outputs(q: Tensor, blocks: Sequence[int]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    b, n, h, d = q.shape
    m = math.prod(blocks)
    top, count = (torch.empty(shape, dtype=torch.float32, device=q.device) for shape in ((b, h, n), (m,)))
    mean, value = (torch.empty(shape, dtype=q.dtype, device=q.device) for shape in ((2, b, h, m, d), (b, h, m, d)))
    return _like(q), top, mean, value, count, _like(q)


@multipole_op.register_fake
def _(q, k, v, grid, blocks, outer, radius, scale):
    return _outputs(q, blocks)


@custom_op("multipole_backward")
def multipole_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, top: Tensor, mean: Tensor, value: Tensor, count: Tensor,
    rest: Tensor, grid: Sequence[int], blocks: Sequence[int], outer: Sequence[int], radius: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return (dq, dk, dv)."""
    from .launch import Call, backward

    found = _like(q), _like(k), _like(v)
    if q.shape[0]:
        call = Call(grid, blocks, outer, radius, scale, q.shape)
        with torch.cuda.device_of(q):
            backward(call, _rows(grad), (_rows(q), _rows(k), _rows(v)), o, top, mean, value, count, rest, *found)
    return found


@multipole_backward.register_fake
def _(grad, q, k, v, *rest):
    return _like(q), _like(k), _like(v)


def _setup(ctx: Any, inputs: tuple, output: tuple) -> None:
    *tensors, ctx.grid, ctx.blocks, ctx.outer, ctx.radius, ctx.scale = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output)


def _gradients(ctx: Any, grad: Tensor | None, *_: None) -> tuple:
    if grad is None:
        return (None,) * 8
    options = (ctx.grid, ctx.blocks, ctx.outer, ctx.radius, ctx.scale)
    return (*multipole_backward(grad, *ctx.saved_tensors, *options), *[None] * 5)


multipole_op.register_autograd(_gradients, setup_context=_setup)
