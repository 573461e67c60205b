"""Tiles of `heads.mixture`."""

from __future__ import annotations


def mixture_config(kernel: str, w: dict[str, int]) -> dict[str, int]:
    """Tiles of the kernels of `heads.mixture`; registers for two programs a multiprocessor where they fit."""
    if kernel in ("forward", "forward_save"):
        return {"BN": 64 if kernel == "forward" else 32, "BO": 64, "num_warps": 4, "num_stages": 3}
    if kernel == "moments":
        return {"BN": 32, "num_warps": 4, "num_stages": 3}
    if kernel in ("operator", "products"):
        return {"num_warps": 4, "num_stages": 1}
    if kernel == "backward":
        return {"BN": 32, "num_warps": 8, "num_stages": 3, "maxnreg": 128}
    once = {"WHOLE": True, "maxnreg": 128} if w["F2"] == 0 else {"WHOLE": False}
    return {"BN": 64, "num_warps": 8, "num_stages": 3, **once}
