"""Second-order Taylor attention as torch.library custom operators.

`hla_kernels::taylor2` takes (q, k, v), `hla_kernels::taylor2_qkvpacked` takes qkv [B, N, 3, H, D] and its backward
writes one packed gradient.

They return (o, saved). With `save`, `saved` holds tensors for the backward of the Triton form; the torch form saves its
inputs only and recomputes the rest. Nothing saved grows with N^2 or with the number of features. `impl`, chosen in
`op`, is "torch" (`torch_form`, backward in `gradient`) or "triton" (`fused`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...dispatch.operator import custom_op
from . import fused
from .gradient import gradient
from .torch_form import evaluate

Narrow = tuple[Tensor | None, Tensor | None]
Tokens = Sequence[Tensor | None]


def _in_triton(impl: str, q: Tensor) -> bool:
    """Whether the kernels run; an empty batch, for which nothing can be launched, uses the torch form."""
    return impl == "triton" and q.shape[0] != 0


def _rows(x: Any) -> Any:
    """Return x with a contiguous last dimension: the Triton form requires it, and torch.compile may have changed the
    strides that `op` checked. None is returned unchanged."""
    return x if x is None or x.stride(3) == 1 else x.contiguous()


def _saved(q: Tensor, k: Tensor, v: Tensor, q2: Tensor | None, normalize: bool, impl: str, save: bool) -> Tensor:
    """Return an uninitialised `saved` of the size that the forward returns."""
    length = fused.saved_floats(q, k, v, q2, normalize) if save and impl == "triton" else 0
    return q.new_empty((length,), dtype=torch.float32)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, coefficients: Tensor, narrow: Narrow, mask: Tensor | None, normalize: bool,
    q_scale: float, impl: str, save: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if _in_triton(impl, q):
        q, k, v, q2, k2 = (_rows(x) for x in (q, k, v, *narrow))
        with torch.cuda.device_of(q):
            return fused.forward(q, k, v, coefficients, q2, k2, mask, normalize, q_scale, save)
    with torch.autocast(q.device.type, enabled=False):
        o = evaluate(q, k, v, coefficients, *narrow, mask, normalize, q_scale)
    return o, _saved(q, k, v, narrow[0], normalize, impl, False)


def _fused_gradient(
    grad: Tensor, o: Tensor | None, saved: Tensor, tokens: Tokens, outs: Tokens, coefficients: Tensor,
    mask: Tensor | None, normalize: bool, q_scale: float,
) -> Tensor:  # fmt: skip
    """Write the gradients of q, k, v, q2 and k2 into `outs`; return d coefficients."""
    q, k, v, q2, k2 = (_rows(x) for x in tokens)
    with torch.cuda.device_of(q):
        return fused.backward(grad, o, q, k, v, coefficients, q2, k2, mask, normalize, q_scale, outs, saved)


@custom_op("taylor2")
def taylor2_op(
    q: Tensor, k: Tensor, v: Tensor, coefficients: Tensor, q2: Tensor | None, k2: Tensor | None, mask: Tensor | None,
    normalize: bool, q_scale: float, impl: str = "torch", save: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return o (see `taylor`) [B, N, H, Dv] and a buffer for the backward; arguments are checked by `call.prepare`."""
    return _forward(q, k, v, coefficients, (q2, k2), mask, normalize, q_scale, impl, save)


@taylor2_op.register_fake
def _(q, k, v, coefficients, q2, k2, mask, normalize, q_scale, impl="torch", save=False):
    return q.new_empty((*q.shape[:3], v.shape[3])), _saved(q, k, v, q2, normalize, impl, save)


