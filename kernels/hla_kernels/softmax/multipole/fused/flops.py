"""Floating-point operations of the Triton form, for torch.utils.flop_counter.FlopCounterMode: the products that run."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from . import launch  # noqa: F401  registers the operators

Shape = tuple[int, ...]


def _products(q: Shape, count: int) -> int:
    """So many products of all pairs of tokens."""
    b, n, h, d = q
    return 2 * count * b * h * n * n * d


@register_flop_formula(torch.ops.hla_kernels.multipole)
def multipole_flops(q: Shape, *rest: Any, out_shape: Any = None) -> int:
    """q.A, q.C and the weighted values."""
    return _products(q, 3)


@register_flop_formula(torch.ops.hla_kernels.multipole_backward)
def multipole_backward_flops(grad: Shape, q: Shape, *rest: Any, out_shape: Any = None) -> int:
    """Scores (two products) and g v' twice; two products for dq, one each for da, dc and dv."""
    return _products(q, 11)
