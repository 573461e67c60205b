"""First-use check of the Triton forms.

A form (operator, options, widths, dtype) on a machine (GPU, versions of Triton and ptxas) is verified if the GPU tests
passed there and cover its channels (`SHIPPED`), if an earlier process checked it (`cache_file`), or by its
check: the first call runs it twice on a small seeded input, compares the bits, and compares the results with the torch
form. A check that fails, or that cannot compile or launch, is a `Fault`: `impl="auto"` then uses the torch form with
one warning, `impl="triton"` raises. The environment variable HLA_KERNELS_VERIFY=0 turns checks off.

Some forms of this package are faults without a check.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import json
import os
import tempfile
import threading
import warnings
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

HAS_TRITON = importlib.util.find_spec("triton") is not None
try:  # at import, since torch.compile cannot trace the search for packages; Triton itself is not imported
    TRITON_VERSION = version("triton")
except PackageNotFoundError:
    TRITON_VERSION = ""
TESTED = (9, 0)  # compute capability of the tested GPUs, H100 and H200
SWITCH = "HLA_KERNELS_VERIFY"
H200 = ("3.6", "12.8", TESTED)  # Triton, its ptxas and compute capability of the machine that ran all GPU tests
# family of kernels -> channels per head, of queries and values alike, for which its GPU tests passed there with today's
# kernels; a family whose kernels change is removed
SHIPPED: dict[str, tuple[int, ...]] = {
    "two-sided": (64, 72, 128), "causal": (64, 128), "mhla": (64, 72, 128), "delta": (64, 128),
    "adaptive_multipole": (64, 128), "features": (),
}  # fmt: skip
LIMITS = {torch.bfloat16: 2e-2, torch.float16: 1e-2, torch.float32: 1e-3}  # relative L2 error against the torch form
WARNED: set[str] = set()
VERDICTS: dict[tuple, Fault | None] = {}
CHECKING = threading.local()

F = TypeVar("F", bound=Callable)
Run = Callable[[str], list[Tensor]]  # impl -> output and gradients, on the same input each time


class Fault(str):
    """A reason not to run the Triton form of a call: a fault of this package, a failed check or an untested GPU."""


def warn(reason: str | None, any_reason: bool = False) -> None:
    """Warn of a fault, or of any reason, once per process, but not while compiling."""
    if reason is None or not (any_reason or isinstance(reason, Fault)):
        return
    if torch.compiler.is_compiling() or reason in WARNED:
        return
    WARNED.add(reason)
    warnings.warn(f"The torch form runs instead of the Triton form: {reason}.", stacklevel=2)


class Machine(NamedTuple):
    """GPU and compiler, on which a compiled kernel depends in addition to its source."""

    gpu: str
    capability: tuple[int, int]
    triton: str
    ptxas: str


def capability(index: int | None) -> tuple[int, int]:
    """Compute capability of a CUDA device (the current one if None); without a GPU, for fake tensors, `TESTED`."""
    return torch.cuda.get_device_capability(index) if torch.cuda.is_available() else TESTED


def traced_as_constant(fn: F) -> F:
    """Mark a function whose result torch.compile treats as a constant.

    Same as `torch.compiler.assume_constant_result`, without importing the compiler, which takes seconds."""
    fn._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return fn


@functools.cache
def machine(index: int | None) -> Machine:
    """Return the machine with a CUDA device (the current one if None)."""
    try:
        import triton

        ptxas = triton.knobs.nvidia.ptxas.version  # of the assembler that Triton runs
    except Exception:  # another version of Triton, or no Triton
        ptxas = ""
    return Machine(torch.cuda.get_device_name(index), capability(index), TRITON_VERSION, ptxas)


@functools.cache
def package() -> str:
    """Return a digest of the source of this package."""
    files = sorted(Path(__file__).parents[1].rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


@traced_as_constant
def is_shipped(family: str, index: int | None, *channels: int) -> bool:
    """Whether all GPU tests of a family of kernels passed on this machine and cover the channels per head of queries
    and values. True without a GPU, where only fake tensors are on CUDA."""
    if not torch.cuda.is_available():
        return True
    if any(c != channels[0] or c not in SHIPPED.get(family, ()) for c in channels):
        return False
    _, compute, triton, ptxas = machine(index)
    return family in SHIPPED and (triton.rpartition(".")[0], ptxas, compute) == H200


@traced_as_constant
def fault(form: tuple | None, index: int | None) -> Fault | None:
    """Return the reason not to trust the Triton form of a call on a CUDA device, or None if it is verified.

    form: constants of `trial.trial_of`, or None if there is no check of this operator.
    """
    if getattr(CHECKING, "on", False):
        return None
    if form is None or os.environ.get(SWITCH) == "0":
        major, minor = capability(index)
        if (major, minor) == TESTED:
            return None
        return Fault(f"it was never tested on GPUs of compute capability {major}.{minor}")
    key = (machine(index), form)
    if key not in VERDICTS:
        if torch.cuda.is_current_stream_capturing():
            return Fault(f"{form[0]} was not checked before the capture of a CUDA graph: call it once before")
        VERDICTS[key] = check(key, index)
    return VERDICTS[key]


def check(key: tuple, index: int | None) -> Fault | None:
    """Return the reason why a form fails its check, or None; what passes is written to the cache file.

    It runs in a new thread, where autograd, autocast, transforms and tracing of the caller are off."""
    name = repr((package(), *key))
    if name in cached():
        return None
    found: list[Fault | None] = []
    thread = threading.Thread(target=lambda: found.append(_tried(key[1], index)))
    thread.start()
    thread.join()
    if found[0] is None:
        remember(name)
    return found[0]


def _tried(form: tuple, index: int | None) -> Fault | None:
    from .trial import runs

    CHECKING.on = True
    where = f"the check of {form[0]} on {machine(index).gpu} with Triton {machine(index).triton} failed"
    try:
        with torch.cuda.device(index):
            failures = (failure(run) for run in runs(form))
            why = next((x for x in failures if x is not None), None)
    except Exception as error:  # of the compiler, of resources, of the driver: auto never raises
        why = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
    return None if why is None else Fault(f"{where} ({why}); {SWITCH}=0 turns checks off")


def failure(run: Run) -> str | None:
    """Return what is wrong with the Triton form of a run, or None."""
    first, second, expected = run("triton"), run("triton"), run("torch")
    if not all(torch.equal(x, y) for x, y in zip(first, second, strict=True)):
        return "two runs differ"
    limit = LIMITS[first[0].dtype]
    for i, (x, truth) in enumerate(zip(first, expected, strict=True)):
        error = float((x.double() - truth.double()).norm() / truth.double().norm().clamp_min(1e-30))
        if not error <= limit:
            return f"result {i} is {error:.1e} from the torch form, more than {limit:.0e}"
    return None


def cache_file() -> Path:
    """Return the file of the forms that passed their check."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "hla_kernels" / "verified.json"


def cached() -> list[str]:
    """Return the contents of the cache file; nothing if there is none or it cannot be read."""
    try:
        found = json.loads(cache_file().read_text())
    except (OSError, ValueError, RuntimeError):  # RuntimeError: there is no home
        return []
    return found if isinstance(found, list) else []


def remember(name: str) -> None:
    """Add a form to the cache file, which is replaced as a whole; without a place to write, checks are repeated by the
    next process."""
    with contextlib.suppress(OSError, RuntimeError):
        file = cache_file()
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as new:
            json.dump(sorted({*cached(), name}), new, indent=1)
        os.replace(new.name, file)
