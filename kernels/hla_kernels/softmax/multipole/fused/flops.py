"""Floating-point operations of the Triton form, for torch.utils.flop_counter.FlopCounterMode."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from . import operator  # noqa: F401  registers the operators
from .plan import Plan, plan_of

Shape = tuple[int, ...]


def _operations(q: Shape, products: int) -> int:
    """Return the operations of `products` products of D channels per head."""
    return 2 * q[0] * q[2] * q[3] * products


def _far(p: Plan, count: int) -> int:
    """Count `count` products of each query with each pooled block."""
    return 0 if p.whole else math.prod(p.grid) * p.n_blocks * count


@register_flop_formula(torch.ops.hla_kernels.multipole)
def multipole_flops(q: Shape, k: Shape, v: Shape, *where: Any, out_shape: Any = None) -> int:
    """Operations of the forward: scores with keys and with mean keys, and values. Mean keys of pooled blocks take two
    products."""
    grid, blocks, outer, radius = where[:4]
    p = plan_of(grid, blocks, outer, radius, q[3])
    return _operations(q, 3 * p.pairs(p.tiles.output.patch) + _far(p, 3))


@register_flop_formula(torch.ops.hla_kernels.multipole_backward)
def multipole_backward_flops(grad: Shape, q: Shape, *rest: Any, out_shape: Any = None) -> int:
    """Operations of the backward: scores (two products) and g v' twice, two products for dq, and one each for dk, dv
    and the gradient of mean keys."""
    grid, blocks, outer, radius = rest[-5:-1]
    p = plan_of(grid, blocks, outer, radius, q[3])
    return _operations(q, 5 * p.pairs(p.tiles.for_queries.patch) + 6 * p.pairs(p.tiles.for_keys.other) + _far(p, 10))
