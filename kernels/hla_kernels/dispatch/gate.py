"""Conditions of all Triton forms on a device, and the first-use check of functions without `impl`."""

from __future__ import annotations

import torch

from .forms import KNOWN, remember
from .operator import to_onnx
from .verify import HAS_TRITON, Fault, fault, is_shipped, warn

AMD = Fault("the Triton forms are for NVIDIA GPUs, not for AMD's")


def why_no_kernels(device: torch.device) -> str | None:
    """Return the reason why no Triton kernel runs on a device, or None."""
    if device.type != "cuda":
        return f"the Triton forms run on CUDA devices, not on {device.type}"
    if torch.version.hip:
        return AMD
    if to_onnx():
        return "ONNX has no Triton kernels"
    return None if HAS_TRITON else "Triton is not installed"


def trusted(op: str, device: torch.device, dtypes: tuple[torch.dtype, ...], sizes: tuple[int, ...]) -> bool:
    """Whether the kernels of a function run on a device, after their first-use check there; otherwise its torch form
    runs, with one warning of a fault. dtypes, sizes: everything that is compiled into the kernels."""
    if torch.compiler.is_compiling():  # the cache is not read, which would guard it
        return _reason(op, device, dtypes, sizes) is None
    key = (op, device, dtypes, sizes)
    try:
        return KNOWN[key]
    except KeyError:
        pass
    except TypeError:  # symbolic sizes outside of torch.compile have no hash
        return _reason(op, device, dtypes, sizes) is None
    reason = _reason(op, device, dtypes, sizes)
    warn(reason)
    remember(key, reason is None)
    return reason is None


def _reason(op: str, device: torch.device, dtypes: tuple[torch.dtype, ...], sizes: tuple[int, ...]) -> str | None:
    if (reason := why_no_kernels(device)) or is_shipped("features", device.index):
        return reason
    # ranges have constant lengths while dynamo traces dynamic shapes
    return fault((op, dtypes, tuple([len(range(x)) for x in sizes])), device.index)
