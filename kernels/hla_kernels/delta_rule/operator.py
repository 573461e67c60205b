"""Custom operator `hla_kernels::delta`.

It saves its inputs only and recomputes the chunks in the backward pass. torch.compile traces it as a single operator,
whatever the number of tokens.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ..dispatch.operator import custom_op
from ..hla.causal_op import transforms
from ..options import compute_dtype
from .chunked import chunked
from .frames import framed
from .reference import reference


def evaluate(
    q: Tensor, k: Tensor, v: Tensor, log_f: Tensor, a: Tensor, b: Tensor, state: Tensor, frame: int = 0,
    by_token: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return o [B, N, H, Dv] in the dtype of q and the last state [B, H, D, Dv], in float32 or float64.

    q [B, N, H, D], k [B, N, H, s, D], v [B, N, H, s, Dv], log_f [B, N, H, 1 or D], a, b [B, N, H, r, D], state
    [B, H, D, Dv]. frame: tokens per frame, or 0. by_token: use the reference instead of chunks or whole frames.
    """
    dtype = compute_dtype(q.dtype)
    q_, k_, v_, f_, a_, b_ = (x.to(dtype).transpose(1, 2) for x in (q, k, v, log_f, a, b))
    state = state.to(dtype)
    with torch.autocast(q.device.type, enabled=False):
        if by_token:
            o, last = reference(q_, k_, v_, f_, a_, b_, state, frame or 1)
        elif frame:
            o, last = framed(q_, k_, v_, f_, a_, b_, state, frame)
        else:
            o, last = chunked(q_, k_, v_, f_, a_, b_, state)
    return o.transpose(1, 2).to(q.dtype).contiguous(), last.contiguous()


@custom_op("delta")
def delta_op(
    q: Tensor, k: Tensor, v: Tensor, log_f: Tensor, a: Tensor, b: Tensor, state: Tensor, frame: int
) -> tuple[Tensor, Tensor]:
    """Run `evaluate` in chunks or frames."""
    return evaluate(q, k, v, log_f, a, b, state, frame)


@delta_op.register_fake
def _(q, k, v, log_f, a, b, state, frame):
    return q.new_empty((*q.shape[:3], v.shape[4])), state.new_empty(state.shape, dtype=compute_dtype(q.dtype))


@custom_op("delta_backward")
def delta_backward(
    grad: Tensor, grad_state: Tensor, q: Tensor, k: Tensor, v: Tensor, log_f: Tensor, a: Tensor, b: Tensor,
    state: Tensor, frame: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of the tensors of `delta`, in their order."""
    with transforms():
        grads = torch.func.vjp(partial(evaluate, frame=frame), q, k, v, log_f, a, b, state)[1]((grad, grad_state))
    return tuple(x.contiguous() for x in grads)


@delta_backward.register_fake
def _(grad, grad_state, *inputs):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs[:-1])


def _setup_context(ctx, inputs, output):
    *tensors, ctx.frame = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, grad, grad_state):
    return *delta_backward(grad, grad_state, *ctx.saved_tensors, ctx.frame), None


delta_op.register_autograd(_backward, setup_context=_setup_context)
