"""RMSNorm of tokens of 16 bits with weights of any precision, without float32 tensors of the size of the tokens.

y = x r w with r = (mean(x^2) + eps)^(-1/2) over the channels of a token (Zhang and Sennrich, arXiv 1910.07467, Eq 4),
dx = r (g w - x r mean(g w x r)), dw = sum of g x r. torch has such kernels where x and w have one dtype; under autocast
they have two, and it forms each step in float32.
"""

from __future__ import annotations

import importlib.util

import torch
import torch.nn.functional as F
from torch import Tensor

HAS_TRITON = importlib.util.find_spec("triton") is not None
MAX_CHANNELS = 8192


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [.., C], weight [C] -> [.., C] in the dtype of x, computed in float32 at least.

    The kernels run 16-bit CUDA tensors of at most 8192 channels in eager mode; a compiler fuses torch's own form, which
    is what runs otherwise.
    """
    ours = x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and weight.dtype != x.dtype and HAS_TRITON
    if not ours or x.shape[-1] > MAX_CHANNELS or torch.compiler.is_compiling():
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    return torch.ops.hla_kernels.rms_norm(x, weight, eps)[0]


@torch.library.custom_op("hla_kernels::rms_norm", mutates_args=())
def rms_norm_op(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(y, r [tokens] in float32)."""
    from .fused import forward

    return forward(x, weight, eps)


@rms_norm_op.register_fake
def _(x, weight, eps):
    return torch.empty_like(x, memory_format=torch.contiguous_format), x.new_empty(
        x.shape[:-1].numel(), dtype=torch.float32
    )


@torch.library.custom_op("hla_kernels::rms_norm_backward", mutates_args=())
def rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """(dx, dw)."""
    from .fused import backward

    return backward(grad, x, weight, inverse)


@rms_norm_backward.register_fake
def _(grad, x, weight, inverse):
    return torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty_like(weight)


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:2], output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, grad, _):
    return (*torch.ops.hla_kernels.rms_norm_backward(grad, *ctx.saved_tensors), None)


rms_norm_op.register_autograd(_backward, setup_context=_save)
