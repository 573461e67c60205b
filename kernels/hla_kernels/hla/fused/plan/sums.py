"""What a forward of `heads.summed` keeps for its backward, and the tiles of its kernels."""

from __future__ import annotations

import torch

from ..spec import Spec, Widths, layout
from . import AT_ONCE, factor_floats


def middle_config(spec: Spec, w: Widths) -> dict[str, int]:
    """Return the warps of `summed_middle`; vectors and three weights of two blocks fill the registers of four."""
    return {"num_warps": 8 if spec.op == "hla3" and spec.sums and w.F.D2 > 0 else 4, "num_stages": 1}


def kept_floats(spec: Spec, w: Widths, dtype: torch.dtype) -> int:
    """Return the float32 numbers per head that a forward of `heads.summed` saves."""
    lay = layout(spec, w)
    return factor_floats(spec, w) + lay.vectors().K + lay.matrix_floats(dtype.itemsize)


def forward_config(spec: Spec, w: Widths, n: int) -> dict[str, int]:
    """Return the tiles of `summed_forward`, and how its programs start (`heads.stagger`): a ratio computes while it
    reads."""
    tiles, wide = {"BN": 32, "BO": 64, "num_warps": 4, "num_stages": 3}, w.F.D2 > 0
    if not spec.sums:
        return {**tiles, **(AT_ONCE if wide else {"num_stages": 4, "DELAY": 3000, "SLOTS": 4})}
    starts = {"DELAY": 5000, "SLOTS": 2} if not wide and n <= 512 and not spec.normalize else AT_ONCE
    return {**tiles, **starts, **({} if wide else {"maxnreg": 168})}  # three programs a multiprocessor
