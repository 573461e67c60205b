"""Floating-point operations of block mixing, for torch.utils.flop_counter.FlopCounterMode.

Only matrix products are counted, as one multiplication and one addition per term: moments, their mixing, products of
mixed moments, read-out; in the causal form also scores and values inside a block. The backward includes recomputation.
The read-out of the denominator and rotations are not counted; narrow blocks count with their number of tokens.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from ..features import feature_width
from . import operator  # noqa: F401  registers the operators
from .layout import Layout

Shape = tuple[int, ...]
# moments of each order, in the order of the product: (contains queries, has width Dv)
MOMENTS = {"la": ((False, True),), "ahla": ((True, False), (False, True)), "hla2": ((False, False), (True, True))}


# causal higher orders: number of products of each size, forward and backward
# (n tokens, w tokens per block, m blocks, f features, e = Dv)
CAUSAL = {
    "ahla": ({"nwf": 1, "nwe": 2, "nff": 1, "nfe": 5, "mmfe": 2, "mffe": 1, "mmffe": 1},
             {"nwf": 3, "nwe": 6, "nff": 3, "nfe": 11, "mmfe": 6, "mmffe": 4}),
    "hla2": ({"nwf": 3, "nwe": 1, "nff": 3, "nfe": 3, "mmff": 1, "mmfe": 1, "mffe": 1, "mmffe": 1},
             {"nwf": 9, "nwe": 3, "nff": 5, "nfe": 8, "mmff": 3, "mmfe": 3, "mmffe": 4}),
}  # fmt: skip


def _causal(q: Shape, v: Shape, options: tuple, backward: bool) -> int:
    """Operations of a causal higher order, counted with one key head per query head."""
    order, grid, blocks, prefix, feature_map = options[:5]
    layout = Layout(tuple(grid), tuple(blocks), prefix)
    size = {"n": q[1], "w": layout.widest, "m": layout.n_blocks, "f": feature_width(q[3], feature_map), "e": v[3]}
    counts = CAUSAL[order][backward]
    return 2 * q[0] * q[2] * sum(n * math.prod(size[x] for x in name) for name, n in counts.items())


def _parts(q: Shape, k: Shape, v: Shape, mixing: Shape, options: tuple) -> dict[str, int]:
    """Return the operations of each part of the forward."""
    order, grid, blocks, prefix, feature_map = options[:5]
    causal, layout = options[6], Layout(tuple(grid), tuple(blocks), prefix)
    b, n, h, hk, dv, m = q[0], q[1], q[2], k[2], v[3], layout.n_blocks
    f = feature_width(q[3], feature_map)
    parts = {"moments": 0, "mix": 0, "product": 0, "read": 2 * b * n * h * f * dv, "inside": 0}
    for of_queries, of_values in MOMENTS[order]:
        heads, size = h if of_queries else hk, f * (dv if of_values else f)
        parts["moments"] += 2 * b * n * heads * size
        parts["mix"] += 2 * b * m * m * (heads if len(mixing) == 2 else h) * size
    if order != "la":
        parts["product"] = 2 * b * m * h * f * f * dv
    if causal:
        parts["inside"] = 2 * b * n * h * layout.widest * (f + dv)
    return parts


@register_flop_formula(torch.ops.hla_kernels.mhla)
def mhla_flops(q: Shape, k: Shape, v: Shape, mixing: Shape, *options: Any, out_shape: Any = None) -> int:
    """Operations of the forward."""
    if options[9] and options[3] != "la":
        return _causal(q, v, options[3:], False)
    return sum(_parts(q, k, v, mixing, options[3:]).values())


@register_flop_formula(torch.ops.hla_kernels.mhla_backward)
def mhla_backward_flops(
    grad: Shape, saved: Shape, q: Shape, k: Shape, v: Shape, mixing: Shape, *options: Any, out_shape: Any = None
) -> int:
    """Operations of the backward: the recomputed forward without read-out, and two products for each product of the
    forward, but one for the symmetric k k'."""
    if options[9] and options[3] != "la":
        return _causal(q, v, options[3:], True)
    parts, order = _parts(q, k, v, mixing, options[3:]), options[3]
    symmetric = 2 * k[0] * k[1] * k[2] * feature_width(k[3], options[7]) ** 2 if order == "hla2" else 0
    return 3 * sum(parts.values()) - parts["read"] - symmetric


@register_flop_formula(torch.ops.hla_kernels.mhla_qkvpacked)
def packed_flops(qkv: Shape, mixing: Shape, *options: Any, out_shape: Any = None) -> int:
    """Operations of the forward for qkv [B, N, 3, H, D]."""
    x = (*qkv[:2], *qkv[3:])
    return mhla_flops(x, x, x, mixing, *options)


@register_flop_formula(torch.ops.hla_kernels.mhla_qkvpacked_backward)
def packed_backward_flops(
    grad: Shape, saved: Shape, qkv: Shape, mixing: Shape, *options: Any, out_shape: Any = None
) -> int:
    """Operations of the backward for qkv [B, N, 3, H, D]."""
    x = (*qkv[:2], *qkv[3:])
    return mhla_backward_flops(grad, saved, x, x, x, mixing, *options)
