"""Floating-point operations of the custom operators, for torch.utils.flop_counter.FlopCounterMode.

Only matrix products are counted, as one multiplication and one addition per term, by running the torch forms on meta
tensors; two-sided operators and block mixing without denominator, centring, mean path and rotation. The backward
includes what it recomputes. Padding counts as tokens, and narrow blocks count as wide ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, register_flop_formula

from .blockmix.operator import mhla_backward, mhla_op, mhla_packed_backward, mhla_packed_op
from .dispatch.operator import Operator
from .hla import stages  # noqa: F401  registers the operators
from .hla.causal import causal_backward, causal_op
from .hla.two_sided import two_sided, two_sided_backward, two_sided_qkvpacked, two_sided_qkvpacked_backward
from .softmax.taylor.operator import taylor2_backward, taylor2_op

# arguments in place of the given ones
PLAIN = {"normalize": False, "mask": None, "impl": "torch", "save": False}
TWO_SIDED = PLAIN | {"center": None, "mean_path": False, "scale": 1.0, "cu_seqlens": None}
BLOCKS = PLAIN | {"cos": None, "sin": None}
# arguments of `causal` behind the feature map and normalize: center, mean path, decay rule, ridge, scale, eps, frame
OTHERS = (None, False, "cascade", 0.0, None, 1e-6, 0)


def count(operator: Operator, args: Any, plain: dict[str, Any]) -> int:
    """Count the operations of an operator, whose arguments have shapes in place of tensors."""
    names = [x.name for x in operator.overload._schema.arguments]
    given = dict(zip(names, args, strict=False))
    given |= {name: value for name, value in plain.items() if name in given}
    with FlopCounterMode(display=False) as counter:
        operator.function(*map(_meta, given.values()))
    return counter.get_total_flops()


def _meta(x: Any) -> Any:
    """Return x with meta tensors in place of shapes."""
    if isinstance(x, list):
        return [_meta(y) for y in x]
    return torch.empty(x, device="meta") if isinstance(x, torch.Size) else x


def _register(operator: Operator, plain: dict[str, Any]) -> None:
    @register_flop_formula(operator.overload.overloadpacket)
    def formula(*args: Any, out_shape: Any = None) -> int:
        return count(operator, args, plain)


def _register_two_sided(operator: Operator) -> None:
    names = [x.name for x in operator.overload._schema.arguments]
    tokens, place = names.index("coefficients"), names.index("cu_seqlens")

    @register_flop_formula(operator.overload.overloadpacket)
    def formula(*args: Any, out_shape: Any = None) -> int:
        total, cu_seqlens = count(operator, args, TWO_SIDED), args[place : place + 1]
        if not cu_seqlens or cu_seqlens[0] is None:
            return total
        # a call without tokens runs the products of moments, which every further sequence has too
        nothing = (torch.Size((1, 0, *x[2:])) if len(x) > 1 else x for x in args[:tokens])
        return total + (cu_seqlens[0][0] - 2) * count(operator, (*nothing, *args[tokens:]), TWO_SIDED)


for _operator in (two_sided, two_sided_backward, two_sided_qkvpacked, two_sided_qkvpacked_backward):
    _register_two_sided(_operator)
for _operator in (mhla_op, mhla_backward, mhla_packed_op, mhla_packed_backward):
    _register(_operator, BLOCKS)
for _operator in (taylor2_op, taylor2_backward):
    _register(_operator, {"mask": None})
for _operator in (causal_op, causal_backward):
    _register(_operator, {})


@register_flop_formula(torch.ops.hla_kernels.causal_stages)
def _stages(q: Any, k: Any, v: Any, gamma: Any, first: Any, *options: Any, out_shape: Any = None) -> int:
    return count(causal_op, (q, k, v, gamma, *_of_torch(*options[:3])), {})


@register_flop_formula(torch.ops.hla_kernels.causal_stages_backward)
def _stages_backward(grad: Any, q: Any, k: Any, v: Any, gamma: Any, *rest: Any, out_shape: Any = None) -> int:
    gamma_grad, *options = rest[3:7]  # behind the states and what the forward saved
    needed = [True, True, True, gamma_grad, *[False] * 10]
    return count(causal_backward, ([grad], needed, q, k, v, gamma, *_of_torch(*options)), {})


def _of_torch(op: str, *options: Any) -> tuple:
    """Convert arguments of the Triton form to the torch form."""
    if op == "paper":
        return ("hla2", *options, *OTHERS[:2], op, *OTHERS[3:])
    return (op, *options, *OTHERS)
