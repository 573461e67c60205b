"""Floating-point operations of the custom operators, for torch.utils.flop_counter.FlopCounterMode.

Only matrix products are counted, as one multiplication and one addition per term, by running the torch forms on fake
tensors: of the two-sided operators without denominator, centring and mean path. The backward includes what it
recomputes. Padding counts as tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, register_flop_formula

from ..options import Options
from . import stages  # noqa: F401  registers the operators
from .causal_op import causal_backward, evaluate
from .gradient import gradient as two_sided_gradient
from .two_sided import evaluate as two_sided_evaluate


def _products(run: Callable[..., Any], *inputs: Any) -> int:
    """Count the operations of `run`, with fake tensors for the shapes among the inputs."""
    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        run(*(torch.empty(x) if isinstance(x, torch.Size) else x for x in inputs))
    return counter.get_total_flops()


def _two_sided(name: str, count: int, backward: bool) -> None:
    """Register the products of an operator of `count` tensors of tokens, or of its backward."""

    @register_flop_formula(getattr(torch.ops.hla_kernels, f"{name}_backward" if backward else name))
    def formula(*args: Any, out_shape: Any = None) -> int:
        args = args[2:] if backward else args  # behind the gradient and what the forward saved
        tokens, (c, op, feature_map, *others) = args[:count], args[count:]
        q, k, v = tokens if count == 3 else (torch.Size((*tokens[0][:2], *tokens[0][3:])),) * 3
        options = Options(feature_map=feature_map, scale=1.0)

        def run(q: Tensor, k: Tensor, v: Tensor, c: Tensor | None) -> None:
            if backward:
                two_sided_gradient(op, q.new_empty(*q.shape[:3], v.shape[3]), q, k, v, c, options)
            else:
                two_sided_evaluate(op, q, k, v, c, options)

        cu_seqlens = others[10 if backward else 11 :][:1]
        total = _products(run, q, k, v, c)
        if not cu_seqlens or cu_seqlens[0] is None:
            return total
        # a call without tokens runs the products of moments, which every further sequence has too
        nothing = (torch.Size((1, 0, *x[2:])) for x in (q, k, v))
        return total + (cu_seqlens[0][0] - 2) * _products(run, *nothing, c)


for _backward in (False, True):
    _two_sided("two_sided", 3, _backward)
    _two_sided("two_sided_qkvpacked", 1, _backward)


def _gradient(grad: Tensor, needed: list[bool], *inputs: Any) -> None:
    causal_backward.function([grad], needed, *inputs)


OPS = torch.ops.hla_kernels
DEFAULTS = (None, False, "cascade", 0.0, None, 1e-6, 0)  # options of `causal` that change no product of a state's call


@register_flop_formula(OPS.causal)
def _causal(*inputs: Any, out_shape: Any = None) -> int:
    return _products(evaluate, *inputs)


@register_flop_formula(OPS.causal_backward)
def _causal_backward(grads: list, needed: list[bool], *inputs: Any, out_shape: Any = None) -> int:
    return _products(_gradient, grads[0], needed, *inputs)


@register_flop_formula(OPS.causal_stages)
def _stages(q: Any, k: Any, v: Any, gamma: Any, first: Any, *options: Any, out_shape: Any = None) -> int:
    return _products(evaluate, q, k, v, gamma, *options[:3], *DEFAULTS)


@register_flop_formula(OPS.causal_stages_backward)
def _stages_backward(grad: Any, q: Any, k: Any, v: Any, gamma: Any, *rest: Any, out_shape: Any = None) -> int:
    gamma_grad, *options = rest[3:7]  # behind the states and what the forward saved
    return _products(_gradient, grad, [True, True, True, gamma_grad], q, k, v, gamma, *options, *DEFAULTS)
