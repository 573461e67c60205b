"""Checks of a call of multipole attention; invalid arguments raise ValueError."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ...blockmix.call import check_layout
from ...checks import cast_tensors, check_finite, check_sequences, is_count
from .layout import Field

DEGREES = (0, 1, 2)


class MultipoleCall(NamedTuple):
    """A checked call: tensors cast for autocast."""

    q: Tensor
    k: Tensor
    v: Tensor
    field: Field
    degree: int
    q_scale: float
    mask: Tensor | None


def prepare(
    q: Tensor, k: Tensor, v: Tensor, *, grid: Sequence[int], blocks: Sequence[int], radius: int = 2, degree: int = 1,
    prefix: int = 0, suffix: int = 0, q_scale: float = 1.0, key_padding_mask: Tensor | None = None,
) -> MultipoleCall:  # fmt: skip
    """Check a call. Autocast casts tokens, except float64."""
    q, k, v = cast_tensors(q, k, v)
    layout = check_layout(grid, blocks, 0)
    for name, x in (("prefix", prefix), ("suffix", suffix), ("radius", radius)):
        if not is_count(x):
            raise ValueError(f"{name} must be a number of tokens of at least 0, got {x!r}.")
    if degree not in DEGREES or isinstance(degree, bool):
        raise ValueError(f"degree must be 0, 1 or 2, got {degree!r}.")
    check_finite("q_scale", q_scale)
    field = Field(layout, prefix, suffix, min(radius, max(layout.grid)))  # with this radius all tokens are near
    if q.shape[1] != field.n_grid + field.n_outer:
        raise ValueError(
            f"The grid {layout.grid} with {prefix} prefix and {suffix} suffix tokens needs "
            f"{field.n_grid + field.n_outer} tokens, got {q.shape[1]}."
        )
    check_sequences(q, key_padding_mask, None, None)
    return MultipoleCall(q, k, v, field, degree, float(q_scale), key_padding_mask)
