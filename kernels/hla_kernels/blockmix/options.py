"""Options of one block-mixing call as an immutable value."""

from __future__ import annotations

from typing import NamedTuple

from .layout import Layout

ORDERS = ("la", "ahla", "hla2")
MOMENTS = ("bfloat16", "float32")


class BlockOptions(NamedTuple):
    """Options of `mhla` in canonical form; tensors (mixing, mask, rotary tables) are passed separately."""

    layout: Layout
    order: str = "la"
    feature_map: str | None = "relu"
    normalize: bool = True
    causal: bool | str = False
    scale: float | None = None
    q_scale: float = 1.0
    eps: float = 1e-6
    rotary_half: bool = False
    moments: str = "bfloat16"
