"""Causal torch form as the torch.library custom operator `hla_kernels::causal`, without a state.

It saves its inputs only and recomputes the stages in the backward pass; the float32 copies and C x C scores of all
chunks would take many times the memory of the inputs in bfloat16. torch.compile traces it as a single operator, so one
graph serves every N.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..dispatch.operator import custom_op, transforms
from ..options import Options
from .causal import causal


def _options(
    feature_map: str | None, normalize: bool, center: str | None, mean_path: bool, decay: bool, decay_rule: str,
    ridge: float, scale: float | None, eps: float, frame: int,
) -> Options:  # fmt: skip
    kind, causal = "tensor" if decay else None, "frame" if frame else True
    return Options(causal, feature_map, normalize, center, mean_path, kind, decay_rule, ridge, scale, eps, 1.0, frame)


def evaluate(
    q: Tensor, k: Tensor, v: Tensor, gamma: Tensor | None, op: str, feature_map: str | None, normalize: bool,
    center: str | None, mean_path: bool, decay_rule: str, ridge: float, scale: float | None, eps: float, frame: int,
) -> Tensor:  # fmt: skip
    """Return o [B, N, H, Dv], see `causal`; arguments are checked by `op.run`."""
    with torch.autocast(q.device.type, enabled=False):
        options = _options(
            feature_map, normalize, center, mean_path, gamma is not None, decay_rule, ridge, scale, eps, frame
        )
        return causal(op, q, k, v, options, gamma, None, False)[0]


causal_op = custom_op("causal")(evaluate)


@causal_op.register_fake
def _(q, k, v, gamma, *options):
    return q.new_empty((*q.shape[:3], v.shape[3]))


def gradient(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, gamma: Tensor | None, gamma_grad: bool, op: str,
    feature_map: str | None, normalize: bool, center: str | None, mean_path: bool, decay_rule: str,
    ridge: float, scale: float | None, eps: float, frame: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return (dq, dk, dv, dgamma); dgamma is empty unless `gamma_grad`."""
    options = _options(
        feature_map, normalize, center, mean_path, gamma is not None, decay_rule, ridge, scale, eps, frame
    )
    primals = (q, k, v, gamma) if gamma_grad else (q, k, v)

    def forward(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = gamma) -> Tensor:
        return causal(op, q, k, v, options, g, None, False)[0]

    with torch.autocast(q.device.type, enabled=False), transforms():
        grads = torch.func.vjp(forward, *primals)[1](grad)
    grads = tuple(x.contiguous() for x in grads)
    return grads if gamma_grad else (*grads, q.new_empty((0,)))


causal_backward = custom_op("causal_backward")(gradient)


@causal_backward.register_fake
def _(grad, q, k, v, gamma, gamma_grad, *options):
    outs = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return (*outs, torch.empty_like(gamma) if gamma_grad else q.new_empty((0,)))


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:4])
    ctx.options = inputs[4:]


def _backward(ctx, grad):
    gamma_grad = ctx.needs_input_grad[3]
    *grads, d_gamma = causal_backward(grad, *ctx.saved_tensors, gamma_grad, *ctx.options)
    return (*grads, d_gamma if gamma_grad else None, *[None] * len(ctx.options))


causal_op.register_autograd(_backward, setup_context=_setup_context)
