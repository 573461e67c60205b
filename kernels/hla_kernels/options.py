"""Options of the operators as one immutable value.

Tensors (a learned decay, polynomial coefficients) are passed separately, so that `Options` can be compared, hashed,
stored in a `State` and treated as a constant by torch.compile.
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

# All operators. `softmax_attention` is the quadratic baseline.
OPS = ("linear_attention", "hla2", "ahla", "hla3", "polynomial", "softmax_attention")
CENTERS = ("k", "qk")
DECAY_RULES = ("cascade", "paper")
IMPLS = ("auto", "reference", "torch", "triton")
MAX_HEAD_DIM = 256


class Options(NamedTuple):
    """Options of one call. `decay` is None, a float, or "tensor" for a tensor, which is passed separately; `frame`, the
    tokens per frame, is 0 unless causal="frame"."""

    causal: bool | str = False
    feature_map: str | None = None
    normalize: bool = False
    center: str | None = None
    mean_path: bool = False
    decay: float | str | None = None
    decay_rule: str = "cascade"
    ridge: float = 0.0
    scale: float | None = None
    eps: float = 1e-6
    q_scale: float = 1.0
    frame: int = 0


def needs_ones(options: Options) -> bool:
    """Whether the operator with v = 1 is needed (denominator, mean-value path)."""
    return options.normalize or options.mean_path


def is_paper(op: str, options: Options) -> bool:
    """Whether the paper's own decayed second-order rule (S, C, G) applies; without decay it equals the cascade."""
    return op == "hla2" and bool(options.causal) and options.decay is not None and options.decay_rule == "paper"


def canonical(op: str, options: Options) -> Options:
    """Return options in canonical form, so that equal calls compare equal: decay 1.0 becomes None, and decay_rule
    becomes "cascade" where both rules agree (all but decayed hla2).

    A weight of order p contains p queries and p scales, so q_scale is folded into a numeric scale (kept separate if the
    scale is 1/N). In hla2 and hla3, lambda I is added to a moment of keys alone, so q_scale also multiplies lambda.
    """
    decay = None if options.decay == 1.0 else options.decay
    rule = options.decay_rule if op == "hla2" and decay is not None else "cascade"
    q_scale, ridge = float(options.q_scale), float(options.ridge)
    scale = None if options.scale is None else float(options.scale) * q_scale
    if options.causal and scale is None:
        scale = None if q_scale == 1.0 else q_scale
    # no _replace: dynamo of torch 2.11 cannot return its result
    return Options(
        options.causal, options.feature_map, options.normalize, options.center, options.mean_path,
        decay, rule, ridge * q_scale if op in ("hla2", "hla3") else ridge, scale, float(options.eps),
        q_scale if scale is None and not options.causal else 1.0, options.frame,
    )  # fmt: skip


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of moments and their products: float32, or float64 for float64 input."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def decay_heads(decay: float | Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Return gamma [1, 1, 1, 1, 1], [1, Hk, 1, 1, 1] or [1, Hk, G, 1, 1]; only the last has moments per query head."""
    if decay is None or (isinstance(decay, float) and decay == 1.0):
        return None
    dtype = compute_dtype(q.dtype)
    if isinstance(decay, float):
        return torch.full((1, 1, 1, 1, 1), decay, dtype=dtype, device=q.device)
    return decay.to(q.device, dtype).reshape(1, k.shape[2], -1, 1, 1)


def autocast_dtype(q: Any) -> torch.dtype | None:
    """Return the dtype of autocast, or None if it is off, as for meta tensors, for which torch's query raises."""
    device = q.device.type if isinstance(q, Tensor) else "meta"
    on = device != "meta" and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if on else None


def cast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return tensors in the dtype of autocast if it is on; as in torch's autocast, float64 is not cast."""
    dtype = autocast_dtype(tensors[0])
    return tensors if dtype is None else tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)


def plain_precision(x: Tensor) -> contextlib.AbstractContextManager:
    """Disable autocast for the device of x: tensors are cast already, and moments must stay in float32."""
    on = autocast_dtype(x) is not None
    return torch.autocast(x.device.type, enabled=False) if on else contextlib.nullcontext()
