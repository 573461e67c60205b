"""Two-sided calls in Triton: the split path of one device, with sums over the ranks between launches."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..dispatch.operator import are_fixed
from ..features import feature
from ..hla.fused import Spec
from ..op import Call, TwoSided, choose
from .collectives import stage


def in_triton(call: Call) -> bool:
    """Whether the Triton form runs, the same on all ranks: it does not depend on the number of tokens."""
    q, k, v = (x.new_empty(x.shape[0], 2, *x.shape[2:]) for x in call[1:4])
    return len(q) > 0 and choose(call._replace(q=q, k=k, v=v), "auto") == "triton"


def _spec(call: Call) -> Spec:
    return Spec._make((call.op, *TwoSided.of(call, 3, "triton").options[:-1], are_fixed(call.coefficients)))


@torch._disable_dynamo
def evaluate(call: Call, group: Any) -> Tensor:
    """Return o [B, N, H, Dv] of this rank's tokens."""
    q, k = (feature(x, call.options.feature_map) for x in call[1:3])
    c = None if call.coefficients is None else call.coefficients.contiguous()
    tokens = [x if x.stride(3) == 1 else x.contiguous() for x in (q, k, call.v)]
    return _Evaluate.apply(*tokens, c, _spec(call), group)


class _Evaluate(torch.autograd.Function):
    """Stages of `hla.fused.shared`, each recorded and replayed, with an all-reduce after the first and the third."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, coefficients: Tensor | None, spec: Spec, group: Any
    ) -> Tensor:
        from ..hla.fused import shared

        with torch.cuda.device_of(q):
            (sums,) = stage("sums", (q, k, v, spec), lambda: (shared.own_sums(q, k, v, spec),))
            sums[-1:].fill_(q.shape[1])
            dist.all_reduce(sums, group=group)
            counts = shared.table(sums[-1:], spec, q.shape[0] * q.shape[2])
            call = shared.Shared(spec, q, k, v, coefficients, counts, dist.get_world_size(group))
            o, buffer = stage("outputs", call, call.outputs, sums)
        ctx.save_for_backward(q, k, v, coefficients, counts, buffer)
        ctx.options = spec, call.devices, group
        return o

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from ..hla.fused import shared

        *tensors, buffer = ctx.saved_tensors
        spec, devices, group = ctx.options
        call = shared.Shared._make((spec, *tensors, devices))
        g = grad if grad.stride(3) == 1 else grad.contiguous()
        with torch.cuda.device_of(g):
            grads, dq, ratio = stage("readout", call, call.readout_grads, g, buffer)
            dist.all_reduce(grads, group=group)
            dk, dv, dc = stage("tokens", call, call.token_grads, g, buffer, grads, dq, ratio)
        # every rank has the gradient of all tokens; its share makes the sum over the ranks right
        return dq, dk, dv, dc / devices if ctx.needs_input_grad[3] else None, None, None

