"""Checks of a block-mixing call, and its canonical form. Errors are ValueErrors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checks import (
    cast_tensors,
    check_axes,
    check_features,
    check_name,
    check_parameter,
    check_ratio,
    check_sequences,
    check_values,
    is_count,
)
from .layout import MOMENTS, ORDERS, BlockOptions, Layout
from .streaming import BlockState, check_state


class BlockCall(NamedTuple):
    """A checked call: tensors cast for autocast, options in canonical form."""

    q: Tensor
    k: Tensor
    v: Tensor
    mixing: Tensor
    options: BlockOptions
    mask: Tensor | None
    rotary: tuple[Tensor, Tensor] | None
    state: BlockState | None = None
    return_state: bool = False


def prepare(
    q: Tensor, k: Tensor, v: Tensor, mixing: Tensor, *, grid: Sequence[int], blocks: Sequence[int], prefix: int = 0,
    token_mask: Tensor | None = None, rotary: tuple[Tensor, Tensor] | None = None,
    state: BlockState | None = None, return_state: bool = False, **options: Any,
) -> BlockCall:  # fmt: skip
    """Check a call. Autocast casts tokens, except float64."""
    q, k, v = cast_tensors(q, k, v)
    layout = check_layout(grid, blocks, prefix)
    kept = BlockOptions(layout, **options)
    _check_options(kept)
    check_features(q.shape[3], kept.feature_map)
    if not isinstance(return_state, bool):
        raise ValueError(f"return_state must be True or False, got {return_state!r}.")
    if (return_state or state is not None) and not kept.causal:
        raise ValueError("state and return_state need causal=True: two-sided tokens are all there at once.")
    check_tokens(q.shape[1], kept)
    check_mixing(mixing, layout, q)
    check_sequences(q, token_mask, None, None)
    if token_mask is not None and kept.causal:
        raise ValueError(
            "token_mask needs causal=False: the result of a causal token does not depend on what comes after it, so "
            "pad at the end with finite numbers such as zeros."
        )
    check_rotary(rotary, q)
    if state is not None:
        check_state(state, kept, q, k, v)
    tables = None if rotary is None else (rotary[0], rotary[1])
    return BlockCall(q, k, v, mixing, kept, token_mask, tables, state, return_state)


def check_layout(grid: Any, blocks: Any, prefix: Any) -> Layout:
    """Return the layout. Raises ValueError unless every axis of the grid has between 1 and its length blocks."""
    check_axes("grid", grid)
    check_axes("blocks", blocks)
    if len(grid) != len(blocks):
        raise ValueError(f"grid and blocks must have one number for each axis, got {tuple(grid)} and {tuple(blocks)}.")
    for length, m in zip(grid, blocks, strict=True):
        if m > length:
            raise ValueError(
                f"An axis cannot have more blocks than tokens: blocks {tuple(blocks)}, grid {tuple(grid)}."
            )
    if not is_count(prefix):
        raise ValueError(f"prefix must be the number of tokens before the grid, at least 0, got {prefix!r}.")
    return Layout(tuple(grid), tuple(blocks), prefix)  # integers may be symbolic while compiling


def _check_options(o: BlockOptions) -> None:
    check_name("order", o.order, ORDERS)
    check_name("moments", o.moments, MOMENTS)
    check_values(o, "rotary_half")
    if o.causal == "frame":
        _check_frames(o)
    if o.causal is True and any(m > 1 for m in o.layout.blocks[1:]):
        raise ValueError(
            "causal needs blocks that are runs of the raster order, cut along the first axis alone, "
            f"got blocks {o.layout.blocks}."
        )
    if o.normalize:
        check_ratio(o)


def _check_frames(o: BlockOptions) -> None:
    if len(o.layout.grid) < 2 or o.layout.blocks[0] != 1 or o.layout.prefix:
        raise ValueError(
            "causal='frame' needs a grid (frames, ..) without prefix tokens, and blocks that divide a frame alone, "
            f"such as (1, 4, 4), got grid {o.layout.grid}, blocks {o.layout.blocks} and prefix {o.layout.prefix}."
        )
    if o.order != "la":
        raise ValueError(f"causal='frame' is for order='la', got order={o.order!r}.")


def check_tokens(n: int, o: BlockOptions) -> None:
    """Raise ValueError unless n is the number of tokens of the grid and its prefix, or for causal calls less."""
    want, layout = o.layout.n_tokens, o.layout
    if n != want and not (o.causal is True and n < want):
        more = " or fewer" if o.causal is True else ""
        raise ValueError(
            f"The grid {layout.grid} with {layout.prefix} prefix tokens needs {want} tokens{more}, got {n}."
        )


def check_mixing(mixing: Any, layout: Layout, q: Tensor) -> None:
    """Raise ValueError unless mixing is [M, M] or [H, M, M]."""
    m, h = layout.n_blocks, q.shape[2]
    also = " (one block is the prefix)" if layout.prefix else ""
    allowed = f"[{m}, {m}] or [{h}, {m}, {m}]{also}"
    check_parameter("mixing", mixing, q.device, ((m, m), (h, m, m)), allowed)


def check_rotary(rotary: Any, q: Tensor) -> None:
    """Raise ValueError unless rotary is None or the tables (cos, sin) of the tokens of q."""
    if rotary is None:
        return
    n, h, d = q.shape[1], q.shape[2], q.shape[3]
    shapes = ((n, d // 2), (n, h, d // 2))
    if not isinstance(rotary, Sequence) or len(rotary) != 2 or not all(isinstance(t, Tensor) for t in rotary):
        raise ValueError("rotary must be two tensors, cos and sin.")
    if d % 2 or any(tuple(t.shape) not in shapes for t in rotary) or rotary[0].shape != rotary[1].shape:
        raise ValueError(
            f"rotary must be cos and sin of shape {list(shapes[0])} or {list(shapes[1])} (an even head dimension), "
            f"got {[list(t.shape) for t in rotary]} for head dimension {d}."
        )
    if torch.is_grad_enabled() and any(t.requires_grad for t in rotary):
        raise ValueError("rotary has no gradient: turn phi(q) and phi(k) outside, or give detached tables.")
    if any(t.device != q.device or not t.dtype.is_floating_point for t in rotary):
        raise ValueError(f"rotary must be floating point on the device of q, {q.device}.")
