"""Checks of tensors and options; errors are ValueErrors with the allowed values.

States are checked in `hla.streaming.checks`.
"""

from __future__ import annotations

import difflib
import inspect
import math
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from .features import FEATURE_MAPS, feature_width
from .options import CENTERS, DECAY_RULES, MAX_HEAD_DIM, Options, autocast_dtype, cast

NON_NEGATIVE_MAPS = tuple(name for name in FEATURE_MAPS if name != "identity")
RIDGED = ("hla2", "ahla", "hla3")
LARGEST = sys.float_info.max
MAX_SEQLEN = 2**24  # tokens; the kernels count them in float32
ORDER = {"linear_attention": 1, "hla3": 3, "polynomial": 1}  # order of an operator, 2 if not listed
LARGE_EPS = 0.1  # fraction of the denominator above which eps causes a warning


def check_name(kind: str, name: Any, allowed: Sequence[str]) -> None:
    """Raise ValueError unless `name` is one of `allowed`; the message suggests the nearest one."""
    if isinstance(name, str) and name in allowed:
        return
    got = repr(name) if isinstance(name, str | int | None) else f"of type {type(name).__name__}"
    near = []
    if isinstance(name, str):
        longer = sorted((n for n in allowed if name and n.startswith(name)), key=len)
        near = longer[:1] or difflib.get_close_matches(name, allowed, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(f"Unknown {kind} {got}: {hint}allowed are {', '.join(map(repr, allowed))}.")


def check_arguments(op: str, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Raise ValueError unless these inputs and options match the signature of the public function `op`."""
    import hla_kernels

    function = getattr(hla_kernels, op)
    check_unknown(function, options)
    try:
        inspect.signature(function).bind(*inputs, **options)
    except TypeError as error:
        raise ValueError(f"{op} cannot be called so: {error}.") from error


def is_number(x: Any) -> bool:
    """Whether x is a real number; True and False are not."""
    return isinstance(x, Real) and not isinstance(x, bool)


def is_finite(x: Any) -> bool:
    """Whether x is a real number in the range of float."""
    return is_number(x) and abs(x) <= LARGEST


def is_count(x: Any, least: int = 0) -> bool:
    """Whether x is an integer, which may be symbolic while compiling, of at least `least`; True and False are not."""
    return isinstance(x, int | torch.SymInt) and not isinstance(x, bool) and bool(x >= least)


def check_axes(name: str, x: Any) -> None:
    """Raise ValueError unless x is a sequence of one positive integer for each axis of a grid."""
    if not isinstance(x, Sequence) or not x or not all(is_count(n, 1) for n in x):
        raise ValueError(f"{name} must be one positive integer for each axis, such as (16, 16), got {x!r}.")


def check_grid_tokens(n: int, grid: Any, prefix: Any, suffix: Any) -> None:
    """Raise ValueError unless n is the number of tokens on the grid, before it (`prefix`) and after it (`suffix`)."""
    check_axes("grid", grid)
    for name, x in (("prefix", prefix), ("suffix", suffix)):
        if not is_count(x):
            raise ValueError(f"{name} must be a number of tokens of at least 0, got {x!r}.")
    want = prefix + math.prod(grid) + suffix
    if n != want:
        raise ValueError(
            f"The grid {tuple(grid)} with {prefix} prefix and {suffix} suffix tokens needs {want} tokens, got {n}."
        )


def shape_of(x: Any) -> tuple[int, ...] | str:
    """Return the shape of a tensor, or the type of something else, for an error message."""
    return tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__


def check_unknown(function: Callable, options: Mapping[str, Any]) -> None:
    """Raise ValueError for options that are no parameters of a public function."""
    if not options:
        return
    code = function.__code__  # inspect.signature takes longer than the kernels of a small layer
    named = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    known = [name for name in named if name not in ("q", "k", "v", "qkv")]
    for name in options:
        check_name("option", name, known)


def check_tensors(q: Any, k: Any, v: Any) -> None:
    """Raise ValueError unless q [B, N, H, D], k [B, N, Hk, D] and v [B, N, Hk, Dv] are floating point, of one dtype
    (unless autocast is on) and device, with 1 <= D, Dv <= MAX_HEAD_DIM."""
    autocast = autocast_dtype(q) is not None
    named = (("q", q), ("k", k), ("v", v))
    for name, x in named:
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} must be a tensor, got {type(x).__name__}.")
        if x.is_nested or x.layout != torch.strided:
            raise ValueError(f"{name} must be a dense tensor; pack sequences and say where they are by cu_seqlens.")
        if x.dim() != 4:
            raise ValueError(f"{name} must have rank 4 [batch, tokens, heads, head dim], got shape {tuple(x.shape)}.")
        _check_dtype(name, x)
        if x.device != q.device:
            raise ValueError(f"q, k and v must be on one device, got q on {q.device} and {name} on {x.device}.")
        if x.dtype != q.dtype and not autocast:
            raise ValueError(f"q, k and v must have one dtype outside autocast, got q {q.dtype} and {name} {x.dtype}.")
        if not 1 <= x.shape[3] <= MAX_HEAD_DIM:
            raise ValueError(f"The head dimension of {name} must be between 1 and {MAX_HEAD_DIM}, got {x.shape[3]}.")
    _check_shapes(q, k, v)


def cast_tensors(q: Any, k: Any, v: Any) -> tuple[Tensor, ...]:
    """Run `check_tensors`; return the tensors, cast for autocast."""
    check_tensors(q, k, v)
    return cast(q, k, v)


def _check_dtype(name: str, x: Tensor) -> None:
    if not x.dtype.is_floating_point or x.dtype.itemsize < 2:
        raise ValueError(f"{name} must be floating point (float16, bfloat16, float32 or float64), got {x.dtype}.")


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


def check_features(d: int, feature_map: str | None) -> None:
    """Raise ValueError if d channels per head give more than MAX_HEAD_DIM features."""
    if feature_width(d, feature_map) > MAX_HEAD_DIM:
        raise ValueError(
            f"feature_map={feature_map!r} makes {feature_width(d, feature_map)} features of a head dimension of {d}, "
            f"at most {MAX_HEAD_DIM} are allowed."
        )


def unpacked(tokens: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k, v of (q, k, v) or (qkv,). Raises ValueError unless qkv has the shape [B, N, 3, H, D]."""
    if len(tokens) == 3:
        return tokens[0], tokens[1], tokens[2]
    qkv = tokens[0]
    if not isinstance(qkv, Tensor) or qkv.dim() != 5 or qkv.shape[2] != 3:
        raise ValueError(f"qkv must have shape [batch, tokens, 3, heads, head dim], got {shape_of(qkv)}.")
    q, k, v = qkv.unbind(2)
    return q, k, v


def check_sequences(q: Tensor, mask: Any, cu_seqlens: Any, max_seqlen: Any) -> None:
    """Raise ValueError unless there is at most one of key_padding_mask [B, N] bool and cu_seqlens [S + 1] int32 (B = 1,
    with max_seqlen). Values are checked for CPU tensors only, to avoid a device synchronization, and not while
    compiling."""
    if mask is not None and cu_seqlens is not None:
        raise ValueError("key_padding_mask and cu_seqlens both say what a sequence is; use one of them.")
    if mask is not None:
        _check_ragged("key_padding_mask", mask, torch.bool, q)
        if tuple(mask.shape) != tuple(q.shape[:2]):
            want = list(q.shape[:2])
            raise ValueError(f"key_padding_mask must have shape [batch, tokens] = {want}, got {tuple(mask.shape)}.")
    if cu_seqlens is None:
        if max_seqlen is not None:
            raise ValueError(f"max_seqlen needs cu_seqlens, got max_seqlen={max_seqlen!r} alone.")
        return
    _check_ragged("cu_seqlens", cu_seqlens, torch.int32, q)
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(f"cu_seqlens must have shape [sequences + 1], got {tuple(cu_seqlens.shape)}.")
    if q.shape[0] != 1:
        raise ValueError(f"cu_seqlens needs tokens packed in a batch of one, got a batch of {q.shape[0]}.")
    if not is_count(max_seqlen, 1):
        raise ValueError(f"max_seqlen must be an int of at least 1, the longest sequence, got {max_seqlen!r}.")
    if max_seqlen > MAX_SEQLEN and max_seqlen > q.shape[1]:
        raise ValueError(f"max_seqlen must be at most {MAX_SEQLEN} or the number of tokens, got {max_seqlen}.")
    if cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling():
        _check_lengths(cu_seqlens, int(max_seqlen), q.shape[1])


def _check_ragged(name: str, x: Any, dtype: torch.dtype, q: Tensor) -> None:
    if not isinstance(x, Tensor) or x.dtype != dtype:
        got = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"{name} must be a tensor of {dtype}, got {got}.")
    if x.device != q.device:
        raise ValueError(f"{name} must be on the device of q, {q.device}, got {x.device}.")


def _check_lengths(cu_seqlens: Tensor, max_seqlen: int, n_tokens: int) -> None:
    lengths = cu_seqlens.diff()
    if int(cu_seqlens[0]) != 0 or int(cu_seqlens[-1]) != n_tokens or int(lengths.min()) < 0:
        raise ValueError(f"cu_seqlens must rise from 0 to the number of tokens, {n_tokens}, got {cu_seqlens.tolist()}.")
    if int(lengths.max()) > max_seqlen:
        raise ValueError(f"max_seqlen must be at least the longest sequence, {int(lengths.max())}, got {max_seqlen}.")


def check_whole_sequences(causal: bool | str, state: bool, masked: bool) -> None:
    """Raise ValueError for calls with a state, causal calls with key_padding_mask, and frames with cu_seqlens."""
    if causal and masked:
        raise ValueError(
            "key_padding_mask needs causal=False: the result of a causal token does not depend on what comes after it, "
            "so pad at the end with finite numbers such as zeros, or pack sequences with cu_seqlens."
        )
    if causal == "frame":
        raise ValueError("cu_seqlens does not go with causal='frame': give one video per row of the batch.")
    if state:
        raise ValueError("key_padding_mask and cu_seqlens do not go with a state, which counts every token.")


def check_options(op: str, options: Options, return_state: Any, n: int) -> None:
    """Raise ValueError for names, numbers and combinations of options that `op` does not define for n tokens."""
    check_values(options, "mean_path")
    if options.center is not None:
        check_name("center", options.center, CENTERS)
    check_name("decay_rule", options.decay_rule, DECAY_RULES)
    if not isinstance(return_state, bool) and return_state != "mergeable":
        raise ValueError(f'return_state must be False, True or "mergeable", got {return_state!r}.')
    check_finite("ridge", options.ridge, 0)
    if op == "softmax_attention":
        _check_softmax(options, return_state)
    else:
        _check_linear(op, options, n)


def check_values(options: Any, *flags: str) -> None:
    """Raise ValueError for wrong values of flags and of the options that all linear operators have."""
    if options.feature_map is not None:
        check_name("feature_map", options.feature_map, FEATURE_MAPS)
    for name in ("causal", "normalize", *flags):
        x = getattr(options, name)
        if not isinstance(x, bool) and (name, x) != ("causal", "frame"):  # strings such as "false" are truthy
            hint = ' (causal may also be "frame")' if name == "causal" else ""
            raise ValueError(f"{name} must be True or False, got {x!r}{hint}.")
    check_finite("eps", options.eps, 0)
    check_finite("q_scale", options.q_scale)
    if options.scale is not None and not is_finite(options.scale):
        raise ValueError(f"scale must be None or a finite number, got {options.scale!r}.")


def check_finite(name: str, x: Any, least: float | None = None) -> None:
    """Raise ValueError unless x is a finite number of at least `least`."""
    if not is_finite(x) or (least is not None and x < least):
        raise ValueError(f"{name} must be a finite number{'' if least is None else f' >= {least}'}, got {x!r}.")


def check_frames(frame: Any, n: int) -> None:
    """Raise ValueError unless n tokens are whole frames of `frame` tokens, if it is not 0."""
    if not is_count(frame):
        raise ValueError(f"frame must be the number of tokens per frame, or 0 for no frames, got {frame!r}.")
    if frame and n % frame:
        raise ValueError(f"{n} tokens are no whole number of frames of {frame} tokens.")


def _check_softmax(options: Options, return_state: Any) -> None:
    if options.causal == "frame":
        raise ValueError('softmax_attention has no causal="frame"; causal must be True or False.')
    allowed = Options(causal=options.causal, scale=options.scale)
    for name, value, default in zip(Options._fields, options, allowed, strict=True):
        if value != default:
            raise ValueError(f"softmax_attention takes causal and scale only, got {name}={value!r}.")
    if return_state:
        raise ValueError("softmax_attention has no state: return_state must be False.")


def _check_linear(op: str, options: Options, n: int) -> None:
    if options.causal and op == "polynomial":
        raise ValueError("polynomial is two-sided only, causal must be False.")
    check_frames(options.frame, n)
    if (options.causal == "frame") != (options.frame > 0):
        raise ValueError(
            f'causal="frame" and frame, the number of tokens per frame, go together: got causal={options.causal!r} and '
            f"frame={options.frame}."
        )
    if options.ridge and op not in RIDGED:
        raise ValueError(f"ridge is defined for {', '.join(RIDGED)} only, not for {op}.")
    if options.decay is not None and not options.causal:
        raise ValueError("decay needs causal=True: two-sided moments have no order of tokens.")
    if op == "hla2" and options.causal and options.decay_rule == "paper":
        if options.frame:
            raise ValueError('decay_rule="paper" is not defined for frames; use decay_rule="cascade".')
        if options.center is not None:
            raise ValueError('decay_rule="paper" has no centred form; use decay_rule="cascade" with center.')
        if options.normalize and options.decay not in (None, 1.0):
            raise ValueError('normalize with decay_rule="paper" divides by a signed sum; use decay_rule="cascade".')
    if not options.normalize:
        return
    check_ratio(options)
    if options.center is not None:
        raise ValueError("normalize=True with center divides by zero or a signed sum; use one of them.")
    if options.mean_path:
        raise ValueError("normalize=True with mean_path: normalised weights sum to one already; use one of them.")


def check_ratio(options: Any) -> None:
    """Raise ValueError unless the features and scales of a linear operator with normalize=True may be positive."""
    if options.feature_map is None:
        raise ValueError(
            "normalize=True with signed q and k divides by a signed sum; choose a non-negative feature_map "
            f'({", ".join(NON_NEGATIVE_MAPS)}), or feature_map="identity" if q and k are non-negative already.'
        )
    if options.scale is not None and options.scale <= 0:
        raise ValueError(f"normalize=True needs scale > 0, got {options.scale}.")
    if options.q_scale <= 0:
        raise ValueError(f"normalize=True needs q_scale > 0, got {options.q_scale}.")


def warn_of_eps(op: str, options: Options, n: int, d: int) -> None:
    """Warn if eps is not small compared with the usual denominator.

    Features of a softmax over D channels are about 1 / D, so a two-sided denominator of order p is about (s N / D)^p. A
    causal denominator grows with the tokens and is not checked.
    """
    if not options.normalize or options.causal or options.feature_map not in ("softmax", "softmax_pair"):
        return
    width = d / feature_width(1, options.feature_map)
    scale = options.q_scale * (1.0 if options.scale is None else options.scale * n)
    usual = (scale / width) ** ORDER.get(op, 2)
    if options.eps > LARGE_EPS * usual and not torch.compiler.is_compiling():
        warnings.warn(
            f"eps={options.eps:.1e} is {options.eps / usual:.0%} of the usual divisor {usual:.1e} of {op} with "
            f"feature_map={options.feature_map!r} and {d} channels; give a smaller eps.", stacklevel=2,
        )  # fmt: skip


def check_decay(decay: float | Tensor | None, n_heads: int, n_key_heads: int, dtype: torch.dtype) -> None:
    """Raise ValueError unless decay is None, a float, or a tensor [H] or [Hk], with values in (0, 1].

    Values are checked after the cast to `dtype`: below its smallest normal number they would become 0, with logarithm
    -inf. Tensor values are checked on the CPU only, to avoid a device synchronization, and not while compiling.
    """
    smallest = torch.finfo(dtype).tiny
    wrong = f"decay must be in (0, 1] and at least {smallest:.2g} in {dtype}"
    if not isinstance(decay, Tensor):
        if decay is not None and not smallest <= decay <= 1:
            raise ValueError(f"{wrong}, got {decay}.")
        return
    if decay.dim() != 1 or decay.shape[0] not in (n_heads, n_key_heads):
        shapes = " or ".join(f"[{n}]" for n in dict.fromkeys((n_heads, n_key_heads)))
        raise ValueError(f"decay must be a float or have shape {shapes}, got shape {tuple(decay.shape)}.")
    if not decay.dtype.is_floating_point:
        raise ValueError(f"decay must be floating point, got {decay.dtype}.")
    if torch.compiler.is_compiling() or decay.device.type != "cpu":
        return
    cast = decay.detach().to(dtype)
    if not bool(((cast >= smallest) & (cast <= 1)).all()):
        raise ValueError(f"{wrong} for every head, got {decay.tolist()}.")


def check_coefficients(op: str, coefficients: Any, n_heads: int, device: torch.device) -> None:
    """Raise ValueError unless `polynomial` has coefficients [H, 4] and other operators have none."""
    if op == "polynomial":
        check_parameter("coefficients", coefficients, device, ((n_heads, 4),), f"[heads, 4] = [{n_heads}, 4]")
    elif coefficients is not None:
        raise ValueError(f"coefficients belong to polynomial, {op} takes none.")


def check_parameter(name: str, x: Any, device: torch.device, shapes: tuple[tuple[int, ...], ...], allowed: str) -> None:
    """Raise ValueError unless x is a tensor of one of the shapes, of any floating-point dtype, on the device of q.
    Values are not checked. allowed: the shapes in the message."""
    if not isinstance(x, Tensor) or tuple(x.shape) not in shapes:
        raise ValueError(f"{name} must have shape {allowed}, got {shape_of(x)}.")
    _check_dtype(name, x)
    if x.device != device:
        raise ValueError(f"{name} must be on the device of q, {device}, got {x.device}.")
