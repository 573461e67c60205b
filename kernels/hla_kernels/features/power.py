"""The power of a feature map: x -> |y| y^p / |y^p| with y = relu(x), one exponent p per head.

The focused function of FLatten Transformer (arXiv 2308.00442, Eq 5), which turns features towards their largest and
keeps their length. With s = |y|, u = y^p / |y^p| and the gradient g of s u:

    dy = (g . u) y / s + p s (u / y) (g - u (g . u)),    dp = s sum_i u_i ln(y_i) (g_i - u_i (g . u)).

On CUDA the kernels read each token once and keep nothing for the backward but x; torch's own form keeps float32 tensors
of the size of the tokens, compiled or not.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from ..dispatch.operator import custom_op

HAS_TRITON = importlib.util.find_spec("triton") is not None
KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def power(x: Tensor, exponent: Tensor) -> Tensor:
    """x [B, N, H, D], exponent [H] above 1 in float32 (float64 for x in float64) -> [B, N, H, D] in the dtype of x.

    Computed in float32 at least. Zero where x has no positive channel.
    """
    if x.is_cuda and x.dtype in KERNEL_DTYPES and HAS_TRITON:
        return torch.ops.hla_kernels.power(x, exponent)
    return power_torch(x, exponent)


def power_torch(x: Tensor, exponent: Tensor) -> Tensor:
    """`power` in plain torch."""
    y = x.relu().to(torch.promote_types(x.dtype, torch.float32))
    top = y.amax(-1, keepdim=True)
    part = y / top.clamp(min=torch.finfo(y.dtype).tiny)  # in [0, 1]: a power of it never overflows
    raised = part ** exponent[:, None]
    lengths = [z.square().sum(-1, keepdim=True).clamp(min=1) for z in (part, raised)]  # below 1 for zeros only
    return (raised * top * (lengths[0] / lengths[1]).sqrt()).to(x.dtype)


@custom_op("power")
def power_op(x: Tensor, exponent: Tensor) -> Tensor:
    """The features by the kernel."""
    from .power_kernels import forward

    return forward(x, exponent)


@power_op.register_fake
def _(x, exponent):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@custom_op("power_backward")
def power_backward(grad: Tensor, x: Tensor, exponent: Tensor) -> tuple[Tensor, Tensor]:
    """(dx, dp)."""
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
