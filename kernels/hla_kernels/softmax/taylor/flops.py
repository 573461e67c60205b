"""Floating-point operations of Taylor attention, for torch.utils.flop_counter.FlopCounterMode.

Counted are the matrix products that run, a multiplication and an addition each; padding counts as tokens, and grouped
keys count as if each query head had its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from . import operator  # noqa: F401  registers the operators
from .torch_form import by_state, multiplications

Shape = tuple[int, ...]


def _forward(q: Shape, v: Shape, q2: Shape | None, impl: str) -> int:
    b, n, h, d = q
    r = 0 if q2 is None else q2[3]
    return 2 * b * n * h * multiplications(n, d, r, v[3], impl == "torch" and by_state(n, d, r, v[3]))


def _backward(q: Shape, v: Shape, q2: Shape | None, impl: str) -> int:
    """The torch form: the forward again, and two products for each of its products. The Triton form by tokens: scores
    and g v' twice, and a product each for dq, dk, dv and those of the narrow pair."""
    b, n, h, d = q
    r = 0 if q2 is None else q2[3]
    return 3 * _forward(q, v, q2, impl) if impl == "torch" else 2 * b * n * h * n * (4 * (d + r) + 3 * v[3])


def _impl(options: tuple, at: int) -> str:
    """The argument `impl`, the `at`-th of those after the tensors, or its default."""
    return options[at] if len(options) > at else "torch"


@register_flop_formula(torch.ops.hla_kernels.taylor2)
def taylor2_flops(q: Shape, k: Shape, v: Shape, _, q2: Shape | None, *rest: Any, out_shape: Any = None) -> int:
    """Forward from q, k, v."""
    return _forward(q, v, q2, _impl(rest, 4))


@register_flop_formula(torch.ops.hla_kernels.taylor2_backward)
def taylor2_backward_flops(
    grad: Shape, o: Shape | None, saved: Shape, q: Shape, k: Shape, v: Shape, _, q2: Shape | None, *rest: Any,
    out_shape: Any = None,
) -> int:  # fmt: skip
    """Backward to q, k, v."""
    return _backward(q, v, q2, _impl(rest, 4))


@register_flop_formula(torch.ops.hla_kernels.taylor2_qkvpacked)
def taylor2_qkvpacked_flops(qkv: Shape, _, *rest: Any, out_shape: Any = None) -> int:
    """Forward from qkv."""
    x = (*qkv[:2], *qkv[3:])
    return _forward(x, x, None, _impl(rest, 3))


@register_flop_formula(torch.ops.hla_kernels.taylor2_qkvpacked_backward)
def taylor2_qkvpacked_backward_flops(
    grad: Shape, o: Shape | None, saved: Shape, qkv: Shape, _, *rest: Any, out_shape: Any = None
) -> int:
    """Backward to qkv."""
    x = (*qkv[:2], *qkv[3:])
    return _backward(x, x, None, _impl(rest, 3))
