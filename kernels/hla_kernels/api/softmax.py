"""Public operators that approximate softmax attention.

Symbols: `softmax/taylor/__init__.py`, `softmax/multipole.py`, `softmax/adaptive/__init__.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Never

from torch import Tensor

from ..checks import check_unknown
from ..op import run_multipole, run_taylor


def taylor2(
    q: Tensor, k: Tensor, v: Tensor, coefficients: Tensor, *, narrow: Sequence[Tensor] | None = None,
    normalize: bool = True, q_scale: float = 1.0, key_padding_mask: Tensor | None = None, impl: str = "auto",
    **unknown: Never,
) -> Tensor:  # fmt: skip
    """Softmax attention to second order around uniform weights: o_t = vbar + mean_j w_tj (v_j - vbar) / z_t.

    w_tj = c1 s_tj + c2 r_tj^2 / 2, s_tj = q_scale q_t.(k_j - kbar), r = s; z_t = 1 + c2 mean_j r_tj^2 / 2 with
    normalize, else 1. q [B, N, H, D], k [B, N, Hk, D], v [B, N, Hk, Dv] -> [B, N, H, Dv], tokens before
    heads, two-sided.

    coefficients  [H, 2], (c1, c2) per head, differentiable; (1, 1) with normalize is the average with the weights
                  1 + s + s^2 / 2. With normalize c2 must not be negative; values are not checked
    narrow        (q2 [B, N, H, R], k2 [B, N, Hk, R]): r_tj = q_scale q2_t.(k2_j - mean k2), which reduces the state
                  from D (D + 1) / 2 x Dv to R (R + 1) / 2 x Dv numbers
    q_scale       scale of softmax, such as D^-1/2
    key_padding_mask   [B, N] bool, True for real tokens, as in `api`
    impl          as in `api`

    Raises ValueError for wrong shapes, dtypes, devices and names. Reverse mode once, as in `api`. The expansion with
    its cross products as features: Arora et al., arXiv 2402.18668, section 4.1 (causal and without centring).
    """
    check_unknown(taylor2, unknown)
    return run_taylor(
        (q, k, v), coefficients, narrow=narrow, normalize=normalize, q_scale=q_scale, impl=impl,
        key_padding_mask=key_padding_mask,
    )  # fmt: skip


def taylor2_qkvpacked(
    qkv: Tensor, coefficients: Tensor, *, normalize: bool = True, q_scale: float = 1.0,
    key_padding_mask: Tensor | None = None, impl: str = "auto", **unknown: Never,
) -> Tensor:  # fmt: skip
    """`taylor2` of qkv [B, N, 3, H, D] -> [B, N, H, D], without `narrow`; its gradient is one packed tensor.

    key_padding_mask [B, N] is True for real tokens.
    """
    check_unknown(taylor2_qkvpacked, unknown)
    return run_taylor(
        (qkv,), coefficients, normalize=normalize, q_scale=q_scale, impl=impl, key_padding_mask=key_padding_mask
    )


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
                  additional term exp(a_tb) (s_tj - a_tb)^2 / 2
    prefix, suffix  number of tokens before and after the grid (class, text): near to all tokens
    q_scale       scale of softmax, such as D^-1/2
    key_padding_mask   [B, N] bool, True for real tokens, as in `api`
    impl          as in `api`; there is no Triton form

    Raises ValueError for wrong shapes, dtypes, devices and names. Plain torch code with all derivatives, for all pairs
    of tokens but with bounded memory. Near field and expansions of the far field: Greengard and Rokhlin, J. Comput.
    Phys. 73, 1987.
    """
    check_unknown(multipole, unknown)
    return run_multipole(
        "multipole", (q, k, v), impl, grid=grid, blocks=blocks, radius=radius, degree=degree, prefix=prefix,
        suffix=suffix, q_scale=q_scale, key_padding_mask=key_padding_mask,
    )  # fmt: skip


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
