"""Static table of `heads.pairs`, with two neighbouring heads per program."""

from __future__ import annotations

import torch

from ..spec import Spec
from .paths import PROGRAMS, mapped


def pair_config(kernel: str) -> dict[str, int]:
    """Return the tiles of the kernels of `heads.pairs`; BN sums, BO writes."""
    if kernel in ("forward_pairs", "forward_higher", "divided_forward"):
        return {"BN": 32, "BO": 64, "num_warps": 4, "num_stages": 3}
    if kernel == "backward_pairs":
        return {"BN": 32, "BO": 64, "num_warps": 4, "num_stages": 4, "STAGES": 3}
    if kernel == "divided_keys":
        return {"BN": 64, "num_warps": 4, "num_stages": 2}
    if kernel == "grads_pairs":
        return {"BN": 64, "num_warps": 4, "num_stages": 3, "TWO": 2, "ONE": 3}
    return {"BN": 32, "num_warps": 4, "num_stages": 4}


def pairs_ratio(spec: Spec, w: dict[str, int], batch_heads: int, dtype: torch.dtype, own: bool) -> bool:
    """Whether a ratio of first order uses `heads.divided`: one program for two heads fills the GPU. Only combinations
    tested on a GPU."""
    form = own and spec.alone(dtype) and mapped(spec) and spec.ridge == 0 and dtype == torch.bfloat16
    return form and w["D"] == w["DV"] == 72 and batch_heads >= 384


def at_once(n: int) -> bool:
    """Whether one program does the whole backward of first order of two heads."""
    return n <= 512


def roles(spec: Spec) -> int:
    """Return the number of programs that write gradients of the same tokens; two for a gradient that is a sum of two
    products."""
    return {"linear_attention": 3, "hla2": 4}[spec.op]


def parts(batch_pairs: int, n: int, bn: int) -> tuple[int, int]:
    """Return (parts, tokens per part) of a pass that writes: up to 4 tiles per program."""
    total = -(-n // bn)
    tiles = max(1, min(4, batch_pairs * total // (2 * PROGRAMS)))
    chunk = tiles * bn
    return -(-n // chunk), chunk
