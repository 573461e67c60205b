"""Tiles of `heads.mixture` and `heads.mixture.fixed`."""

from __future__ import annotations

import torch

from ..spec import Spec, layout
from . import AT_ONCE
from .paths import cut


def mixture_config(kernel: str, w: dict[str, int]) -> dict[str, int]:
    """Return the tiles of the kernels of `heads.mixture`; registers allow two programs per multiprocessor if
    possible."""
    if kernel == "moments":
        return {"BN": 32 if w["F2"] > 0 else 64, "num_warps": 4, "num_stages": 3}
    if kernel == "features":
        return {"BN": 32, "num_warps": 8, "num_stages": 1}
    if kernel == "ratio":
        return {"num_warps": 8 if w["F2"] > 0 else 4, "num_stages": 1}
    if kernel in ("operator", "products"):
        return {"num_warps": 4, "num_stages": 1}
    if kernel == "backward":  # it uses 128 registers by default, and spills only with a limit
        return {"BN": 32, "num_warps": 8, "num_stages": 3, "DELAY": 10000, "SLOTS": 2}
    if kernel == "backward_centred":
        return {"BN": 32, "num_warps": 4, "num_stages": 2, **AT_ONCE}
    # without a limit the assembler uses all registers and spills
    once = {"WHOLE": True, "maxnreg": 128} if w["F2"] == 0 else {"WHOLE": False, "maxnreg": 248}
    return {"BN": 64, "num_warps": 8, "num_stages": 3, **once}


def fixed_config(kernel: str, w: dict[str, int]) -> dict[str, int]:
    """Return the tiles of the kernels of `heads.mixture.fixed`."""
    if kernel == "forward":
        return {"BN": 64, "BO": 64, "num_warps": 4, "num_stages": 3, "DELAY": 5000, "SLOTS": 2}
    if kernel == "ratio":
        return {"num_warps": 8 if w["F2"] > 0 else 4, "num_stages": 1}
    if kernel in ("operator", "products"):
        return {"num_warps": 4, "num_stages": 1}
    if kernel == "moments":
        return {"BN": 32, "num_warps": 4, "num_stages": 3}
    if kernel == "features":
        wide = w["F2"] > 0
        return {"BN": 32, "num_warps": 8 if wide else 4, "num_stages": 2 if wide else 3}
    return {"BN": 64, "num_warps": 4, "num_stages": 3}


def mixture_floats(spec: Spec, w: dict[str, int], n: int) -> int | torch.SymInt:
    """Return the float32 numbers per head that a forward of the form `mixed` saves."""
    lay = layout(spec, w)
    vectors = lay.vectors().k
    if spec.fixed:
        return fixed_floats(w) + vectors
    if spec.normalize:
        return digits_floats(w, 513, vectors + lay.matrix_floats(4))
    return digits_floats(w, n, vectors)


def fixed_floats(w: dict[str, int]) -> int:
    """Return the float32 numbers per head of five float16 matrices, their units and M (`heads.mixture.fixed`)."""
    return 5 * (w["F1"] + w["F2"]) ** 2 // 2 + 8 + w["D"] ** 2 // 2


def digits_floats(w: dict[str, int], n: int, vectors: int) -> int | torch.SymInt:
    """Return the float32 numbers per head of moments in two digits, their units and vectors (`heads.mixture`); 0 for
    few tokens, which are cheaper to sum again. No branch on sizes, as in `splits`."""
    kept = 1 if cut(w) else torch.sym_min(1, n // 513)
    return kept * (5 * (w["F1"] + w["F2"]) ** 2 + 8 + vectors)
