"""Focused feature map x -> |y| y^p / |y^p| with y = relu(x) and one exponent p per head.

From FLatten Transformer (arXiv 2308.00442, Eq 5): sharpens the direction of the features and keeps their norm. With
s = |y|, u = y^p / |y^p| and the gradient g of s u:

    dy = (g . u) y / s + p s (u / y) (g - u (g . u)),    dp = s sum_i u_i ln(y_i) (g_i - u_i (g . u)).

On CUDA the kernels read each token once, and save only x for the backward; plain torch code saves float32 tensors of
the size of the tokens, compiled or not.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from ..dispatch.operator import custom_op, to_onnx

HAS_TRITON = importlib.util.find_spec("triton") is not None
KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def power(x: Tensor, exponent: Tensor) -> Tensor:
    """Apply the map to x [B, N, H, D] with exponent [H] > 1 in float32 (float64 for float64 x) -> [B, N, H, D].

    Returns the dtype of x, computed in at least float32. Heads without a positive channel give zeros.
    """
    if x.is_cuda and x.dtype in KERNEL_DTYPES and HAS_TRITON and not to_onnx():
        return torch.ops.hla_kernels.power(x, exponent)
    return power_torch(x, exponent)


def power_torch(x: Tensor, exponent: Tensor) -> Tensor:
    """Compute `power` in plain torch."""
    y = x.relu().to(torch.promote_types(x.dtype, torch.float32))
    top = y.amax(-1, keepdim=True)
    part = y / top.clamp(min=torch.finfo(y.dtype).tiny)  # in [0, 1], so that its power cannot overflow
    raised = part ** exponent[:, None]
    lengths = [z.square().sum(-1, keepdim=True).clamp(min=1) for z in (part, raised)]  # below 1 only if all are 0
    return (raised * top * (lengths[0] / lengths[1]).sqrt()).to(x.dtype)


@custom_op("power")
def power_op(x: Tensor, exponent: Tensor) -> Tensor:
    """Compute the features by the kernel."""
    from .power_kernels import forward

    return forward(x, exponent)


@power_op.register_fake
def _(x, exponent):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@custom_op("power_backward")
def power_backward(grad: Tensor, x: Tensor, exponent: Tensor) -> tuple[Tensor, Tensor]:
    """Return (dx, dp)."""
    from .power_kernels import backward

    return backward(grad, x, exponent)


@power_backward.register_fake
def _(grad, x, exponent):
    return torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty_like(exponent)


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad):
    return torch.ops.hla_kernels.power_backward(grad, *ctx.saved_tensors)


power_op.register_autograd(_backward, setup_context=_save)
