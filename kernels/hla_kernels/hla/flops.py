"""Floating-point operations of the custom operators, for torch.utils.flop_counter.FlopCounterMode.

Only matrix products are counted, as one multiplication and one addition per term: products over tokens (moments,
read-out) and products of D x D matrices. The backward includes recomputed moments and products. Padding counts as
tokens. The products of the causal form, whose chunks and levels depend on N, are counted by running it on fake tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, register_flop_formula

from ..features import feature_width
from . import (
    stages,  # noqa: F401  registers the operators
    two_sided,  # noqa: F401
)
from .causal_op import evaluate, gradient
from .moments import FACTORS, MOMENTS

# number of products of a D x D by a D x Dv matrix, forward and backward (including recomputation)
PRODUCTS = {
    "linear_attention": (0, 0), "hla2": (1, 3), "ahla": (1, 3), "hla3": (2, 7), "polynomial": (4, 17),
}  # fmt: skip
Shape = tuple[int, ...]


class Sizes:
    """B, N, H, Hk, F (features), Dv and the number of sequences of one call."""

    def __init__(
        self, q: Shape, k: Shape, v: Shape, op: str, feature_map: str | None, cu_seqlens: Shape | None
    ) -> None:
        self.tokens, self.sequences = q[0] * q[1], q[0] if cu_seqlens is None else cu_seqlens[0] - 1
        self.h, self.hk, self.dv, self.op = q[2], k[2], v[3], op
        self.f = feature_width(q[3], feature_map)

    def moment(self, name: str) -> int:
        """Operations of one pass over the tokens that forms a moment, or multiplies tokens by its gradient."""
        a, b = FACTORS[name]
        heads = self.h if "q" in (a, b) else self.hk
        return 2 * self.tokens * heads * self.f * (self.dv if b == "v" else self.f)

    def products(self, backward: bool) -> int:
        """Operations of the products of moments, or of their gradients."""
        return 2 * PRODUCTS[self.op][backward] * self.sequences * self.h * self.f * self.f * self.dv

    def read_out(self) -> int:
        """Operations of the queries times the operator matrix."""
        return 2 * self.tokens * self.h * self.f * self.dv

    def forward(self) -> int:
        """Operations of moments, products and read-out."""
        return sum(map(self.moment, MOMENTS[self.op])) + self.products(False) + self.read_out()

    def backward(self) -> int:
        """Operations of the backward: recomputed moments, two gradients for the read-out and for each moment with two
        different factors."""
        tokens = sum(self.moment(name) * (1 + len(set(FACTORS[name]))) for name in MOMENTS[self.op])
        return tokens + self.products(True) + 2 * self.read_out()


def _two_sided(name: str, count: int) -> None:
    """Register the formulas of the operators of `count` tensors of tokens."""

    def sizes(tokens: tuple[Shape, ...], op: str, options: tuple, at: int) -> Sizes:
        """at: index of cu_seqlens among the arguments behind the operator's name."""
        q, k, v = tokens if count == 3 else ((*tokens[0][:2], *tokens[0][3:]),) * 3
        return Sizes(q, k, v, op, options[0], options[at] if len(options) > at else None)

    @register_flop_formula(getattr(torch.ops.hla_kernels, name))
    def forward(*args: Any, out_shape: Any = None) -> int:
        return sizes(args[:count], args[count + 1], args[count + 2 :], 12).forward()

    @register_flop_formula(getattr(torch.ops.hla_kernels, f"{name}_backward"))
    def backward(grad: Shape, saved: Shape, *args: Any, out_shape: Any = None) -> int:
        return sizes(args[:count], args[count + 1], args[count + 2 :], 11).backward()


_two_sided("two_sided", 3)
_two_sided("two_sided_qkvpacked", 1)


def _products(run: Callable[..., Any], *inputs: Any) -> int:
    """Count the operations of `run`, with fake tensors for the shapes among the inputs."""
    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        run(*(torch.empty(x) if isinstance(x, torch.Size) else x for x in inputs))
    return counter.get_total_flops()


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
