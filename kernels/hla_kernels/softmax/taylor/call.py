"""Checks of a call of second-order Taylor attention; invalid arguments raise ValueError."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ...checks import cast_tensors, check_finite, check_parameter, check_sequences


class TaylorCall(NamedTuple):
    """A checked call: tensors cast for autocast."""

    q: Tensor
    k: Tensor
    v: Tensor
    coefficients: Tensor
    q2: Tensor | None
    k2: Tensor | None
    mask: Tensor | None
    normalize: bool
    q_scale: float


def prepare(
    q: Tensor, k: Tensor, v: Tensor, coefficients: Tensor, *, narrow: Sequence[Tensor] | None = None,
    normalize: bool = True, q_scale: float = 1.0, key_padding_mask: Tensor | None = None,
) -> TaylorCall:  # fmt: skip
    """Check a call. Autocast casts tokens, except float64."""
    given = cast_tensors(q, k, v)
    heads = q.shape[2]
    check_parameter("coefficients", coefficients, q.device, ((heads, 2),), f"[heads, 2] = [{heads}, 2]")
    q2, k2 = (None, None) if narrow is None else _cast_narrow(narrow, q, k, v)
    q, k, v = given
    if not isinstance(normalize, bool):
        raise ValueError(f"normalize must be True or False, got {normalize!r}.")
    check_finite("q_scale", q_scale)
    check_sequences(q, key_padding_mask, None, None)
    return TaylorCall(q, k, v, coefficients, q2, k2, key_padding_mask, normalize, float(q_scale))


def _cast_narrow(narrow: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    if not isinstance(narrow, Sequence) or len(narrow) != 2 or not all(isinstance(t, Tensor) for t in narrow):
        raise ValueError("narrow must be two tensors, the queries and keys of the degree-2 term.")
    q2, k2 = narrow
    given = cast_tensors(q2, k2, v)
    if q2.shape[:3] != q.shape[:3] or k2.shape[:3] != k.shape[:3]:
        raise ValueError(
            "narrow must have the batch, tokens and heads of q and k, "
            f"got {tuple(q2.shape)} and {tuple(k2.shape)} for {tuple(q.shape)} and {tuple(k.shape)}."
        )
    return given[:2]
