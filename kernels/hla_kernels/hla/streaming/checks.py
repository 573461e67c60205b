"""Checks of states; invalid states raise ValueError."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ...options import Options
from .contents import Sizes, contents
from .state import State, merge_obstacle, missing_summaries, summaries_of


def check_state(
    state: Any, op: str, options: Options, gamma: Tensor | None, sizes: Sizes, device: torch.device
) -> State:
    """Return the unpacked state. Raises ValueError unless `op` with these options and sizes returns such a state."""
    if not isinstance(state, State):
        raise ValueError(f"state must be a State returned by {op} with return_state, got {type(state).__name__}.")
    if state.op != op:
        raise ValueError(f"The state belongs to {state.op}, it cannot continue {op}.")
    for name, theirs, ours in zip(Options._fields, state.options, options, strict=True):
        if theirs != ours:
            raise ValueError(f"The state was made with {name}={theirs!r}, it cannot continue with {name}={ours!r}.")
    check_names(state)
    state = state.unpack()
    check_contents(state, sizes, device)
    # comparing values would synchronize with the device, and is impossible while compiling
    if gamma is None or torch.compiler.is_compiling() or gamma.device.type != "cpu":
        return state
    if not torch.equal(state.tensors["gamma"].to(gamma.dtype), gamma):
        raise ValueError("The state was made with another decay tensor, it cannot continue this call.")
    return state


def check_mergeable(op: str, options: Options, state: State | None) -> None:
    """Raise ValueError if the state of this call cannot be mergeable."""
    obstacle = merge_obstacle(op, options)
    if obstacle is not None:
        raise ValueError(obstacle)
    if state is not None and missing_summaries(state):
        raise ValueError(
            f"The state lacks the summaries {', '.join(missing_summaries(state))}, so what continues it cannot be "
            'mergeable: make it with return_state="mergeable" too.'
        )


def check_names(state: State) -> None:
    """Raise ValueError unless the state holds exactly the tensors of its operator and options, and either all
    summaries of `merge` or none."""
    check_held(state.op, state.n, state.tensors, _contents(state, Sizes(1, 1, 1, 1, 1)))


def check_held(op: str, n: Any, tensors: dict[str, Tensor], want: Iterable[str]) -> None:
    """Raise ValueError unless n is a 0-d integer tensor and the tensors have exactly these names."""
    if set(tensors) != set(want):
        raise ValueError(
            f"A state of {op} with these options holds the tensors {', '.join(sorted(want))}, "
            f"got {', '.join(sorted(tensors)) or 'none'}."
        )
    if not all(isinstance(x, Tensor) for x in (n, *tensors.values())):
        raise ValueError("The state's n and tensors must be tensors.")
    if n.dim() != 0 or n.dtype.is_floating_point:
        raise ValueError(f"The state's n must be a 0-d integer tensor, got {n.dtype} {tuple(n.shape)}.")


def check_contents(state: State, sizes: Sizes, device: torch.device) -> None:
    """Raise ValueError unless every tensor of an unpacked state has the shape for these sizes, and the device, and is
    finite."""
    check_values(state.n, state.tensors, _contents(state, sizes), device)


def _contents(state: State, sizes: Sizes) -> dict[str, tuple[int, ...]]:
    some = any(name in state.tensors for name in summaries_of(state.op, state.options))
    return contents(state.op, state.options, sizes, some)


def check_values(
    n: Tensor, tensors: dict[str, Tensor], want: dict[str, tuple[int, ...]], device: torch.device
) -> None:
    """Raise ValueError unless every tensor of a state has the expected shape, is on the device of the tokens, and is
    finite."""
    for name, shape in want.items():
        if tuple(tensors[name].shape) != shape:
            raise ValueError(f"The state's {name} has shape {tuple(tensors[name].shape)}, these tokens need {shape}.")
    for name, x in (("n", n), *tensors.items()):
        if x.device != device:
            raise ValueError(f"The state's {name} is on {x.device}, the tokens are on {device}.")
    check_finite(tensors)


def check_finite(tensors: dict[str, Tensor]) -> None:
    """Raise ValueError on NaN or Inf in a state; skipped while compiling, exporting or capturing a graph. All tensors
    share one flag, so that the host synchronizes with the device once."""
    first = next(iter(tensors.values()))
    if torch.compiler.is_compiling() or first.is_meta:
        return
    if first.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    flags = torch.stack([torch.isfinite(x).all() for x in tensors.values()])
    if bool(flags.all()):
        return
    name = list(tensors)[flags.tolist().index(False)]
    raise ValueError(f"The state's {name} holds NaN or Inf: earlier tokens overflowed or were not finite.")
