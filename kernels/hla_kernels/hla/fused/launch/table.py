"""Table of the forward and backward functions for each path of `plan.paths.path`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from . import (
    first_backward_call,
    head_backward_call,
    head_forward_call,
    split_backward_call,
    split_forward_call,
)
from .call import Call, Outs
from .summed import summed_backward_call, summed_forward_call


class Path(NamedTuple):
    """Functions of a path. forward(call, o, saved) writes o and fills `saved` unless it is empty. backward(call, g,
    outs, saved) writes dq, dk, dv (per query head) and returns parts [B, H, ., 4] of d coefficients if learned."""

    forward: Callable[[Call, Tensor, Tensor], None]
    backward: Callable[[Call, Tensor, Outs, Tensor], Tensor | None]


PATHS = {
    "heads": Path(head_forward_call, head_backward_call),
    "first": Path(head_forward_call, first_backward_call),
    "summed": Path(summed_forward_call, summed_backward_call),
    "split": Path(split_forward_call, split_backward_call),
    "first_split": Path(split_forward_call, first_backward_call),
}
