"""Known faults of the Triton forms, and untested GPUs; `impl="auto"` avoids both with a warning."""

from __future__ import annotations

import warnings
from importlib.metadata import PackageNotFoundError, version

import torch

WARNED: set[str] = set()
TESTED = (9, 0)  # compute capability of the tested GPUs, H100 and H200
try:  # at import, since torch.compile cannot trace the search for packages; Triton itself is not imported
    TRITON_VERSION = version("triton")
except PackageNotFoundError:
    TRITON_VERSION = ""


class Fault(str):
    """A reason not to run the Triton form of a call: a fault of this package or of a Triton version, or an untested
    GPU."""


def warn(reason: str | None) -> None:
    """Warn of a fault once per process, but not while compiling. Reasons that are no `Fault` cause no warning."""
    if not isinstance(reason, Fault) or torch.compiler.is_compiling() or reason in WARNED:
        return
    WARNED.add(reason)
    warnings.warn(f"The torch form runs instead of the Triton form: {reason}.", stacklevel=2)


def capability(index: int | None) -> tuple[int, int]:
    """Compute capability of a CUDA device (the current one if None); without a GPU, for fake tensors, `TESTED`."""
    return torch.cuda.get_device_capability(index) if torch.cuda.is_available() else TESTED


def untested(index: int | None) -> Fault:
    """Return the reason not to use the Triton forms by default on a CUDA device."""
    major, minor = capability(index)
    return Fault(f"it was never tested on GPUs of compute capability {major}.{minor} (impl='triton' runs it)")
