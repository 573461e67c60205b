"""Public operator of second-order Taylor attention; symbols in `softmax/taylor/__init__.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Never

from torch import Tensor

from ..checks import check_unknown
from ..op import run_taylor


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
    """`taylor2` of qkv [B, N, 3, H, D] -> [B, N, H, D], without `narrow`; its gradient is one packed tensor."""
    check_unknown(taylor2_qkvpacked, unknown)
    return run_taylor(
        (qkv,), coefficients, normalize=normalize, q_scale=q_scale, impl=impl, key_padding_mask=key_padding_mask
    )
