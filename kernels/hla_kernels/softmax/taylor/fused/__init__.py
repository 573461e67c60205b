"""Triton form of second-order Taylor attention by tokens; weights exist one tile at a time.

    forward   means of keys (and values) -> o, and per query q.kbar and the mean of y^2
    backward  dq, dq2, d c -> dk, dk2, dv

Without exponentials and maxima, a tile costs a product and a few multiplications per weight. The ratio is
sum_j (1 + w_tj) v_j / sum_j (1 + w_tj), since the first-order weights of centred keys sum to zero. Sums have a fixed
order: results are deterministic. Reading order: tokens, output, grads, plan, launch. The first call imports Triton.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .plan import too_many
from .spec import buffer_sizes, why_not

__all__ = ["backward", "forward", "saved_floats", "too_many", "why_not"]


def saved_floats(q: Tensor, k: Tensor, v: Tensor, q2: Tensor | None, normalize: bool) -> int | torch.SymInt:
    """Return the length of the float32 buffer that `forward` fills for `backward`."""
    return sum(buffer_sizes(q, k, v, q2, normalize, True))


def forward(
    q: Tensor, k: Tensor, v: Tensor, coefficients: Tensor, q2: Tensor | None, k2: Tensor | None, mask: Tensor | None,
    normalize: bool, q_scale: float, save: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return o [B, N, H, Dv], contiguous, and a buffer for `backward` (empty without `save`), from q [B, N, H, D],
    k [B, N, Hk, D], v [B, N, Hk, Dv] and, if given, the narrow pair q2 [B, N, H, R], k2 [B, N, Hk, R]."""
    from .launch import Call, forward_call

    o = torch.empty((*q.shape[:3], v.shape[3]), dtype=q.dtype, device=q.device)
    call = Call(q, k, v, coefficients, q2, k2, mask, normalize, q_scale)
    buffer = call.buffer(sum(buffer_sizes(q, k, v, q2, normalize, save)))
    forward_call(call, o, buffer, save)
    return o, buffer if save else buffer.new_empty(0)


def backward(
    grad: Tensor, o: Tensor | None, q: Tensor, k: Tensor, v: Tensor, coefficients: Tensor, q2: Tensor | None,
    k2: Tensor | None, mask: Tensor | None, normalize: bool, q_scale: float, outs: Sequence[Tensor | None],
    saved: Tensor,
) -> Tensor:  # fmt: skip
    """Write dq, dk, dv, dq2 and dk2 into `outs` and return d coefficients.

    outs: any strides with contiguous last dimension; dq2 and dk2 are None without a narrow pair. o: None without the
    ratio. saved: the buffer of `forward`, recomputed if empty.
    """
    from .launch import Call, backward_call

    inputs = (q, k, v, coefficients, q2, k2, mask, normalize, q_scale)
    if saved.numel() == 0:
        o, saved = forward(*inputs, True)
    grad = grad if grad.stride(3) == 1 else grad.contiguous()  # an expanded gradient (y.sum().backward()) has stride 0
    o = grad if o is None else o  # placeholder; only the ratio reads o
    return backward_call(Call(*inputs), grad, o, outs, saved)
