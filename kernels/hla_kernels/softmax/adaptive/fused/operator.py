"""Custom operator `hla_kernels::adaptive_multipole`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ....dispatch.operator import custom_op
from ..layout import Field


def _rows(x: Tensor) -> Tensor:
    """Return tokens with strides that allow 16-byte loads of channels."""
    return x if x.stride(3) == 1 and all(n % 8 == 0 for n in x.stride()[:3]) else x.contiguous()


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _call(q, k, mask, grid, prefix, suffix, q_tile, k_tile, exact, select, far, scale):
    from .launch import Call

    return Call(Field(tuple(grid), prefix, suffix, q_tile, k_tile), exact, select, far, scale, q, k, mask)


@custom_op("adaptive_multipole")
def adaptive_op(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, grid: Sequence[int], prefix: int, suffix: int, q_tile: int,
    k_tile: int, exact: int, select: str, far: str, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return o [B, N, H, D] and `launch.Saved`. q [B, N, H, D], k, v [B, N, Hk, D]; outputs of padded tokens are not
    written."""
    from .launch import forward

    call = _call(q, k, mask, grid, prefix, suffix, q_tile, k_tile, exact, select, far, scale)
    o, saved = _like(q), call.outputs(q)
    if q.shape[0]:
        with torch.cuda.device_of(q):
            forward(call, _rows(q), _rows(k), _rows(v), o, saved)
    return (o, *saved)


@adaptive_op.register_fake
def _(q, k, v, mask, *options):
    return (_like(q), *_call(q, k, mask, *options).outputs(q))


@custom_op("adaptive_multipole_backward")
def adaptive_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, saved: Sequence[Tensor], grid: Sequence[int],
    prefix: int, suffix: int, q_tile: int, k_tile: int, exact: int, select: str, far: str, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return (dq, dk, dv); saved: o and `launch.Saved`."""
    from .launch import Saved, backward

    found = _like(q), _like(k), _like(v)
    if q.shape[0]:
        call = _call(q, k, mask, grid, prefix, suffix, q_tile, k_tile, exact, select, far, scale)
        with torch.cuda.device_of(q):
            backward(call, _rows(grad), _rows(q), _rows(k), _rows(v), saved[0], Saved(*saved[1:]), *found)
    return found


@adaptive_backward.register_fake
def _(grad, q, k, v, *rest):
    return _like(q), _like(k), _like(v)


def _setup(ctx: Any, inputs: tuple, output: tuple) -> None:
    *tensors, ctx.options = *inputs[:4], inputs[4:]
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output)


def _gradients(ctx: Any, grad: Tensor | None, *_: None) -> tuple:
    if grad is None:
        return (None,) * (4 + len(ctx.options))
    q, k, v, mask, *saved = ctx.saved_tensors
    return (*adaptive_backward(grad, q, k, v, mask, saved, *ctx.options), *[None] * (1 + len(ctx.options)))


adaptive_op.register_autograd(_gradients, setup_context=_setup)
