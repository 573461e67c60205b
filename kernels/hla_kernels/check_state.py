"""Checks of a state given back to an operator: same operator, same options, matching shapes, finite numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .options import Options, needs_ones
from .state import State, merge_obstacle, missing_summaries

# rows and columns of the tensors whose shape must fit the tokens; E is Dv plus the column of ones
SHAPES = {
    "P": ("D", "E"), "F": ("D", "E"), "E": ("D", "E"), "C": ("D", "E"), "G": ("D", "E"),
    "S": ("D", "D"), "R": ("D", "D"), "Qm": ("D", "D"), "sum_q": ("1", "D"), "sum_k": ("1", "D"),
}  # fmt: skip


Shape = tuple[int, int, int, int, int]


def check_state(state: Any, op: str, options: Options, gamma: Tensor | None, shape: Shape) -> State:
    """The unpacked state; ValueError unless it continues `op` with `options`. shape = (B, Hk, G, D, Dv)."""
    if not isinstance(state, State):
        raise ValueError(f"state must be a State returned by {op} with return_state, got {type(state).__name__}.")
    if state.op != op:
        raise ValueError(f"The state belongs to {state.op}, it cannot continue {op}.")
    for name, theirs, ours in zip(Options._fields, state.options, options, strict=True):
        if theirs != ours:
            raise ValueError(f"The state was made with {name}={theirs!r}, it cannot continue with {name}={ours!r}.")
    state = state.unpack()
    _check_state_shapes(state, options, shape)
    check_finite(state)
    # comparing values would wait for a device and is impossible in a graph
    if gamma is None or torch.compiler.is_compiling() or gamma.device.type != "cpu":
        return state
    if not torch.equal(state.tensors["gamma"].to(gamma.dtype), gamma):
        raise ValueError("The state was made with another decay tensor, it cannot continue this call.")
    return state


def check_mergeable(op: str, options: Options, state: State | None) -> None:
    """Raise ValueError when return_state="mergeable" cannot be kept."""
    obstacle = merge_obstacle(op, options)
    if obstacle is not None:
        raise ValueError(obstacle)
    if state is not None and missing_summaries(state):
        raise ValueError(
            f"The state lacks the summaries {', '.join(missing_summaries(state))}, so what continues it cannot be "
            'mergeable: make it with return_state="mergeable" too.'
        )


def _check_state_shapes(state: State, options: Options, shape: Shape) -> None:
    batch, n_key_heads, group, d, dv = shape
    sizes = {"D": d, "E": dv + (options.causal and needs_ones(options)), "1": 1}
    for name, x in state.tensors.items():
        if name not in SHAPES:
            continue
        rows, columns = SHAPES[name]
        want = (batch, n_key_heads, group if x.shape[2] != 1 else 1, sizes[rows], sizes[columns])
        if tuple(x.shape) != want:
            raise ValueError(f"The state's {name} has shape {tuple(x.shape)}, these tokens need {want}.")


def check_finite(state: State) -> None:
    """Raise ValueError on NaN or Inf in a state; skipped while compiling, exporting or capturing a graph."""
    if torch.compiler.is_compiling():
        return
    if state.n.is_meta or (state.n.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    for name, x in state.tensors.items():
        if not bool(torch.isfinite(x).all()):
            raise ValueError(f"The state's {name} holds NaN or Inf: earlier tokens overflowed or were not finite.")
