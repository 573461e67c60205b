"""State of the delta family between segments of tokens, and the merge of two segments."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class DeltaState(NamedTuple):
    """State after the tokens so far: matrix S [B, H, D, Dv] and, with return_state="mergeable", transition
    [B, H, D, D], the product of their D_t - A_t B_t', later tokens on the left."""

    matrix: Tensor
    transition: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(x.nbytes for x in self if x is not None)


def merge_delta(first: DeltaState, second: DeltaState) -> DeltaState:
    """Return the state after two segments, each started from zero: P_2 S_1 + S_2, P_2 P_1. Raises ValueError if a
    segment was not computed with return_state="mergeable"."""
    if first.transition is None or second.transition is None:
        raise ValueError('merge_delta needs states that were made with return_state="mergeable"')
    return DeltaState(second.transition @ first.matrix + second.matrix, second.transition @ first.transition)