@custom_op("taylor2_backward")
def taylor2_backward(
    grad: Tensor, o: Tensor | None, saved: Tensor, q: Tensor, k: Tensor, v: Tensor, coefficients: Tensor,
    q2: Tensor | None, k2: Tensor | None, mask: Tensor | None, normalize: bool, q_scale: float, impl: str = "torch",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return (dq, dk, dv, dcoefficients, dq2, dk2) of `taylor2`; dq2 and dk2 are empty without a narrow pair."""
    if _in_triton(impl, q):
        tokens = (q, k, v, q2, k2)
        outs = [None if x is None else x.new_empty(x.shape) for x in tokens]
        dc = _fused_gradient(grad, o, saved, tokens, outs, coefficients, mask, normalize, q_scale)
        found = [*outs[:3], dc, *outs[3:]]
    else:
        with torch.autocast(q.device.type, enabled=False):
            found = gradient(grad, q, k, v, coefficients, q2, k2, mask, normalize, q_scale)
    dq, dk, dv, dc, dq2, dk2 = (q.new_empty((0,)) if x is None else x for x in found)
    return dq, dk, dv, dc, dq2, dk2


@taylor2_backward.register_fake
def _(grad, o, saved, q, k, v, coefficients, q2, k2, *rest):
    tensors = (q, k, v, coefficients, q2, k2)
    return tuple(q.new_empty((0,)) if x is None else x.new_empty(x.shape) for x in tensors)


@custom_op("taylor2_qkvpacked")
def taylor2_packed_op(
    qkv: Tensor, coefficients: Tensor, mask: Tensor | None, normalize: bool, q_scale: float, impl: str = "torch",
    save: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run `taylor2` on qkv [B, N, 3, H, D], without a narrow pair."""
    q, k, v = qkv.unbind(2)
    return _forward(q, k, v, coefficients, (None, None), mask, normalize, q_scale, impl, save)


@taylor2_packed_op.register_fake
def _(qkv, coefficients, mask, normalize, q_scale, impl="torch", save=False):
    q, k, v = qkv.unbind(2)
    return torch.empty_like(q, memory_format=torch.contiguous_format), _saved(q, k, v, None, normalize, impl, save)


@custom_op("taylor2_qkvpacked_backward")
def taylor2_packed_backward(
    grad: Tensor, o: Tensor | None, saved: Tensor, qkv: Tensor, coefficients: Tensor, mask: Tensor | None,
    normalize: bool, q_scale: float, impl: str = "torch",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return (dqkv, dcoefficients) of `taylor2_qkvpacked`; dqkv is one buffer, into which dq, dk and dv are written."""
    q, k, v = qkv.unbind(2)
    if _in_triton(impl, q):
        packed = torch.empty_like(qkv, memory_format=torch.contiguous_format)
        rest = (coefficients, mask, normalize, q_scale)
        tokens, outs = (q, k, v, None, None), (*packed.unbind(2), None, None)
        return packed, _fused_gradient(grad, o, saved, tokens, outs, *rest)
    with torch.autocast(q.device.type, enabled=False):
        dq, dk, dv, dc, *_ = gradient(grad, q, k, v, coefficients, None, None, mask, normalize, q_scale)
    assert dq is not None and dk is not None and dv is not None and dc is not None
    return torch.stack((dq, dk, dv), 2), dc


@taylor2_packed_backward.register_fake
def _(grad, o, saved, qkv, coefficients, *rest):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (qkv, coefficients))


def _derivative(forward: Any, backward: Any, tensors: int) -> None:
    """Register `backward` as the gradient of `forward`, whose first `tensors` arguments are tensors or None, followed
    by normalize, q_scale, impl and save."""

    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        normalize, _, impl, _ = ctx.options = inputs[tensors:]
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        o = output[0] if impl == "triton" and normalize else None  # other cases do not read it
        ctx.save_for_backward(o, output[1], *inputs[:tensors])

    def gradients(ctx: Any, grad: Tensor | None, _: None) -> tuple:
        if grad is None:
            return (None,) * len(ctx.needs_input_grad)
        grads = backward(grad, *ctx.saved_tensors, *ctx.options[:3])
        if len(grads) > 4 and ctx.saved_tensors[6] is None:
            grads = grads[:4]  # without a narrow pair
        return (*grads, *[None] * (len(ctx.needs_input_grad) - len(grads)))

    forward.register_autograd(gradients, setup_context=setup_context)


_derivative(taylor2_op, taylor2_backward, 7)
_derivative(taylor2_packed_op, taylor2_packed_backward, 3)
