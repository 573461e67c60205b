"""Block mixing as a torch.library custom operator, `hla_kernels::mhla`.

It returns (o, saved): with `save`, what the backward would compute again otherwise (empty in the torch form, which
saves its inputs only and forms blocks and moments again). `impl`, chosen in `op`, is the implementation: "torch"
(`torch_form`) or "triton" (`fused`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .gradient import gradient
from .layout import Layout
from .options import BlockOptions
from .torch_form import evaluate


def _options(
    order: str, grid: Sequence[int], blocks: Sequence[int], prefix: int, feature_map: str | None, normalize: bool,
    causal: bool, scale: float | None, q_scale: float, eps: float, rotary_half: bool,
) -> BlockOptions:  # fmt: skip
    layout = Layout(tuple(grid), tuple(blocks), prefix)
    return BlockOptions(layout, order, feature_map, normalize, causal, scale, q_scale, eps, rotary_half)


def flat(options: BlockOptions) -> tuple:
    """The options as arguments of the operator, in its order."""
    (grid, blocks, prefix), order, *rest = options
    return (order, list(grid), list(blocks), prefix, *rest)


def _rotary(cos: Tensor | None, sin: Tensor | None) -> tuple[Tensor, Tensor] | None:
    return None if cos is None or sin is None else (cos, sin)


@torch.library.custom_op("hla_kernels::mhla", mutates_args=())
def mhla_op(
    q: Tensor, k: Tensor, v: Tensor, mixing: Tensor, mask: Tensor | None, cos: Tensor | None, sin: Tensor | None,
    order: str, grid: Sequence[int], blocks: Sequence[int], prefix: int, feature_map: str | None, normalize: bool,
    causal: bool, scale: float | None, q_scale: float, eps: float, rotary_half: bool, impl: str = "torch",
    save: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """o (see `blockmix`) [B, N, H, Dv] and a buffer for the backward; arguments are checked by `call.prepare`."""
    options = _options(order, grid, blocks, prefix, feature_map, normalize, causal, scale, q_scale, eps, rotary_half)
    with torch.autocast(q.device.type, enabled=False):
        return evaluate(q, k, v, mixing, options, mask, _rotary(cos, sin)), q.new_empty((0,), dtype=torch.float32)


@mhla_op.register_fake
def _(q, k, v, mixing, *options):
    return q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty((0,), dtype=torch.float32)


@torch.library.custom_op("hla_kernels::mhla_backward", mutates_args=())
def mhla_backward(
    grad: Tensor, saved: Tensor, q: Tensor, k: Tensor, v: Tensor, mixing: Tensor, mask: Tensor | None,
    cos: Tensor | None, sin: Tensor | None, order: str, grid: Sequence[int], blocks: Sequence[int], prefix: int,
    feature_map: str | None, normalize: bool, causal: bool, scale: float | None, q_scale: float, eps: float,
    rotary_half: bool, impl: str = "torch",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv, dmixing) of `mhla`."""
    options = _options(order, grid, blocks, prefix, feature_map, normalize, causal, scale, q_scale, eps, rotary_half)

    with torch.autocast(q.device.type, enabled=False):
        return gradient(grad, q, k, v, mixing, options, mask, _rotary(cos, sin))


@mhla_backward.register_fake
def _(grad, saved, q, k, v, mixing, *options):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, mixing))


def _setup_context(ctx, inputs, output):
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:7], output[1])
    ctx.options = inputs[7:-1]


def _backward(ctx, grad, _):
    if grad is None:
        return (None,) * len(ctx.needs_input_grad)
    *tensors, saved = ctx.saved_tensors
    grads = mhla_backward(grad, saved, *tensors, *ctx.options)
    return (*grads, *[None] * (len(ctx.needs_input_grad) - 4))


mhla_op.register_autograd(_backward, setup_context=_setup_context)
