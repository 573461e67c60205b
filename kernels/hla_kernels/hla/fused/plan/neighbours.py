"""Static table of `heads.pairs`, with two neighbouring heads per program."""

from __future__ import annotations

from .paths import PROGRAMS


def pair_config(kernel: str) -> dict[str, int]:
    """Return the tiles of the kernels of `heads.pairs`; BN sums, BO writes."""
    if kernel == "forward_pairs":
        return {"BN": 32, "BO": 64, "num_warps": 4, "num_stages": 3}
    if kernel == "backward_pairs":
        return {"BN": 32, "BO": 64, "num_warps": 4, "num_stages": 4, "STAGES": 3}
    if kernel == "grads_pairs":
        return {"BN": 64, "num_warps": 4, "num_stages": 3}
    return {"BN": 32, "num_warps": 4, "num_stages": 4}


def at_once(n: int) -> bool:
    """Whether one program does the whole backward of first order of two heads."""
    return n <= 512


def parts(batch_pairs: int, n: int, bn: int) -> tuple[int, int]:
    """Return (parts, tokens per part) of a pass that writes: up to 4 tiles per program."""
    total = -(-n // bn)
    tiles = max(1, min(4, batch_pairs * total // (2 * PROGRAMS)))
    chunk = tiles * bn
    return -(-n // chunk), chunk
