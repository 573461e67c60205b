"""What the checks of a call found, kept for calls of the same form: a second one is not checked again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..options import autocast_dtype

KNOWN: dict[tuple, Any] = {}
MOST = 1024  # forms that are remembered
TENSORS = (Tensor, torch.nn.Parameter)  # others may have symbols for sizes
PLAIN = {bool, int, float, str, type(None)}  # 1 and True are equal, and one of them is refused


def form_of(op: str, impl: Any, options: dict[str, Any], tensors: tuple) -> tuple | None:
    """Everything that a check looks at, or None where that is more than this: values of a tensor among the options, or
    symbols of a compiler."""
    if torch.compiler.is_compiling():
        return None
    values = (impl, *options.values())
    kinds = tuple([type(x) for x in values])
    if not PLAIN.issuperset(kinds) or not all(x is None or _is_plain(x) for x in tensors):
        return None
    looks = [None if x is None else (x.shape, x.stride()[-1:], x.dtype, x.device) for x in tensors]
    return (op, *options, *values, *kinds, autocast_dtype(tensors[0]), *looks)


def _is_plain(x: Any) -> bool:
    return type(x) in TENSORS and x.layout is torch.strided and not x.is_nested


def recall(form: tuple | None) -> Any:
    """What was kept for a form, or None."""
    return None if form is None else KNOWN.get(form)


def remember(form: tuple | None, found: Any) -> None:
    """Keep something without tensors for a form."""
    if form is None:
        return
    if len(KNOWN) >= MOST:
        KNOWN.clear()
    KNOWN[form] = found
