"""Tiles of the kernels of `heads.plain`."""

from __future__ import annotations

from ..spec import Spec
from . import AT_ONCE


def plain_forward_config(spec: Spec, w: dict[str, int], n: int) -> dict[str, int]:
    """Tiles of `plain_forward`. STAY: where the queries of all programs at once are more than L2 holds. LAST: where a
    tile of few tokens is much of the work, and four programs a multiprocessor have the registers."""
    config = {"num_stages": 3, **AT_ONCE} if w["F2"] > 0 else {"num_stages": 4, "DELAY": 3000, "SLOTS": 4}
    last = w["F2"] == 0 and n <= 512 and spec.op != "hla3"
    return {**config, "STAY": w["F2"] == 0 and n > 512, "LAST": last, "BN": 32, "BO": 64, "num_warps": 4}


def plain_config(spec: Spec, w: dict[str, int], kept: bool) -> dict[str, int]:
    """Tiles of `plain_backward`: LOOPS that write, WRITE stages of each; kept: the forward has kept the factors."""
    if kept and w["F2"] == 0:
        return {"BN": 64, "BO": 64, "LOOPS": 1, "WRITE": 5, "STAY": True, "num_warps": 4, "num_stages": 6, **AT_ONCE}
    if w["F2"] == 0:
        config = {"BN": 64, "LOOPS": 1, "WRITE": 2, "DELAY": 6000, "SLOTS": 2}
    elif spec.op == "ahla":
        config = {"BN": 64, "LOOPS": 2, "WRITE": 3, **AT_ONCE}
    elif spec.op == "hla3":
        config = {"BN": 32, "LOOPS": 2, "WRITE": 2, **AT_ONCE}
    else:
        config = {"BN": 64, "LOOPS": 3, "WRITE": 3, **AT_ONCE}
    return {**config, "STAY": False, "BO": 64, "num_warps": 4, "num_stages": 3}


def plain_weights_config() -> dict[str, int]:
    """Return the tiles of `plain_weights`."""
    return {"BN": 64, "num_warps": 4, "num_stages": 3, **AT_ONCE}
