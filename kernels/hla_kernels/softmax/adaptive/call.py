"""Checks of a call of adaptive multipole attention; invalid arguments raise ValueError."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ...checks import cast_tensors, check_finite, check_grid_tokens, check_name, check_sequences, is_count, is_number
from .layout import Field

SELECTS = ("error", "mass", "mean", "near")
FARS = ("first", "variance", "mean", "none")
LARGEST_TILE = 256


class AdaptiveCall(NamedTuple):
    """A checked call: tensors cast for autocast."""

    q: Tensor
    k: Tensor
    v: Tensor
    field: Field
    select: str
    density: float
    far: str
    q_scale: float
    mask: Tensor | None

    @property
    def exact(self) -> int:
        """Number of exact key tiles per query tile."""
        return self.field.exact(self.density)


def prepare(
    q: Tensor, k: Tensor, v: Tensor, *, grid: Sequence[int], select: str = "error", density: float = 0.125,
    q_tile: int = 64, k_tile: int = 16, far: str = "first", prefix: int = 0, suffix: int = 0, q_scale: float = 1.0,
    key_padding_mask: Tensor | None = None,
) -> AdaptiveCall:  # fmt: skip
    """Check a call. Autocast casts tokens, except float64."""
    q, k, v = cast_tensors(q, k, v)
    check_name("select", select, SELECTS)
    check_name("far", far, FARS)
    check_adaptive(density, q_tile, k_tile)
    check_finite("q_scale", q_scale)
    check_grid_tokens(q.shape[1], grid, prefix, suffix)
    field = Field(tuple(map(int, grid)), int(prefix), int(suffix), int(q_tile), int(k_tile))
    check_sequences(q, key_padding_mask, None, None)
    return AdaptiveCall(q, k, v, field, select, float(density), far, float(q_scale), key_padding_mask)


def check_adaptive(density: float, q_tile: int, k_tile: int) -> None:
    """Raise ValueError for an invalid density or tile size."""
    if not is_number(density) or not 0 < density <= 1:
        raise ValueError(f"density must be a part of the key tiles, above 0 and at most 1, got {density!r}.")
    for name, x in (("q_tile", q_tile), ("k_tile", k_tile)):
        if not is_count(x, 1) or x > LARGEST_TILE or x & (x - 1):
            raise ValueError(f"{name} must be a power of two from 1 to {LARGEST_TILE} (tokens), got {x!r}.")
