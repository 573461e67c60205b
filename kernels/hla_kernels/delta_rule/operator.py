"""Custom operator `hla_kernels::delta`.

It saves its inputs only and recomputes the chunks in the backward pass. torch.compile traces it as a single operator,
whatever the number of tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..dispatch.operator import custom_op
from ..hla.causal_op import transforms
from ..options import compute_dtype
from .chunked import chunked
from .reference import reference


def evaluate(
    q: Tensor, k: Tensor, v: Tensor, log_f: Tensor, a: Tensor, b: Tensor, state: Tensor, by_token: bool = False
) -> tuple[Tensor, Tensor]:
    """Return o [B, N, H, Dv] in the dtype of q and the last state [B, H, D, Dv], in float32 or float64.

    q [B, N, H, D], k [B, N, H, s, D], v [B, N, H, s, Dv], log_f [B, N, H, 1 or D], a, b [B, N, H, r, D], state
    [B, H, D, Dv]. by_token: use the recurrence instead of chunks.
    """
    dtype = compute_dtype(q.dtype)
    tokens = [x.to(dtype).transpose(1, 2) for x in (q, k, v, log_f, a, b)]
    form = reference if by_token else chunked
    with torch.autocast(q.device.type, enabled=False):
        o, last = form(tokens[0], tokens[1], tokens[2], tokens[3], tokens[4], tokens[5], state.to(dtype))
    return o.transpose(1, 2).to(q.dtype).contiguous(), last.contiguous()


@custom_op("delta")
def delta_op(
    q: Tensor, k: Tensor, v: Tensor, log_f: Tensor, a: Tensor, b: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Run `evaluate` in chunks."""
    return evaluate(q, k, v, log_f, a, b, state)


@delta_op.register_fake
def _(q, k, v, log_f, a, b, state):
    return q.new_empty((*q.shape[:3], v.shape[4])), state.new_empty(state.shape, dtype=compute_dtype(q.dtype))


@custom_op("delta_backward")
def delta_backward(
    grad: Tensor, grad_state: Tensor, q: Tensor, k: Tensor, v: Tensor, log_f: Tensor, a: Tensor, b: Tensor,
    state: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of the inputs of `delta`, in their order."""
    with transforms():
        grads = torch.func.vjp(evaluate, q, k, v, log_f, a, b, state)[1]((grad, grad_state))
    return tuple(x.contiguous() for x in grads)


@delta_backward.register_fake
def _(grad, grad_state, *inputs):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs)


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad, grad_state):
    return delta_backward(grad, grad_state, *ctx.saved_tensors)


delta_op.register_autograd(_backward, setup_context=_setup_context)
