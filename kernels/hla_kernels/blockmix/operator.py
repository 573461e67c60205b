"""Block mixing as torch.library custom operators.

`hla_kernels::mhla` takes (q, k, v), `hla_kernels::mhla_qkvpacked` takes qkv [B, N, 3, H, D] and its backward writes one
packed gradient.

They return (o, saved). With `save`, `saved` holds what the backward would otherwise recompute; it is empty in the torch
form, which recomputes blocks and moments from the inputs. `impl`, chosen in `op`, is "torch" (`torch_form`, backward in
`gradient`) or "triton" (`fused`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..dispatch.operator import custom_op
from ..dispatch.recording import repeated
from . import fused
from .gradient import gradient
from .layout import Layout
from .options import BlockOptions
from .torch_form import evaluate


def _options(
    order: str, grid: Sequence[int], blocks: Sequence[int], prefix: int, feature_map: str | None, normalize: bool,
    causal: bool, scale: float | None, q_scale: float, eps: float, rotary_half: bool, moments: str,
) -> BlockOptions:  # fmt: skip
    layout = Layout(tuple(grid), tuple(blocks), prefix)
    return BlockOptions(layout, order, feature_map, normalize, causal, scale, q_scale, eps, rotary_half, moments)


def flat(options: BlockOptions) -> tuple:
    """Return the options as arguments of the operator, in its order."""
    (grid, blocks, prefix), order, *rest = options
    return (order, list(grid), list(blocks), prefix, *rest)


def _rotary(cos: Tensor | None, sin: Tensor | None) -> tuple[Tensor, Tensor] | None:
    return None if cos is None or sin is None else (cos, sin)


def _in_triton(impl: str, q: Tensor) -> bool:
    """Whether the kernels run; an empty batch, for which nothing can be launched, uses the torch form."""
    return impl == "triton" and q.shape[0] != 0


def _parts(tokens: Sequence[Tensor]) -> list[Tensor]:
    """Return q, k, v from (q, k, v) or (qkv,), with a contiguous last dimension: the Triton form requires it, and
    torch.compile may have changed the strides that `op` checked."""
    parts = tokens[0].unbind(2) if len(tokens) == 1 else tokens
    return [x if x.stride(3) == 1 else x.contiguous() for x in parts]


def _saved(q: Tensor, v: Tensor, options: BlockOptions, impl: str, save: bool, turned: bool) -> Tensor:
    """Return an uninitialised `saved` of the size that the forward returns."""
    length = fused.saved_floats(q, v, options, turned) if save and impl == "triton" else 0
    return q.new_empty((length,), dtype=torch.float32)


def _forward(
    tokens: Sequence[Tensor], mixing: Tensor, mask: Tensor | None, cos: Tensor | None, sin: Tensor | None,
    options: BlockOptions, impl: str, save: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    first, rotary = tokens[0], _rotary(cos, sin)
    if not _in_triton(impl, first):
        q, k, v = _parts(tokens)
        with torch.autocast(first.device.type, enabled=False):
            return evaluate(q, k, v, mixing, options, mask, rotary), _saved(q, v, options, impl, False, False)

    def work() -> tuple[Tensor, ...]:
        q, k, v = _parts(tokens)
        return fused.forward(q, k, v, mixing, options, mask, rotary, save)

    with torch.cuda.device_of(first):
        inputs = (*tokens, mixing, mask, cos, sin)
        o, saved = repeated(("mhla", options, save), inputs, work)
        return o, saved


def _backward(
    grad: Tensor, saved: Tensor, tokens: Sequence[Tensor], mixing: Tensor, mask: Tensor | None, cos: Tensor | None,
    sin: Tensor | None, options: BlockOptions, impl: str,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return the gradients of `tokens` and of the mixing matrix."""
    first, rotary = tokens[0], _rotary(cos, sin)
    if not _in_triton(impl, first):
        q, k, v = _parts(tokens)
        with torch.autocast(first.device.type, enabled=False):
            *grads, dm = gradient(grad, q, k, v, mixing, options, mask, rotary)
        return (*(grads if len(tokens) == 3 else (torch.stack(grads, 2),)), dm)

    with torch.cuda.device_of(first):
        return repeated(
            ("mhla backward", options), (*tokens, grad, saved, mixing, mask, cos, sin),
            lambda: _written(grad, saved, tokens, mixing, mask, rotary, options),
        )  # fmt: skip


