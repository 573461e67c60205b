"""Tiles and saved buffers of `heads.mixture`."""

from __future__ import annotations

from ..spec import Spec, layout

MATRICES = 6  # float16 matrices that are kept of a head: P, S, C, R, W, T


def mixture_config(kernel: str, w: dict[str, int]) -> dict[str, int]:
    """Return the tiles of the kernels of `heads.mixture`."""
    wide = w["F2"] > 0
    if kernel == "forward":
        return {"BN": 64, "BO": 64, "num_warps": 4, "num_stages": 3, "DELAY": 5000, "SLOTS": 2}
    if kernel == "ratio":
        return {"num_warps": 8 if wide else 4, "num_stages": 1}
    if kernel in ("operator", "products"):
        return {"num_warps": 4, "num_stages": 1}
    if kernel == "moments":
        return {"BN": 32, "num_warps": 4, "num_stages": 3}
    if kernel == "features":
        return {"BN": 32, "num_warps": 8 if wide else 4, "num_stages": 2 if wide else 3}
    return {"BN": 64, "num_warps": 4, "num_stages": 3}


def mixture_floats(spec: Spec, w: dict[str, int], itemsize: int) -> int:
    """Return the float32 numbers per head that a forward saves: matrices, units, vectors and the operator."""
    lay = layout(spec, w).vectors()
    return MATRICES * (w["F1"] + w["F2"]) ** 2 // 2 + 8 + lay.k + lay.matrix_floats(itemsize)
