"""Triton form of second-order Taylor attention by tokens: the N x N weights exist a tile at a time.

    forward   means of keys (and values) -> o, with q.kbar and 1 / z of each query
    backward  dq, d c -> dk, dv

Nothing is an exponential or a maximum, so that a tile costs a product and a few multiplications a weight; the ratio is
sum_j (1 + w_tj) v_j / sum_j (1 + w_tj), since the first-order weights of centred keys sum to zero. Sums have one order:
the same bits every time. Reading order: tokens, output, grads, plan, launch. Triton is imported by the first call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .plan import too_many
from .spec import buffer_sizes, why_not

__all__ = ["backward", "forward", "saved_floats", "too_many", "why_not"]


def saved_floats(q: Tensor, k: Tensor, v: Tensor, normalize: bool) -> int | torch.SymInt:
    """Length of the float32 buffer that `forward` fills for `backward`."""
    return sum(buffer_sizes(q, k, v, normalize, True))


def forward(
    q: Tensor, k: Tensor, v: Tensor, coefficients: Tensor, mask: Tensor | None, normalize: bool, q_scale: float,
    save: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """o [B, N, H, Dv] contiguous from q [B, N, H, D], k [B, N, Hk, D], v [B, N, Hk, Dv], and a buffer for `backward`
    (empty without `save`)."""
    from .launch import Call, forward_call

    o = torch.empty((*q.shape[:3], v.shape[3]), dtype=q.dtype, device=q.device)
    call = Call(q, k, v, coefficients, mask, normalize, q_scale)
    buffer = call.buffer(sum(buffer_sizes(q, k, v, normalize, save)))
    forward_call(call, o, buffer, save)
    return o, buffer if save else buffer.new_empty(0)


def backward(
    grad: Tensor, o: Tensor | None, q: Tensor, k: Tensor, v: Tensor, coefficients: Tensor, mask: Tensor | None,
    normalize: bool, q_scale: float, outs: tuple[Tensor, Tensor, Tensor], saved: Tensor,
) -> Tensor:  # fmt: skip
    """Write dq, dk, dv into `outs` (any strides with contiguous last dimension) from o (None without the ratio)
    and the buffer of `forward`, formed again if empty; returns d coefficients."""
    from .launch import Call, backward_call

    if saved.numel() == 0:
        o, saved = forward(q, k, v, coefficients, mask, normalize, q_scale, True)
    grad = grad if grad.stride(3) == 1 else grad.contiguous()  # an expanded gradient (y.sum().backward()) has stride 0
    o = grad if o is None else o  # read with the ratio only
    return backward_call(Call(q, k, v, coefficients, mask, normalize, q_scale), grad, o, outs, saved)