def _written(
    grad: Tensor, saved: Tensor, tokens: Sequence[Tensor], mixing: Tensor, mask: Tensor | None,
    rotary: tuple[Tensor, Tensor] | None, options: BlockOptions,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return new gradients of `tokens` and of the mixing matrix, computed by the Triton form."""
    q, k, v = _parts(tokens)
    grads = [_room(x, mask) for x in tokens]
    dq, dk, dv = grads[0].unbind(2) if len(grads) == 1 else grads
    return (*grads, fused.backward(grad, q, k, v, mixing, options, mask, rotary, (dq, dk, dv), saved))


@custom_op("mhla")
def mhla_op(
    q: Tensor, k: Tensor, v: Tensor, mixing: Tensor, mask: Tensor | None, cos: Tensor | None, sin: Tensor | None,
    order: str, grid: Sequence[int], blocks: Sequence[int], prefix: int, feature_map: str | None, normalize: bool,
    causal: bool, scale: float | None, q_scale: float, eps: float, rotary_half: bool, moments: str,
    impl: str = "torch", save: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return o (see `blockmix`) [B, N, H, Dv] and a buffer for the backward; arguments are checked by
    `call.prepare`."""
    options = _options(
        order, grid, blocks, prefix, feature_map, normalize, causal, scale, q_scale, eps, rotary_half, moments
    )
    return _forward((q, k, v), mixing, mask, cos, sin, options, impl, save)


@mhla_op.register_fake
def _(q, k, v, mixing, mask, cos, sin, *rest):
    *options, impl, save = rest if len(rest) == 14 else (*rest, *("torch", False)[len(rest) - 12 :])
    return q.new_empty((*q.shape[:3], v.shape[3])), _saved(q, v, _options(*options), impl, save, cos is not None)


@custom_op("mhla_backward")
def mhla_backward(
    grad: Tensor, saved: Tensor, q: Tensor, k: Tensor, v: Tensor, mixing: Tensor, mask: Tensor | None,
    cos: Tensor | None, sin: Tensor | None, order: str, grid: Sequence[int], blocks: Sequence[int], prefix: int,
    feature_map: str | None, normalize: bool, causal: bool, scale: float | None, q_scale: float, eps: float,
    rotary_half: bool, moments: str, impl: str = "torch",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return (dq, dk, dv, dmixing) of `mhla`."""
    options = _options(
        order, grid, blocks, prefix, feature_map, normalize, causal, scale, q_scale, eps, rotary_half, moments
    )
    dq, dk, dv, dm = _backward(grad, saved, (q, k, v), mixing, mask, cos, sin, options, impl)
    return dq, dk, dv, dm


@mhla_backward.register_fake
def _(grad, saved, q, k, v, mixing, *options):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, mixing))


@custom_op("mhla_qkvpacked")
def mhla_packed_op(
    qkv: Tensor, mixing: Tensor, mask: Tensor | None, cos: Tensor | None, sin: Tensor | None, order: str,
    grid: Sequence[int], blocks: Sequence[int], prefix: int, feature_map: str | None, normalize: bool, causal: bool,
    scale: float | None, q_scale: float, eps: float, rotary_half: bool, moments: str, impl: str = "torch",
    save: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run `mhla` on qkv [B, N, 3, H, D]."""
    options = _options(
        order, grid, blocks, prefix, feature_map, normalize, causal, scale, q_scale, eps, rotary_half, moments
    )
    return _forward((qkv,), mixing, mask, cos, sin, options, impl, save)


@mhla_packed_op.register_fake
def _(qkv, mixing, mask, cos, sin, *rest):
    *options, impl, save = rest if len(rest) == 14 else (*rest, *("torch", False)[len(rest) - 12 :])
    q, _, v = qkv.unbind(2)
    return torch.empty_like(q, memory_format=torch.contiguous_format), _saved(
        q, v, _options(*options), impl, save, cos is not None
    )


@custom_op("mhla_qkvpacked_backward")
def mhla_packed_backward(
    grad: Tensor, saved: Tensor, qkv: Tensor, mixing: Tensor, mask: Tensor | None, cos: Tensor | None,
    sin: Tensor | None, order: str, grid: Sequence[int], blocks: Sequence[int], prefix: int, feature_map: str | None,
    normalize: bool, causal: bool, scale: float | None, q_scale: float, eps: float, rotary_half: bool,
    moments: str, impl: str = "torch",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return (dqkv, dmixing) of `mhla_qkvpacked`; dqkv is one buffer, into which dq, dk and dv are written."""
    options = _options(
        order, grid, blocks, prefix, feature_map, normalize, causal, scale, q_scale, eps, rotary_half, moments
    )
    out, dm = _backward(grad, saved, (qkv,), mixing, mask, cos, sin, options, impl)
    return out, dm


@mhla_packed_backward.register_fake
def _(grad, saved, qkv, mixing, *options):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (qkv, mixing))


def _room(x: Tensor, mask: Tensor | None) -> Tensor:
    """Allocate the gradient of x: zeros if there is padding, which the Triton form does not write."""
    new = torch.empty_like if mask is None else torch.zeros_like
    return new(x, memory_format=torch.contiguous_format)


def _derivative(forward: Any, backward: Any, tensors: int) -> None:
    """Register `backward` as the gradient of `forward`, whose first `tensors` arguments are tensors or None."""

    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:tensors], output[1])
        ctx.options = inputs[tensors:-1]

    def gradients(ctx: Any, grad: Tensor | None, _: None) -> tuple:
        if grad is None:
            return (None,) * len(ctx.needs_input_grad)
        *given, saved = ctx.saved_tensors
        grads = backward(grad, saved, *given, *ctx.options)
        return (*grads, *[None] * (len(ctx.needs_input_grad) - len(grads)))

    forward.register_autograd(gradients, setup_context=setup_context)


_derivative(mhla_op, mhla_backward, 7)
_derivative(mhla_packed_op, mhla_packed_backward, 5)
