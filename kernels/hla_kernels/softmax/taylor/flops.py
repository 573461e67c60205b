"""Floating-point operations of Taylor attention, for torch.utils.flop_counter.FlopCounterMode.

Only matrix products are counted, as one multiplication and one addition per term. Padding counts as tokens, and grouped
keys count once per query head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from . import operator  # noqa: F401  registers the operators
from .torch_form import by_state, multiplications

Shape = tuple[int, ...]


def _forward(q: Shape, v: Shape, q2: Shape | None) -> int:
    b, n, h, d = q
    r = 0 if q2 is None else q2[3]
    return 2 * b * n * h * multiplications(n, d, r, v[3], by_state(n, d, r, v[3]))


def _backward(q: Shape, v: Shape, q2: Shape | None) -> int:
    """Return the operations of the backward: the forward, and two products for each of its products."""
    return 3 * _forward(q, v, q2)


@register_flop_formula(torch.ops.hla_kernels.taylor2)
def taylor2_flops(q: Shape, k: Shape, v: Shape, _, q2: Shape | None, *rest: Any, out_shape: Any = None) -> int:
    """Operations of the forward from q, k, v."""
    return _forward(q, v, q2)


@register_flop_formula(torch.ops.hla_kernels.taylor2_backward)
def taylor2_backward_flops(
    grad: Shape, q: Shape, k: Shape, v: Shape, _, q2: Shape | None, *rest: Any, out_shape: Any = None
) -> int:
    """Operations of the backward to q, k, v."""
    return _backward(q, v, q2)


@register_flop_formula(torch.ops.hla_kernels.taylor2_qkvpacked)
def taylor2_qkvpacked_flops(qkv: Shape, _, *rest: Any, out_shape: Any = None) -> int:
    """Operations of the forward from qkv."""
    x = (*qkv[:2], *qkv[3:])
    return _forward(x, x, None)


@register_flop_formula(torch.ops.hla_kernels.taylor2_qkvpacked_backward)
def taylor2_qkvpacked_backward_flops(grad: Shape, qkv: Shape, _, *rest: Any, out_shape: Any = None) -> int:
    """Operations of the backward to qkv."""
    x = (*qkv[:2], *qkv[3:])
    return _backward(x, x, None)
