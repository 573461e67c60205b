"""Tiles of the kernels of `heads.plain`."""

from __future__ import annotations

from ..spec import Spec
from . import AT_ONCE


def plain_forward_config(w: dict[str, int]) -> dict[str, int]:
    """Return the tiles of `plain_forward`."""
    config = {"num_stages": 3, **AT_ONCE} if w["F2"] > 0 else {"num_stages": 4, "DELAY": 3000, "SLOTS": 4}
    return {**config, "BN": 32, "BO": 64, "num_warps": 4}


def plain_config(spec: Spec, w: dict[str, int]) -> dict[str, int]:
    """Tiles of `plain_backward`: LOOPS that write, WRITE stages of each."""
    if w["F2"] == 0:
        config = {"BN": 64, "LOOPS": 1, "WRITE": 2, "DELAY": 6000, "SLOTS": 2}
    elif spec.op == "ahla":
        config = {"BN": 64, "LOOPS": 2, "WRITE": 3, **AT_ONCE}
    elif spec.op == "hla3":
        config = {"BN": 32, "LOOPS": 2, "WRITE": 2, **AT_ONCE}
    else:
        config = {"BN": 64, "LOOPS": 3, "WRITE": 3, **AT_ONCE}
    return {**config, "BO": 64, "num_warps": 4, "num_stages": 3}


def plain_weights_config() -> dict[str, int]:
    """Return the tiles of `plain_weights`."""
    return {"BN": 64, "num_warps": 4, "num_stages": 3, **AT_ONCE}
