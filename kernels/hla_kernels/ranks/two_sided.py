"""Two-sided calls in Triton: the split path of one device, with sums over the ranks between launches.

The custom operator `hla_kernels::shared_two_sided` returns o and a float32 buffer for the backward: operators and
states of this rank's heads, then the table of numbers of tokens. Both directions add moments over the process group
with the name `group`, so that compiled code has no graph breaks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..dispatch.operator import are_fixed, parts, token_operators
from ..features import feature
from ..hla.fused import Spec
from ..hla.fused.spec import layout, operator_dtype
from ..op import Call, TwoSided, choose
from .collectives import add_in_place, group_named, name_of, rank_in, stage

SCHEMA = (  # of arguments behind the tokens
    "Tensor? coefficients, str op, str? feature_map, bool normalize, str? center, bool mean_path, float ridge, "
    "float? scale, float eps, float q_scale, bool fixed, str group"
)


def in_triton(call: Call) -> bool:
    """Whether the Triton form runs, the same on all ranks: it does not depend on the number of tokens."""
    q, k, v = (x.new_empty(x.shape[0], 2, *x.shape[2:]) for x in call[1:4])
    return len(q) > 0 and choose(call._replace(q=q, k=k, v=v), "auto", shared=True) == "triton"


def evaluate(call: Call, group: Any) -> Tensor:
    """Return o [B, N, H, Dv] of this rank's tokens."""
    q, k = (feature(x, call.options.feature_map) for x in call[1:3])
    c = None if call.coefficients is None else call.coefficients.contiguous()
    spec = Spec._make((call.op, *TwoSided.of(call, 3, "triton").options[:-1], are_fixed(call.coefficients)))
    return shared_two_sided(q, k, call.v, c, *spec, name_of(group))[0]


def _outputs(tokens: Sequence[Tensor], coefficients: Tensor | None, *arguments: Any) -> tuple[Tensor, Tensor]:
    q, _, v = tokens
    spec = Spec._make(arguments[:-1])
    floats = layout(spec, spec.widths(q.shape[3], v.shape[3])).floats(operator_dtype(q.dtype).itemsize) + 2
    return q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(q.shape[0] * q.shape[2] * floats, dtype=torch.float32)


def _split(saved: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Return operators and states, and the table of numbers of tokens [B * H, 2]."""
    heads = q.shape[0] * q.shape[2]
    return saved[: -2 * heads], saved[-2 * heads :].view(heads, 2)


def _forward(tokens: Sequence[Tensor], coefficients: Tensor | None, *arguments: Any) -> tuple[Tensor, Tensor]:
    from ..hla.fused import shared

    spec, group = Spec._make(arguments[:-1]), group_named(arguments[-1])
    q, k, v = parts(tokens)
    o, saved = _outputs(tokens, coefficients, *arguments)
    buffer, counts = _split(saved, q)
    with torch.cuda.device_of(q):
        (sums,) = stage("sums", (q, k, v, spec), lambda: (shared.own_sums(q, k, v, spec),))
        sums[-1:].fill_(q.shape[1])
        add_in_place(sums, group)
        n = sums[-1:]  # of all tokens
        counts.copy_(torch.cat([n, spec.scales(n)]))
        call = shared.Shared(spec, q, k, v, coefficients, counts, rank_in(group)[1])
        stage("outputs", call, call.outputs, sums, o, buffer)
    return o, saved


def _backward(
    grad: Tensor, saved: Tensor, tokens: Sequence[Tensor], coefficients: Tensor | None, *arguments: Any
) -> tuple[Tensor, ...]:
    """Return the gradients of the tokens and of the coefficients."""
    from ..hla.fused import shared

    spec, group = Spec._make(arguments[:-1]), group_named(arguments[-1])
    q, k, v = parts(tokens)
    buffer, counts = _split(saved, q)
    call = shared.Shared(spec, q, k, v, coefficients, counts, rank_in(group)[1])
    g = grad if grad.stride(3) == 1 else grad.contiguous()
    with torch.cuda.device_of(g):
        grads, dq, ratio = stage("readout", call, call.readout_grads, g, buffer)
        add_in_place(grads, group)
        dk, dv, dc = stage("tokens", call, call.token_grads, g, buffer, grads, dq, ratio)
    # every rank has the gradient of all tokens; its share makes the sum over the ranks right
    return dq, dk, dv, dc / call.devices


def _coefficients_grad(tokens: Sequence[Tensor], coefficients: Tensor | None, *arguments: Any) -> Tensor:
    if coefficients is None or Spec._make(arguments[:-1]).fixed:
        return tokens[0].new_empty((0,), dtype=torch.float32)
    return coefficients.new_empty(coefficients.shape)


RULES = (SCHEMA, _forward, _outputs, _backward, _coefficients_grad)
shared_two_sided, _ = token_operators("shared_two_sided", 3, *RULES, collective=True)
