"""The state of the delta family between two segments of tokens, and two segments put together."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class DeltaState(NamedTuple):
    """What the tokens so far leave: matrix S [B, H, D, Dv], and with return_state="mergeable" transition [B, H, D, D],
    the product of their D_t - A_t B_t', later tokens on the left."""

    matrix: Tensor
    transition: Tensor | None = None


def merge_delta(first: DeltaState, second: DeltaState) -> DeltaState:
    """The state behind two segments, each begun from zero: P_2 S_1 + S_2, P_2 P_1. Raises ValueError where a segment
    was not computed with return_state="mergeable"."""
    if first.transition is None or second.transition is None:
        raise ValueError('merge_delta needs states that were made with return_state="mergeable"')
    return DeltaState(second.transition @ first.matrix + second.matrix, second.transition @ first.transition)
