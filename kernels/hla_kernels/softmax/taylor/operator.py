"""Second-order Taylor attention as a torch.library custom operator, `hla_kernels::taylor2`, and its cost.

The operator keeps its inputs for the backward and forms everything else again, so that neither pass stores what grows
with N^2 or with the number of features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .gradient import gradient
from .torch_form import by_state, evaluate, multiplications

Shape = tuple[int, ...]


@torch.library.custom_op("hla_kernels::taylor2", mutates_args=())
def taylor2_op(
    q: Tensor, k: Tensor, v: Tensor, coefficients: Tensor, q2: Tensor | None, k2: Tensor | None, mask: Tensor | None,
    normalize: bool, q_scale: float,
) -> Tensor:  # fmt: skip
    """o (see `taylor`) [B, N, H, Dv]; arguments are checked by `call.prepare`."""
    with torch.autocast(q.device.type, enabled=False):
        return evaluate(q, k, v, coefficients, q2, k2, mask, normalize, q_scale)


@taylor2_op.register_fake
def _(q, k, v, *rest):
    return q.new_empty((*q.shape[:3], v.shape[3]))


@torch.library.custom_op("hla_kernels::taylor2_backward", mutates_args=())
def taylor2_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, coefficients: Tensor, q2: Tensor | None, k2: Tensor | None,
    mask: Tensor | None, normalize: bool, q_scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv, dcoefficients, dq2, dk2) of `taylor2`; the last two are empty without a narrow pair."""
    with torch.autocast(q.device.type, enabled=False):
        found = gradient(grad, q, k, v, coefficients, q2, k2, mask, normalize, q_scale)
    dq, dk, dv, dc, dq2, dk2 = (q.new_empty((0,)) if x is None else x for x in found)
    return dq, dk, dv, dc, dq2, dk2


@taylor2_backward.register_fake
def _(grad, q, k, v, coefficients, q2, k2, *rest):
    tensors = (q, k, v, coefficients, q2, k2)
    return tuple(q.new_empty((0,)) if x is None else x.new_empty(x.shape) for x in tensors)


def _setup_context(ctx, inputs, output):
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:7])
    ctx.options = inputs[7:]


def _backward(ctx, grad):
    if grad is None:
        return (None,) * 9
    tensors = ctx.saved_tensors
    *grads, dq2, dk2 = taylor2_backward(grad, *tensors, *ctx.options)
    narrow = (None, None) if tensors[4] is None else (dq2, dk2)
    return (*grads, *narrow, None, None, None)


taylor2_op.register_autograd(_backward, setup_context=_setup_context)


def _products(q: Shape, v: Shape, q2: Shape | None) -> int:
    """Operations of one pass, a multiplication and an addition each."""
    b, n, h, d = q
    r = 0 if q2 is None else q2[3]
    return 2 * b * n * h * multiplications(n, d, r, v[3], by_state(n, d, r, v[3]))


@register_flop_formula(torch.ops.hla_kernels.taylor2)
def taylor2_flops(q: Shape, k: Shape, v: Shape, _, q2: Shape | None, *rest: Any, out_shape: Any = None) -> int:
    """Forward; grouped keys count as if each query head had its own."""
    return _products(q, v, q2)


@register_flop_formula(torch.ops.hla_kernels.taylor2_backward)
def taylor2_backward_flops(
    grad: Shape, q: Shape, k: Shape, v: Shape, _, q2: Shape | None, *rest: Any, out_shape: Any = None
) -> int:
    """Backward: the forward again, and two products for each of its products."""
    return 3 * _products(q, v, q2)
