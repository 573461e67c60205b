"""Two-sided calls with a state, and the read-out of queries from a state. Plain autograd on `hla.moments`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...checks import check_coefficients
from ...features import feature, feature_width
from ...options import Options, compute_dtype
from ...sequences import to_heads, to_tokens
from ..moments import MOMENTS, operator_matrix, read_out, token_sums
from .checks import check_contents, check_names
from .contents import Sizes
from .state import State


def stream(
    op: str, q: Tensor, k: Tensor, v: Tensor, coefficients: Tensor | None, options: Options, state: State | None
) -> tuple[Tensor, State]:
    """Return (o, state): the tokens are added to the sums of the state, then their queries attend to all tokens so
    far."""
    n_key_heads, dtype = k.shape[2], compute_dtype(q.dtype)
    qh, kh, vh = (to_heads(x, n_key_heads, dtype) for x in (q, k, v))
    qh, kh = feature(qh, options.feature_map), feature(kh, options.feature_map)
    sums = token_sums(op, qh, kh, vh, options)
    n = torch.full((), q.shape[1], dtype=torch.int64, device=q.device)
    if state is not None:
        sums = {name: x + state.tensors[name].to(dtype) for name, x in sums.items()}
        n = n + state.n
    new = State(op, options, n, sums)
    return to_tokens(_read(qh, new, coefficients), q.dtype), new


def read(q: Tensor, state: State, coefficients: Tensor | None = None) -> Tensor:
    """Return o = q M for queries of a two-sided state, without adding tokens. q [B, M, H, D] -> [B, M, H, Dv] in the
    dtype of q.

    The options (feature map, denominator, centring, mean path, ridge, scale) are stored in the state; `polynomial`
    needs its coefficients [H, 4]. Raises ValueError for a causal state, whose inner stages need the key and value of
    the query's token.
    """
    if not isinstance(state, State):
        raise ValueError(f"state must be a State returned with return_state, got {type(state).__name__}.")
    if state.options.causal:
        raise ValueError("read needs a two-sided state; a causal state is continued with state=.")
    check_names(state)
    state = state.unpack()
    _check_read(q, state)
    check_coefficients(state.op, coefficients, q.shape[2], q.device)
    n_key_heads = state.tensors[MOMENTS[state.op][0]].shape[1]
    qh = feature(to_heads(q, n_key_heads, compute_dtype(q.dtype)), state.options.feature_map)
    return to_tokens(_read(qh, state, coefficients), q.dtype)


def _check_read(q: Any, state: State) -> None:
    """Raise ValueError unless q [B, M, H, D] fits the sizes of the state, and the state's tensors fit each other."""
    # P and C have Dv in their shape; R, C and Qm have the group size
    last, first = (state.tensors[MOMENTS[state.op][i]] for i in (-1, 0))
    wide = state.tensors.get("P", last)
    group = max(x.shape[2] if x.dim() == 5 else 1 for x in state.tensors.values())
    if first.dim() != 5 or wide.dim() != 5:
        raise ValueError(f"The state's tensors must have rank 5, got {tuple(first.shape)} and {tuple(wide.shape)}.")
    batch, n_key_heads, _, width, _ = first.shape
    d = width // feature_width(1, state.options.feature_map)
    if not isinstance(q, Tensor) or q.dim() != 4 or q.shape[0] != batch or q.shape[3] != d:
        got = tuple(q.shape) if isinstance(q, Tensor) else type(q).__name__
        raise ValueError(f"q must have shape [{batch}, M, heads, {d}] for this state, got {got}.")
    if q.shape[2] == 0 or q.shape[2] % n_key_heads != 0 or group not in (1, q.shape[2] // n_key_heads):
        raise ValueError(f"q must have {n_key_heads * group} heads for this state, got {q.shape[2]}.")
    if not q.dtype.is_floating_point:
        raise ValueError(f"q must be floating point, got {q.dtype}.")
    check_contents(state, Sizes(batch, n_key_heads, q.shape[2] // n_key_heads, width, wide.shape[4]), q.device)


def _read(q: Tensor, state: State, coefficients: Tensor | None) -> Tensor:
    sums = {name: x.to(q.dtype) for name, x in state.tensors.items()}
    n = state.n.to(q.dtype)
    matrix = operator_matrix(state.op, sums, n, state.options, coefficients)
    return read_out(q, matrix, sums, n, state.options)
