"""Cache of check results: a call of a form that was checked before is not checked again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..options import autocast_dtype
from .operator import needs_backward

KNOWN: dict[tuple, Any] = {}
MOST = 1024  # maximum number of cached forms
TENSORS = (Tensor, torch.nn.Parameter)  # subclasses may have symbolic sizes
PLAIN = {bool, int, float, str, type(None)}  # types are part of a form, since 1 == True


def form_of(op: str, impl: Any, options: dict[str, Any], tensors: tuple) -> tuple | None:
    """Return everything that the checks of a call depend on, or None if its result cannot be cached: tensors among the
    options, or symbolic sizes while compiling."""
    if torch.compiler.is_compiling():
        return None
    values = (impl, *options.values())
    kinds = tuple([type(x) for x in values])
    if not PLAIN.issuperset(kinds) or not all(x is None or _is_plain(x) for x in tensors):
        return None
    looks = [None if x is None else (x.shape, x.stride()[-1:], x.dtype, x.device) for x in tensors]
    return (op, *options, *values, *kinds, autocast_dtype(tensors[0]), needs_backward(*tensors), *looks)


def _is_plain(x: Any) -> bool:
    return type(x) in TENSORS and x.layout is torch.strided and not x.is_nested


def recall(form: tuple | None) -> Any:
    """Return the cached result of a form, or None; while compiling, the cache is not read, which would guard it."""
    return None if form is None else KNOWN.get(form)


def remember(form: tuple | None, found: Any) -> None:
    """Cache a result, which must not contain tensors, for a form; not while a CUDA graph is captured, when a Triton
    form cannot be checked."""
    if form is None or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        return
    if len(KNOWN) >= MOST:
        KNOWN.clear()
    KNOWN[form] = found
