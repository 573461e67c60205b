"""Checks of what a user passes (tensors, options, states): every refusal is a ValueError of one sentence saying what
was wrong and what is allowed."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from .features import FEATURE_MAPS
from .options import CENTERS, DECAY_RULES, IMPLS, MAX_HEAD_DIM, OPS, Options, needs_ones
from .state import State, merge_obstacle, missing_summaries

NON_NEGATIVE_MAPS = tuple(name for name in FEATURE_MAPS if name != "identity")
RIDGED = ("hla2", "ahla", "hla3")

# rows and columns of the tensors whose shape must fit the tokens; E is Dv plus the column of ones
SHAPES = {
    "P": ("D", "E"), "F": ("D", "E"), "E": ("D", "E"), "C": ("D", "E"), "G": ("D", "E"),
    "S": ("D", "D"), "R": ("D", "D"), "Qm": ("D", "D"), "sum_q": ("1", "D"), "sum_k": ("1", "D"),
}  # fmt: skip

Shape = tuple[int, int, int, int, int]  # B, Hk, G, D, Dv


def check_name(kind: str, name: Any, allowed: Sequence[str]) -> None:
    """Raise ValueError unless `name` is one of `allowed`, naming the nearest one."""
    if name in allowed:
        return
    near = difflib.get_close_matches(str(name), allowed, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(f"Unknown {kind} {name!r}: {hint}allowed are {', '.join(map(repr, allowed))}.")


def check_op(op: Any) -> None:
    """Raise ValueError unless `op` is the name of an operator."""
    check_name("operator", op, OPS)


def check_tensors(q: Any, k: Any, v: Any, autocast: bool) -> None:
    """q [B, N, H, D], k [B, N, Hk, D], v [B, N, Hk, Dv]: floating point, same dtype (unless autocast), 1 <= D, Dv <=
    MAX_HEAD_DIM."""
    named = (("q", q), ("k", k), ("v", v))
    for name, x in named:
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} must be a tensor, got {type(x).__name__}.")
        if x.dim() != 4:
            raise ValueError(f"{name} must have rank 4 [batch, tokens, heads, head dim], got shape {tuple(x.shape)}.")
        if not x.dtype.is_floating_point or x.dtype.itemsize < 2:
            raise ValueError(f"{name} must be float16, bfloat16, float32 or float64, got {x.dtype}.")
        if x.device != q.device:
            raise ValueError(f"q, k and v must be on one device, got q on {q.device} and {name} on {x.device}.")
        if x.dtype != q.dtype and not autocast:
            raise ValueError(f"q, k and v must have one dtype outside autocast, got q {q.dtype} and {name} {x.dtype}.")
        if not 1 <= x.shape[3] <= MAX_HEAD_DIM:
            raise ValueError(f"The head dimension of {name} must be between 1 and {MAX_HEAD_DIM}, got {x.shape[3]}.")
    _check_shapes(q, k, v)


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("k", k), ("v", v)):
        if x.shape[0] != q.shape[0]:
            raise ValueError(f"q and {name} must have one batch size, got {q.shape[0]} and {x.shape[0]}.")
        if x.shape[1] != q.shape[1]:
            raise ValueError(f"q and {name} must have the same number of tokens, got {q.shape[1]} and {x.shape[1]}.")
    if q.shape[1] == 0:
        raise ValueError("q, k and v must have at least one token, got N = 0.")
    if k.shape[2] != v.shape[2]:
        raise ValueError(f"k and v must have the same number of heads, got {k.shape[2]} and {v.shape[2]}.")
    if k.shape[2] == 0 or q.shape[2] % k.shape[2] != 0 or q.shape[2] == 0:
        raise ValueError(f"Key heads must divide query heads, got {k.shape[2]} key and {q.shape[2]} query heads.")
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"q and k must have the same head dimension, got {q.shape[3]} and {k.shape[3]}.")


def check_packed(qkv: Any) -> None:
    """qkv [B, N, 3, H, D]."""
    if not isinstance(qkv, Tensor) or qkv.dim() != 5 or qkv.shape[2] != 3:
        got = tuple(qkv.shape) if isinstance(qkv, Tensor) else type(qkv).__name__
        raise ValueError(f"qkv must have shape [batch, tokens, 3, heads, head dim], got {got}.")


def check_options(op: str, options: Options, impl: str, return_state: Any) -> None:
    """Names, numbers and combinations of options that `op` does not define."""
    if options.feature_map is not None:
        check_name("feature_map", options.feature_map, FEATURE_MAPS)
    if options.center is not None:
        check_name("center", options.center, CENTERS)
    check_name("decay_rule", options.decay_rule, DECAY_RULES)
    check_name("impl", impl, IMPLS)
    if return_state not in (False, True, "mergeable"):
        raise ValueError(f'return_state must be False, True or "mergeable", got {return_state!r}.')
    if not isinstance(options.ridge, Real) or not 0 <= options.ridge < math.inf:
        raise ValueError(f"ridge must be a finite number >= 0, got {options.ridge!r}.")
    if not isinstance(options.eps, Real) or not 0 <= options.eps < math.inf:
        raise ValueError(f"eps must be a finite number >= 0, got {options.eps!r}.")
    if options.scale is not None and (not isinstance(options.scale, Real) or not math.isfinite(options.scale)):
        raise ValueError(f"scale must be None or a finite number, got {options.scale!r}.")
    if op == "softmax_attention":
        _check_softmax(options, return_state)
    else:
        _check_linear(op, options)


def _check_softmax(options: Options, return_state: Any) -> None:
    allowed = Options(causal=options.causal, scale=options.scale)
    for name, value, default in zip(Options._fields, options, allowed, strict=True):
        if value != default:
            raise ValueError(f"softmax_attention takes causal and scale only, got {name}={value!r}.")
    if return_state:
        raise ValueError("softmax_attention has no state: return_state must be False.")


def _check_linear(op: str, options: Options) -> None:
    if options.causal and op == "polynomial":
        raise ValueError("polynomial is two-sided only, causal must be False.")
    if options.ridge and op not in RIDGED:
        raise ValueError(f"ridge is defined for {', '.join(RIDGED)} only, not for {op}.")
    if options.decay is not None and not options.causal:
        raise ValueError("decay needs causal=True: two-sided moments have no order of tokens.")
    if isinstance(options.decay, float) and not 0 < options.decay <= 1:
        raise ValueError(f"decay must be in (0, 1], got {options.decay}.")
    if op == "hla2" and options.causal and options.decay_rule == "paper":
        if options.center is not None:
            raise ValueError('decay_rule="paper" has no centred form; use decay_rule="cascade" with center.')
        if options.normalize and options.decay not in (None, 1.0):
            raise ValueError('normalize with decay_rule="paper" divides by a signed sum; use decay_rule="cascade".')
    if options.normalize:
        _check_normalize(options)


def _check_normalize(options: Options) -> None:
    if options.feature_map is None:
        raise ValueError(
            "normalize=True with signed q and k divides by a signed sum; choose a non-negative feature_map "
            f'({", ".join(NON_NEGATIVE_MAPS)}), or feature_map="identity" if q and k are non-negative already.'
        )
    if options.center is not None:
        raise ValueError("normalize=True with center divides by zero or a signed sum; use one of them.")
    if options.mean_path:
        raise ValueError("normalize=True with mean_path: normalised weights sum to one already; use one of them.")
    if options.scale is not None and options.scale <= 0:
        raise ValueError(f"normalize=True needs scale > 0, got {options.scale}.")


def check_decay_tensor(decay: Tensor, n_heads: int, n_key_heads: int) -> None:
    """decay [H] or [Hk], each in (0, 1]. Values are looked at on the CPU only, where that does not wait for a
    device."""
    if decay.dim() != 1 or decay.shape[0] not in (n_heads, n_key_heads):
        raise ValueError(
            f"decay must be a float or have shape [{n_heads}] or [{n_key_heads}], got shape {tuple(decay.shape)}."
        )
    if not decay.dtype.is_floating_point:
        raise ValueError(f"decay must be floating point, got {decay.dtype}.")
    if torch.compiler.is_compiling() or decay.device.type != "cpu":
        return
    if not bool(((decay > 0) & (decay <= 1)).all()):
        raise ValueError(f"decay must be in (0, 1] for every head, got {decay.tolist()}.")


def check_coefficients(coefficients: Any, n_heads: int) -> None:
    """coefficients [H, 4], floating point."""
    if not isinstance(coefficients, Tensor) or tuple(coefficients.shape) != (n_heads, 4):
        got = tuple(coefficients.shape) if isinstance(coefficients, Tensor) else type(coefficients).__name__
        raise ValueError(f"coefficients must be a tensor of shape [heads, 4] = [{n_heads}, 4], got {got}.")
    if not coefficients.dtype.is_floating_point:
        raise ValueError(f"coefficients must be floating point, got {coefficients.dtype}.")


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
