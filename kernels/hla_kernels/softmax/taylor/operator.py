"""Second-order Taylor attention as torch.library custom operators.

`hla_kernels::taylor2` takes (q, k, v), `hla_kernels::taylor2_qkvpacked` takes qkv [B, N, 3, H, D] and its backward
writes one packed gradient. They save their inputs only and recompute the rest (`torch_form`, `gradient`): nothing saved
grows with N^2 or with the number of features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...dispatch.operator import custom_op
from .gradient import gradient
from .torch_form import evaluate


@custom_op("taylor2")
def taylor2_op(
    q: Tensor, k: Tensor, v: Tensor, coefficients: Tensor, q2: Tensor | None, k2: Tensor | None, mask: Tensor | None,
    normalize: bool, q_scale: float,
) -> Tensor:  # fmt: skip
    """Return o (see `taylor`) [B, N, H, Dv]; arguments are checked by `call.prepare`."""
    with torch.autocast(q.device.type, enabled=False):
        return evaluate(q, k, v, coefficients, q2, k2, mask, normalize, q_scale)


@taylor2_op.register_fake
def _(q, k, v, *rest):
    return q.new_empty((*q.shape[:3], v.shape[3]))


@custom_op("taylor2_backward")
def taylor2_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, coefficients: Tensor, q2: Tensor | None, k2: Tensor | None,
    mask: Tensor | None, normalize: bool, q_scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return (dq, dk, dv, dcoefficients, dq2, dk2) of `taylor2`; dq2 and dk2 are empty without a narrow pair."""
    with torch.autocast(q.device.type, enabled=False):
        found = gradient(grad, q, k, v, coefficients, q2, k2, mask, normalize, q_scale)
    dq, dk, dv, dc, dq2, dk2 = (q.new_empty((0,)) if x is None else x for x in found)
    return dq, dk, dv, dc, dq2, dk2


@taylor2_backward.register_fake
def _(grad, q, k, v, coefficients, q2, k2, *rest):
    tensors = (q, k, v, coefficients, q2, k2)
    return tuple(q.new_empty((0,)) if x is None else x.new_empty(x.shape) for x in tensors)


@custom_op("taylor2_qkvpacked")
def taylor2_packed_op(
    qkv: Tensor, coefficients: Tensor, mask: Tensor | None, normalize: bool, q_scale: float
) -> Tensor:
    """Run `taylor2` on qkv [B, N, 3, H, D], without a narrow pair."""
    return taylor2_op.function(*qkv.unbind(2), coefficients, None, None, mask, normalize, q_scale)


@taylor2_packed_op.register_fake
def _(qkv, *rest):
    return torch.empty_like(qkv[:, :, 0], memory_format=torch.contiguous_format)


@custom_op("taylor2_qkvpacked_backward")
def taylor2_packed_backward(
    grad: Tensor, qkv: Tensor, coefficients: Tensor, mask: Tensor | None, normalize: bool, q_scale: float
) -> tuple[Tensor, Tensor]:
    """Return (dqkv in one buffer, dcoefficients) of `taylor2_qkvpacked`."""
    found = taylor2_backward.function(grad, *qkv.unbind(2), coefficients, None, None, mask, normalize, q_scale)
    return torch.stack(found[:3], 2), found[3]


@taylor2_packed_backward.register_fake
def _(grad, qkv, coefficients, *rest):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (qkv, coefficients))


def _derivative(forward: Any, backward: Any, tensors: int) -> None:
    """Register `backward` as the gradient of `forward`, whose first `tensors` arguments are tensors or None, followed
    by normalize and q_scale."""

    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.options = inputs[tensors:]
        ctx.save_for_backward(*inputs[:tensors])

    def gradients(ctx: Any, grad: Tensor) -> tuple:
        grads = backward(grad, *ctx.saved_tensors, *ctx.options)
        if len(grads) > 4 and ctx.saved_tensors[4] is None:
            grads = grads[:4]  # without a narrow pair
        return (*grads, *[None] * (len(ctx.needs_input_grad) - len(grads)))

    forward.register_autograd(gradients, setup_context=setup_context)


_derivative(taylor2_op, taylor2_backward, 7)
_derivative(taylor2_packed_op, taylor2_packed_backward, 3)
