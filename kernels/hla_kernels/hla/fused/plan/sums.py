"""What a forward of `heads.summed` keeps for its backward, and the tiles of its kernels."""

from __future__ import annotations

import torch

from ..spec import Spec, Widths, layout
from . import AT_ONCE, factor_floats, paths

SUMS = {"BN": 64, "num_warps": 4, "num_stages": 3}  # tiles of `summed_weights` and `summed_queries`
MIDDLE = {"num_warps": 4, "num_stages": 1}  # of `summed_middle`


def keeps_operator(spec: Spec) -> bool:
    """Whether the forward keeps the operator: one that its factors do not give, or that has none."""
    return spec.normalize or spec.op == "linear_attention"


def kept_floats(spec: Spec, w: Widths, dtype: torch.dtype) -> int:
    """Return the float32 numbers per head that a forward of `heads.summed` saves."""
    lay = layout(spec, w)
    operator = lay.matrix_floats(dtype.itemsize) if keeps_operator(spec) else 0
    return factor_floats(spec, w) + (lay.vectors().K + operator if spec.sums else 0)


def turns(spec: Spec, w: Widths, n: int) -> dict[str, int]:
    """How programs start (`heads.stagger`): a ratio computes while it reads."""
    return {"DELAY": 5000, "SLOTS": 2} if w.F.D2 == 0 and n <= 512 and not spec.normalize else AT_ONCE


def forward_config(spec: Spec, w: Widths, n: int) -> dict[str, int]:
    """Return the tiles of `summed_forward`."""
    tiles = {"BN": 32, "BO": 64, "num_warps": 4}
    if not spec.sums:
        config = {"num_stages": 3, **AT_ONCE} if w.F.D2 > 0 else {"num_stages": 4, "DELAY": 3000, "SLOTS": 4}
        return {**tiles, **config}
    more = {} if w.F.D2 > 0 else {"maxnreg": 168}  # three programs a multiprocessor
    return {**tiles, "num_stages": 3, **turns(spec, w, n), **more}


def backward_config(spec: Spec, w: Widths, n: int) -> dict[str, int]:
    """Return the tiles of `summed_backward`: LOOPS that write, WRITE stages of each, dq LATE.

    With two stages a tile is loaded when the one before it is done with; two loops, of half the tokens each, have room
    for three. Not so a ratio of ahla, whose loops read three of four. What dk and dv of centred hla2 read is not held
    any more when dq is last.
    """
    if not spec.sums and w.F.D2 == 0:
        config = {"BN": 64, "BO": 64, "num_stages": 3, "num_warps": 4, "DELAY": 6000, "SLOTS": 2}
        return {**config, "LOOPS": 1, "WRITE": 2, "LATE": False}
    late = spec.op == "hla2" and spec.center is not None
    if w.F.D2 > 0:
        loops = {"LOOPS": 3, "WRITE": 3}
    elif spec.op == "ahla" and spec.normalize:
        loops = {"LOOPS": 1, "WRITE": 2}
    else:
        loops = {"LOOPS": 2, "WRITE": 3}
    late = late and loops["LOOPS"] == 2
    return {"BN": 64, "BO": 64, "num_stages": 3, **loops, **turns(spec, w, n), "LATE": late, "num_warps": 4}


def query_parts(w: Widths, batch_heads: int, n: int, bn: int) -> tuple[int, int]:
    """Return (parts, tokens of a part) of a head in `summed_queries`."""
    count = 2 if paths.narrow(w) and paths.in_two(batch_heads, n) else 1
    return count, -(-n // (count * bn)) * bn


def tokens_config(spec: Spec) -> dict[str, int]:
    """Tiles of `summed_tokens`. TILED: with a tile of ones hla3 would have one program a multiprocessor, not two."""
    third = spec.op == "hla3"
    return {"BO": 64, "LOOPS": 3 if third else 2, "TILED": not third, "num_warps": 4, "num_stages": 3}
