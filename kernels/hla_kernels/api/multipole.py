"""Public operator of multipole attention; symbols in `softmax/multipole/__init__.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Never

from torch import Tensor

from ..checks import check_unknown
from ..op import run_multipole


def multipole(
    q: Tensor, k: Tensor, v: Tensor, *, grid: Sequence[int], blocks: Sequence[int], radius: int = 2, degree: int = 1,
    prefix: int = 0, suffix: int = 0, q_scale: float = 1.0, key_padding_mask: Tensor | None = None, impl: str = "auto",
    **unknown: Never,
) -> Tensor:  # fmt: skip
    """Softmax attention, exact for near tokens and expanded around the mean key of each block for all others.

    o_t = sum_j w_tj v_j / sum_j w_tj, s_tj = q_scale q_t.k_j, a_tb the mean of s_tj over the tokens of block b;
    w_tj = exp(s_tj) if j is near t, else exp(a_tb) (1 + s_tj - a_tb) for j in block b. The denominator is positive.
    q [B, N, H, D], k [B, N, Hk, D], v [B, N, Hk, Dv] -> [B, N, H, Dv], tokens before heads, two-sided.

    grid, blocks  token grid (raster order, last axis fastest) with any number of axes; number of blocks along each
                  axis, which differ by one token if they do not divide it
    radius        near tokens are within this distance along every axis; if it covers the grid, the result is softmax
    degree        1 as above; 0: far weights exp(a_tb), that is one token with the mean value per block; 2: an
                  additional term exp(a_tb) (s_tj - a_tb)^2 / 2, with a state of about M D^2 / 2 x Dv
    prefix, suffix  number of tokens before and after the grid (class, text): near to all tokens
    q_scale       scale of softmax, such as D^-1/2
    key_padding_mask   [B, N] bool, True for real tokens, as in `api`
    impl          as in `api`; there is no Triton form

    Raises ValueError for wrong shapes, dtypes, devices and names. Plain torch code with all derivatives. Near field and
    expansions of the far field: Greengard and Rokhlin, J. Comput. Phys. 73, 1987.
    """
    check_unknown(multipole, unknown)
    return run_multipole(
        "multipole", (q, k, v), impl, grid=grid, blocks=blocks, radius=radius, degree=degree, prefix=prefix,
        suffix=suffix, q_scale=q_scale, key_padding_mask=key_padding_mask,
    )  # fmt: skip
