"""Calls of `delta`: their checks, which raise ValueError, and the state between segments of tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checks import check_frames, check_tensors, shape_of
from ..options import cast, compute_dtype

MAX_RANK = 3


class DeltaState(NamedTuple):
    """State after the tokens so far: matrix S [B, H, D, Dv] and, with return_state="mergeable", transition
    [B, H, D, D], the product of their D_t - A_t B_t', later tokens on the left."""

    matrix: Tensor
    transition: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(x.nbytes for x in self if x is not None)


class DeltaCall(NamedTuple):
    """A checked call: q [B, N, H, D], k [B, N, H, s, D], v [B, N, H, s, Dv], log_f [B, N, H, 1 or D], a, b
    [B, N, H, r, D], state [B, H, D, Dv], tokens per frame or 0."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_f: Tensor
    a: Tensor
    b: Tensor
    state: Tensor
    frame: int = 0

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All fields but the frame."""
        return self[:-1]


def prepare(
    q: Tensor, k: Tensor, v: Tensor, *, log_f: Tensor | None = None, a: Tensor | None = None, b: Tensor | None = None,
    frame: int = 0, state: DeltaState | None = None, return_state: bool | str = False,
) -> DeltaCall:  # fmt: skip
    """Check a call and expand every tensor to its full rank. Autocast casts tokens, except float64."""
    if return_state not in (False, True, "mergeable"):
        raise ValueError(f"return_state must be False, True or 'mergeable', got {return_state!r}.")
    if state is not None and not isinstance(state, DeltaState):
        raise ValueError(f"state must be a DeltaState returned by delta with return_state, got {type(state).__name__}.")
    k, v = (x.unsqueeze(3) if isinstance(x, Tensor) and x.dim() == 4 else x for x in (k, v))
    for name, x in (("k", k), ("v", v)):
        if isinstance(x, Tensor) and (x.dim() != 5 or not 1 <= x.shape[3] <= MAX_RANK):
            raise ValueError(
                f"{name} must be [batch, tokens, heads, head dim] or [batch, tokens, heads, rank, head dim] with a "
                f"rank of 1 to {MAX_RANK}, got shape {tuple(x.shape)}."
            )
    first_k, first_v = (x[:, :, :, 0] if isinstance(x, Tensor) else x for x in (k, v))
    check_tensors(q, first_k, first_v)
    if k.shape[2] != q.shape[2] or k.shape[3] != v.shape[3]:
        raise ValueError(
            f"q, k and v must have the same heads and k and v the same rank, got {q.shape[2]} heads of q, "
            f"{tuple(k.shape[2:4])} of k and {tuple(v.shape[2:4])} of v."
        )
    q, k, v = cast(q, k, v)
    check_frames(frame, q.shape[1])
    a, b = _low_rank(q, a, b)
    return DeltaCall(q, k, v, _decays(q, log_f), a, b, _state(q, v, None if state is None else state.matrix), frame)


def _low_rank(q: Tensor, a: Any, b: Any) -> tuple[Tensor, Tensor]:
    if a is None and b is None:
        none = q.new_zeros((*q.shape[:3], 0, q.shape[3]))
        return none, none
    for name, x in (("a", a), ("b", b)):
        good = isinstance(x, Tensor) and x.dim() == 5 and (*x.shape[:3], x.shape[4]) == tuple(q.shape)
        if not good or not 0 <= x.shape[3] <= MAX_RANK or x.device != q.device:
            wanted = [*q.shape[:3], f"0 to {MAX_RANK}", q.shape[3]]
            raise ValueError(f"{name} must be a tensor {wanted} on the device of q, got {shape_of(x)}.")
    if a.shape[3] != b.shape[3]:
        raise ValueError(f"a and b must have one rank, got {a.shape[3]} and {b.shape[3]}.")
    return a, b


def _decays(q: Tensor, log_f: Any) -> Tensor:
    dtype = compute_dtype(q.dtype)
    if log_f is None:
        return q.new_zeros((), dtype=dtype).expand(*q.shape[:3], 1)
    shapes = {1: q.shape[2:3], 3: q.shape[:3], 4: q.shape}  # by rank; comparing only the sizes needed avoids guards
    wanted = shapes.get(log_f.dim()) if isinstance(log_f, Tensor) else None
    if wanted is None or log_f.shape != wanted or log_f.device != q.device:
        names = ("[H]", "[B, N, H]", "[B, N, H, D]")
        allowed = ", ".join(f"{name} = {list(shape)}" for name, shape in zip(names, shapes.values(), strict=True))
        raise ValueError(f"log_f must be a tensor {allowed} on the device of q, got {shape_of(log_f)}.")
    if log_f.device.type == "cpu" and not torch.compiler.is_compiling() and not bool((log_f <= 0).all()):
        raise ValueError("log_f must be at most 0 everywhere: decays are in [0, 1].")
    full = log_f.to(dtype)
    return full if full.dim() == 4 else full.unsqueeze(-1).expand(*q.shape[:3], 1)


def _state(q: Tensor, v: Tensor, state: Any) -> Tensor:
    shape = (q.shape[0], q.shape[2], q.shape[3], v.shape[4])
    if state is None:
        return q.new_zeros(shape, dtype=compute_dtype(q.dtype))
    if not isinstance(state, Tensor) or tuple(state.shape) != shape or state.device != q.device:
        raise ValueError(f"The state of this call is a matrix {list(shape)} on the device of q, got {shape_of(state)}.")
    return state


def merge_delta(first: DeltaState, second: DeltaState) -> DeltaState:
    """Return the state after two segments, each started from zero: P_2 S_1 + S_2, P_2 P_1. Raises ValueError if a
    segment was not computed with return_state="mergeable"."""
    if first.transition is None or second.transition is None:
        raise ValueError('merge_delta needs states that were made with return_state="mergeable"')
    return DeltaState(second.transition @ first.matrix + second.matrix, second.transition @ first.transition)
