"""Public operator of adaptive multipole attention; symbols in `softmax/adaptive/__init__.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Never

from torch import Tensor

from ..checks import check_unknown
from ..op import run_multipole


def adaptive_multipole(
    q: Tensor, k: Tensor, v: Tensor, *, grid: Sequence[int], select: str = "error", density: float = 0.125,
    q_tile: int = 64, k_tile: int = 16, far: str = "first", prefix: int = 0, suffix: int = 0, q_scale: float = 1.0,
    key_padding_mask: Tensor | None = None, impl: str = "auto", **unknown: Never,
) -> Tensor:  # fmt: skip
    """Softmax attention, exact for the key tiles selected per query tile, pooled for all others.

    q [B, N, H, D], k [B, N, Hk, D], v [B, N, Hk, Dv] -> [B, N, H, Dv], tokens before heads; two-sided, no parameters.

    grid          token grid (raster order, last axis fastest), any number of axes
    select        selection of exact key tiles: largest expected error ("error": mass of the tile times variance of its
                  scores), largest mass ("mass"), largest score of mean query and mean key ("mean"), or nearest ("near")
    density       fraction of exact key tiles, above 0; 1 is softmax
    q_tile, k_tile   maximum number of tokens of a tile, powers of two; a tile is a box of the grid, cut at its border
    far           weights of the other tokens: "mean" exp(mean score of their tile), "first" with an additional
                  first-order term for all tiles, "variance" with half the variance of the scores in the exponent (in
                  torch only), "none" zero
    prefix, suffix   number of tokens before and after the grid (class, text): exact as queries and as keys
    q_scale       scale of softmax, such as D^-1/2
    key_padding_mask   [B, N] bool, True for real tokens, as in `api`
    impl          as in `api`

    The selection has no gradient; everything else is differentiated exactly. Raises ValueError for wrong shapes,
    dtypes, devices and names.
    """
    check_unknown(adaptive_multipole, unknown)
    return run_multipole(
        "adaptive_multipole", (q, k, v), impl, grid=grid, select=select, density=density, q_tile=q_tile, k_tile=k_tile,
        far=far, prefix=prefix, suffix=suffix, q_scale=q_scale, key_padding_mask=key_padding_mask,
    )  # fmt: skip
