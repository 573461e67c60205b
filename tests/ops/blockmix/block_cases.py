"""Layouts, options and inputs of the tests of block mixing; the tolerance rule is that of `tests.ops.cases`."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.cases import tokens

ORDERS = ("la", "ahla", "hla2")
LAYOUTS: dict[str, dict[str, Any]] = {
    "even": {"grid": (4, 6), "blocks": (2, 3)},
    "odd": {"grid": (5, 7), "blocks": (2, 3)},
    "prefix": {"grid": (5, 4), "blocks": (2, 2), "prefix": 3},
    "video": {"grid": (3, 4, 5), "blocks": (2, 2, 2)},
    "line": {"grid": (13,), "blocks": (4,), "prefix": 1},
    "one": {"grid": (3, 3), "blocks": (1, 1)},
    "single": {"grid": (3, 2), "blocks": (3, 2)},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "relu": {},
    "elu1": {"feature_map": "elu1", "eps": 1e-3},
    "pair": {"feature_map": "softmax_pair", "q_scale": 0.4},
    "plain": {"feature_map": None, "normalize": False, "q_scale": 0.5},
    "scale": {"feature_map": "relu", "normalize": False, "scale": 0.3},
}
CAUSAL_LAYOUTS: dict[str, dict[str, Any]] = {
    "chunks": {"grid": (24,), "blocks": (6,)},
    "uneven": {"grid": (23,), "blocks": (5,), "prefix": 2},
    "rows": {"grid": (5, 4), "blocks": (2, 1)},
}


def sizes(layout: dict[str, Any]) -> tuple[int, int]:
    """(N, M)."""
    prefix = layout.get("prefix", 0)
    return math.prod(layout["grid"]) + prefix, math.prod(layout["blocks"]) + (prefix > 0)


def inputs(layout: dict[str, Any], heads: bool = False, **shape: Any) -> tuple[Tensor, ...]:
    """(q, k, v, mixing): unit normal tokens, positive mixing, [M, M] or with `heads` one a query head."""
    n, m = sizes(layout)
    q, k, v = tokens(n, **{"d": 6, **shape})
    g = torch.Generator().manual_seed(11)
    mixing = torch.rand((q.shape[2], m, m) if heads else (m, m), generator=g, dtype=torch.float64)
    return q, k, v, mixing.to(q.dtype)


def angles(layout: dict[str, Any], heads: int = 0, d: int = 6) -> tuple[Tensor, Tensor]:
    """(cos, sin) [N, D / 2], or [N, H, D / 2] with `heads`."""
    n, g = sizes(layout)[0], torch.Generator().manual_seed(5)
    x = torch.randn((n, heads, d // 2) if heads else (n, d // 2), generator=g, dtype=torch.float64)
    return x.cos(), x.sin()


def mask_of(layout: dict[str, Any], b: int = 2) -> Tensor:
    """Some tokens of each sample are real; none of the last block of the first sample."""
    n, _ = sizes(layout)
    mask = torch.rand(b, n, generator=torch.Generator().manual_seed(2)) > 0.3
    mask[:, 0] = True
    mask[0, -1] = False
    return mask


def blocks_by_hand(layout: dict[str, Any]) -> list[list[int]]:
    """The tokens of each block, by cutting every axis into nearly equal parts."""
    grid, blocks, prefix = layout["grid"], layout["blocks"], layout.get("prefix", 0)
    parts = [[range(i * n // m, (i + 1) * n // m) for i in range(m)] for n, m in zip(grid, blocks, strict=True)]
    strides = [math.prod(grid[i + 1 :]) for i in range(len(grid))]
    found = [list(range(prefix))] if prefix else []
    for box in itertools.product(*parts):
        cells = itertools.product(*box)
        found.append([prefix + sum(p * s for p, s in zip(cell, strides, strict=True)) for cell in cells])
    return found


ALL = [
    pytest.param(order, layout, options, id=f"{order}-{a}-{b}")
    for order in ORDERS
    for a, layout in LAYOUTS.items()
    for b, options in OPTIONS.items()
]
CAUSAL = [
    pytest.param(layout, {**options, "order": order}, id=f"{order}-{a}-{b}")
    for order in ORDERS
    for a, layout in CAUSAL_LAYOUTS.items()
    for b, options in OPTIONS.items()
    if order == "la" or b in ("elu1", "plain")
]
