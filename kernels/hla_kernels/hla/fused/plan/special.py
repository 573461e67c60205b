"""Static table of `heads.mixture`."""

from __future__ import annotations

from ..spec import Spec, Widths, layout

MATRICES = 6  # float16 matrices that are kept of a head by `heads.mixture`: P, S, C, R, W, T


def mixture_config(kernel: str, w: Widths) -> dict[str, int]:
    """Return the tiles of a kernel of `heads.mixture`."""
    wide = w.F.D2 > 0
    return {
        "forward": {"BN": 64, "BO": 64, "num_warps": 4, "num_stages": 3, "DELAY": 5000, "SLOTS": 2},
        "moments": {"BN": 32, "num_warps": 4, "num_stages": 3},
        "ratio": {"num_warps": 8 if wide else 4, "num_stages": 1},
        "operator": {"num_warps": 4, "num_stages": 1},
        "products": {"num_warps": 4, "num_stages": 1},
        "weights": {"BN": 64, "num_warps": 4, "num_stages": 3},
    }[kernel]


def mixture_floats(spec: Spec, w: Widths, itemsize: int) -> int:
    """Return the float32 numbers per head that a forward of `heads.mixture` saves: matrices, units, vectors and the
    operator."""
    lay = layout(spec, w).vectors()
    return MATRICES * w.F.padded ** 2 // 2 + 8 + lay.K + lay.matrix_floats(itemsize)
