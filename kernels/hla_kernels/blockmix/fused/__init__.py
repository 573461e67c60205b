"""Triton form of two-sided block mixing, first order, forward and backward.

    forward   (mean of v) -> moments of each block -> X~ = m X -> o
    backward  dq and the gradients of X~ -> m' of them -> dk, dv; d mixing

Reading order: spec (what it runs, buffers), geometry (tokens of a block), tokens and vectors (vocabulary), reduce,
mixing, apply, plan (the static table), launch. Tiles and feature maps are those of `hla.fused`. Triton is imported by
the first call.

Moments of bfloat16 tokens are rounded to bfloat16 twice, local and mixed, the mixing matrix is not; ratios of v are
taken of v minus its mean. With the rounding of the output that is 1.7 times the error of the torch form, of dq of a
ratio 1.9 times.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..options import BlockOptions
from .spec import Sizes, why_not

__all__ = ["backward", "forward", "saved_floats", "why_not"]


def saved_floats(q: Tensor, v: Tensor, o: BlockOptions) -> int | torch.SymInt:
    """Length of the float32 buffer that `forward` fills for `backward`."""
    return q.shape[0] * q.shape[2] * Sizes.of(o, q.shape[1], q.shape[3], v.shape[3], q.dtype).saved


def forward(
    q: Tensor, k: Tensor, v: Tensor, mixing: Tensor, o: BlockOptions, mask: Tensor | None = None, save: bool = False
) -> tuple[Tensor, Tensor]:
    """o [B, N, H, Dv] contiguous from q, k [B, N, H, D], v [B, N, H, Dv], and a buffer for `backward` (empty without
    `save`)."""
    from .launch import Call, forward_call

    call = Call(q, k, v, mixing, o, mask)
    new = torch.empty if mask is None else torch.zeros  # padded tokens are not written
    out = new((*q.shape[:3], v.shape[3]), dtype=q.dtype, device=q.device)
    buffer = call.buffer(saved_floats(q, v, o))
    forward_call(call, out, buffer)
    return out, buffer if save else call.buffer(0)


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mixing: Tensor, o: BlockOptions, mask: Tensor | None,
    outs: tuple[Tensor, Tensor, Tensor], saved: Tensor,
) -> Tensor:  # fmt: skip
    """Write dq, dk, dv into `outs` (any strides with contiguous last dimension) from the buffer of `forward`, or
    an empty one, then the moments are summed again; returns d mixing."""
    from .launch import Call, backward_call

    if saved.numel() == 0:
        saved = forward(q, k, v, mixing, o, mask, save=True)[1]
    grad = grad if grad.stride(3) == 1 else grad.contiguous()  # an expanded gradient (y.sum().backward()) has stride 0
    return backward_call(Call(q, k, v, mixing, o, mask), grad, outs, saved)
