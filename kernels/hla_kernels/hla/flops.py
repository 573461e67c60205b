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
from .causal_op import evaluate, gradient
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
                two_sided_gradient(op, q.new_empty(*q.shape[:3], v.shape[3]), q, k, v, c, options, (q, k, v))
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


def _causal(name: str, run: Callable[..., Any], tensors: int) -> None:
    """Register the products of the torch form for the causal operators without and with a state, whose arguments start
    with `tensors` equal ones."""
    ops, others = torch.ops.hla_kernels, (None, False, "cascade", 0.0, None, 1e-6, 0)

    @register_flop_formula(getattr(ops, f"causal{name}"))
    def without(*inputs: Any, out_shape: Any = None) -> int:
        return _products(run, *inputs)

    @register_flop_formula(getattr(ops, f"causal_stages{name}"))
    def with_state(*inputs: Any, out_shape: Any = None) -> int:
        kept = inputs[tensors + 3 :] if name else inputs[tensors + 1 :]  # behind the states
        return _products(run, *inputs[:tensors], *kept[: 4 if name else 3], *others)


_causal("", evaluate, 4)
_causal("_backward", gradient, 5)
