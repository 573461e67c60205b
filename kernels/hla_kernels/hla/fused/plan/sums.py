"""What a forward of `heads.summed` keeps for its backward, and the tiles of its kernels."""

from __future__ import annotations

import torch

from ..spec import Spec, Widths, layout

MIDDLE = {"num_warps": 4, "num_stages": 1}  # of `summed_middle`


def factors(spec: Spec) -> int:
    """Return the number of float16 moments whose product is the operator."""
    return {"linear_attention": 0, "hla3": 3}.get(spec.op, 2)


def kept_floats(spec: Spec, w: Widths, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Return the float32 numbers per head that a forward of `heads.summed` saves: units, vectors, operator, factors."""
    lay = layout(spec, w)
    return 4, lay.vectors().K, lay.matrix_floats(dtype.itemsize), factors(spec) * w.F.padded**2 // 2


def forward_config(spec: Spec, w: Widths) -> dict[str, int]:
    """Return the tiles of `summed_forward`."""
    wide = w.F.D2 > 0
    more = {} if wide or not spec.sums else {"maxnreg": 168}  # three programs a multiprocessor
    return {"BN": 32, "BO": 64, "num_warps": 4, "num_stages": 3 if wide or spec.sums else 4, **more}
