"""Faults of the Triton forms that `impl="auto"` avoids, with one warning each."""

from __future__ import annotations

import functools
import importlib.metadata
import warnings

import torch

WARNED: set[str] = set()


class Fault(str):
    """A reason why a call has no Triton form: a fault to be mended, in this package or in a version of Triton."""


def warn(reason: str | None) -> None:
    """Warn of a fault, once in a process; other reasons are what the call asks for. Compiled code warns of nothing."""
    if not isinstance(reason, Fault) or torch.compiler.is_compiling() or reason in WARNED:
        return
    WARNED.add(reason)
    warnings.warn(f"The torch form runs instead of the Triton form: {reason}.", stacklevel=2)


@functools.cache
def triton_version() -> str:
    """The installed version, without importing it; "" without Triton, or where it was not installed as a package."""
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return ""
