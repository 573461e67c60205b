"""Public operator of block mixing; symbols in `blockmix/__init__.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Never, Required, TypedDict, Unpack

from torch import Tensor

from ..blockmix.streaming import BlockState
from ..checks import check_unknown
from ..op import run_blocks
from . import Result


def mhla(
    q: Tensor, k: Tensor, v: Tensor, mixing: Tensor, *, grid: Sequence[int], blocks: Sequence[int],
    feature_map: str | None = "relu", normalize: bool = True, order: str = "la", causal: bool | str = False,
    prefix: int = 0, token_mask: Tensor | None = None, rotary: tuple[Tensor, Tensor] | None = None,
    rotary_half: bool = False, scale: float | None = None, q_scale: float = 1.0, eps: float = 1e-6,
    moments: str = "bfloat16", state: BlockState | None = None, return_state: bool = False, impl: str = "auto",
    **unknown: Never,
) -> Result:  # fmt: skip
    """Block mixing: each block of queries reads a mixture of the moments of all blocks of tokens.

    o_t = q_t' P~_i / (q_t' z~_i + eps) for t in block i, P~_i = Sum_b m_ib s Sum_{j in b} k_j v_j', z~ the same with
    v = 1; the denominator only with normalize. order="ahla": q_t' R~_i P~_i, "hla2": q_t' S~_i C~_i (`blockmix`).

    q [B, N, H, D], k [B, N, Hk, D], v [B, N, Hk, Dv], tokens before heads and in raster order -> [B, N, H, Dv]; N =
    prefix + prod(grid).

    mixing        [M, M] or [H, M, M], row = block of the query, differentiable. With normalize it must not be negative;
                  values are not checked
    grid, blocks  lengths of the axes, (H, W), (T, H, W) or (N,), and the number of blocks along each; if they do not
                  divide, sizes differ by one
    prefix        number of tokens before the grid (class, register, text): block 0, so that M = 1 + prod(blocks)
    order         "la", "ahla" or "hla2"
    causal        token t attends to tokens j <= t, also inside its block and in every product of an order. Blocks must
                  be runs of tokens: only the first axis may be divided. The grid defines where blocks begin: fewer
                  tokens than it holds are allowed, and results do not depend on later tokens. "frame": tokens attend to
                  all tokens of their frame (the first axis of the grid) and of earlier ones; blocks divide a frame
                  alone, (1, 4, 4), and their moments are sums over frames; first order. The Triton form (without a
                  state) mixes the blocks of all frames, and subtracts the mean of v over all frames before rounding
    token_mask    [B, N] bool, True for real tokens (as key_padding_mask in `api`), two-sided only. Padded tokens are
                  neither read nor written: they do not enter moments, N of the scale counts real tokens, and their
                  outputs and gradients are 0
    rotary        (cos, sin), [N, D / 2] or [N, H, D / 2] each, without gradient: rotates phi(q) and phi(k) in the
                  numerator; the denominator uses unrotated features, which keep it positive. Channels (2i, 2i + 1) form
                  a pair, or with rotary_half (i, i + D / 2); if phi widens, every group of D features is rotated
    feature_map, normalize, eps, q_scale, impl   as in `api`
    scale         factor of each moment; None is M / N two-sided, a mean if the rows of mixing sum to one (uniform
                  mixing 1 / M equals `linear_attention`, `ahla`, `hla2`), and 1 causal
    moments       precision of the stored moments of bfloat16 tokens in the Triton form, and of the gradient of mixing:
                  "bfloat16" (half the memory; d mixing has an error of 1e-3) or "float32" (d mixing is accurate to
                  float32, but slower). Moments of other tokens, of higher orders and (without rotary) of the ratio of
                  elu1 are always float32, and float64 for float64 tokens, as are all moments of the other forms

    state, return_state   causal only: the result is (o, state), and a later call continues with the following tokens,
                  one or many. The state holds the moments of all blocks: M F Dv numbers per head, M (F^2 + 2 F Dv) for
                  "ahla" and "hla2", and with normalize the same for Dv = 1 in addition. Cost per token: M F Dv, or M
                  F^2 Dv. rotary belongs to the given tokens, and so does the grid of frames. In causal order, continue
                  beyond the grid with a longer one whose first blocks are the same: (64 M,) in M blocks. F is the
                  number of features, D or 2 D

    Raises ValueError for wrong shapes, dtypes, devices, names, and undefined combinations. Reverse mode once, as in
    `api`. First order: MHLA, token-level multi-head linear attention, o_i = q (Sum_b m_ib S_b) / (q . Sum_b m_ib z_b),
    with the denominator of the paper, which differs from its released code.
    """
    check_unknown(mhla, unknown)
    return run_blocks(
        (q, k, v), mixing, impl=impl, grid=grid, blocks=blocks, feature_map=feature_map, normalize=normalize,
        order=order, causal=causal, prefix=prefix, token_mask=token_mask, rotary=rotary, rotary_half=rotary_half,
        scale=scale, q_scale=q_scale, eps=eps, moments=moments, state=state, return_state=return_state,
    )  # fmt: skip


class Keywords(TypedDict, total=False):
    """Keyword options of `mhla`. token_mask [B, N] is True for real tokens."""

    grid: Required[Sequence[int]]
    blocks: Required[Sequence[int]]
    feature_map: str | None
    normalize: bool
    order: str
    causal: bool | str
    prefix: int
    token_mask: Tensor | None
    rotary: tuple[Tensor, Tensor] | None
    rotary_half: bool
    scale: float | None
    q_scale: float
    eps: float
    moments: str
    state: BlockState | None
    return_state: bool
    impl: str


def mhla_qkvpacked(qkv: Tensor, mixing: Tensor, **options: Unpack[Keywords]) -> Result:
    """`mhla` of qkv [B, N, 3, H, D] -> [B, N, H, D], with one packed gradient; token_mask: True for real tokens."""
    check_unknown(mhla, options)
    for name in ("grid", "blocks"):
        if name not in options:
            raise ValueError(f"mhla_qkvpacked needs {name}, one positive integer for each axis, such as (16, 16).")
    return run_blocks((qkv,), mixing, **options)
