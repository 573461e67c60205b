"""Floating-point operations of block mixing, for torch.utils.flop_counter.FlopCounterMode.

Only matrix products are counted, as one multiplication and one addition per term: moments, their mixing, products of
mixed moments, read-out; in the causal form also scores and values inside a block.
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

# causal higher orders: number of products of each size (n tokens, w tokens per block, m blocks, f features, e = Dv),
# and of those whose moments are zero and have no gradient
CAUSAL = {
    "ahla": ({"nwf": 1, "nwe": 2, "nff": 1, "nfe": 5, "mmfe": 2, "mffe": 1, "mmffe": 1}, {"nfe": 1, "mffe": 2}),
    "hla2": ({"nwf": 3, "nwe": 1, "nff": 3, "nfe": 3, "mmff": 1, "mmfe": 1, "mffe": 1, "mmffe": 1},
             {"nff": 1, "mffe": 2}),
}  # fmt: skip


def _causal(q: Shape, v: Shape, options: tuple, backward: bool) -> int:
    """Operations of a causal higher order, counted with one key head per query head."""
    order, grid, blocks, prefix, feature_map = options[:5]
    layout = Layout(tuple(grid), tuple(blocks), prefix)
    size = {"n": q[1], "w": layout.widest, "m": layout.n_blocks, "f": feature_width(q[3], feature_map), "e": v[3]}
    all_of, fixed = (sum(n * math.prod(size[x] for x in name) for name, n in x.items()) for x in CAUSAL[order])
    return 2 * q[0] * q[2] * (3 * all_of - fixed if backward else all_of)


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


def _register(name: str, packed: bool) -> None:
    """Register the formulas of the operators of q, k, v or of one packed qkv [B, N, 3, H, D]. The backward is the
    forward again, and two products for each of its products."""

    def counted(args: tuple, backward: bool) -> int:
        q, k, v = ((*args[0][:2], *args[0][3:]),) * 3 if packed else args[:3]
        mixing, _, _, _, *options = args[1 if packed else 3 :]
        if options[6] and options[0] != "la":
            return _causal(q, v, tuple(options), backward)
        return (3 if backward else 1) * sum(_parts(q, k, v, mixing, tuple(options)).values())

    @register_flop_formula(getattr(torch.ops.hla_kernels, name))
    def forward(*args: Any, out_shape: Any = None) -> int:
        return counted(args, False)

    @register_flop_formula(getattr(torch.ops.hla_kernels, f"{name}_backward"))
    def backward(grad: Shape, saved: Shape, *args: Any, out_shape: Any = None) -> int:
        return counted(args, True)


_register("mhla", False)
_register("mhla_qkvpacked", True)
