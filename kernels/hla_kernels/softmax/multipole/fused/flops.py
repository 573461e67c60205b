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


def _far(p: Plan, pooled: int, moments: int) -> int:
    """Count `pooled` products of each query with each pooled block, and `moments` products with each moment."""
    products = pooled + moments * p.moments * p.channels
    return 0 if p.whole else math.prod(p.grid) * p.n_blocks * products


def _within(p: Plan, count: int) -> int:
    """Count `count` products of each token with the moment of its block."""
    return count * p.moments * math.prod(p.grid) * p.channels


@register_flop_formula(torch.ops.hla_kernels.multipole)
def multipole_flops(q: Shape, k: Shape, v: Shape, *where: Any, out_shape: Any = None) -> int:
    """Operations of the forward: scores with keys and with mean keys, and values. Mean keys take two products, but one
    for near blocks with degree 0."""
    grid, blocks, outer, radius, degree, _ = where
    p = plan_of(grid, blocks, outer, radius, degree, q[3])
    near = (3 + (degree > 0)) * p.pairs(p.tiles.output.patch)
    return _operations(q, near + _far(p, 3, 1) + _within(p, 1))


@register_flop_formula(torch.ops.hla_kernels.multipole_backward)
def multipole_backward_flops(grad: Shape, q: Shape, *rest: Any, out_shape: Any = None) -> int:
    """Operations of the backward: scores (two products) and g v' twice, two products for dq, and one each for dk, dv
    and the gradient of mean keys."""
    *_, grid, blocks, outer, radius, degree, _ = rest
    p = plan_of(grid, blocks, outer, radius, degree, q[3])
    more = degree > 0
    near = (5 + more) * p.pairs(p.tiles.for_queries.patch) + (6 + more) * p.pairs(p.tiles.for_keys.other)
    return _operations(q, near + _far(p, 5, 1) + _far(p, 5, 2) + _within(p, 3))
