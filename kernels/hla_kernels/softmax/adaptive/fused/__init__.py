"""Triton form of adaptive multipole attention; weights are never stored.

Tokens are not reordered: a table maps the slots of each tile to tokens (none for padding), and every pass gathers rows.
Key tiles are pooled, scored and selected. One program per query tile then reads the far tiles and the selected keys.
Backward: one program per query tile, one per group of far tiles, and one per 64 keys, which loops over the query tiles
that selected them. No atomics. `tiles` describes the order of the operands of products.

Reading order: tiles, pool, choose, forward, backward, plan, launch, operator. The first call imports Triton.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ....sequences import real
from ..call import AdaptiveCall
from .operator import adaptive_op

WIDEST = 128
HEADS = 2**16  # limit of the second axis of a launch grid
TILES = 2**14  # maximum number of key tiles of the grid, since one program selects from their scores
Q_TILES, K_TILES, FARS = (64,), (4, 8, 16, 32, 64), ("first", "mean")


def why_not(call: AdaptiveCall) -> str | None:
    """Return the reason why the Triton form does not support a call, or None; `evaluate` does not check it."""
    q, v, field, form = call.q, call.v, call.field, "the Triton form of adaptive_multipole"
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"{form} is for bfloat16, float16 and float32, not {q.dtype}"
    if q.shape[3] != v.shape[3] or q.shape[3] % 8 or q.shape[3] > WIDEST:
        return f"{form} needs heads of a multiple of 8 channels, at most {WIDEST}, got {q.shape[3]} and {v.shape[3]}"
    if call.far not in FARS:
        return f"{form} has far={' or '.join(map(repr, FARS))}, got {call.far!r}"
    if field.q_tile not in Q_TILES or field.k_tile not in K_TILES:
        return f"{form} has q_tile {Q_TILES} and k_tile {K_TILES}, got {field.q_tile} and {field.k_tile}"
    if q.shape[0] * q.shape[2] >= HEADS:
        return f"{form} is for fewer than {HEADS} heads of a batch, got {q.shape[0] * q.shape[2]}"
    if field.n_key_tiles > TILES:
        return f"{form} is for at most {TILES} key tiles, got {field.n_key_tiles}"
    return None


def evaluate(call: AdaptiveCall) -> Tensor:
    """Return o [B, N, H, D]."""
    return real(_outputs(call)[0], call.mask)


def chosen(call: AdaptiveCall) -> Tensor:
    """Return the exact key tiles in ascending order, int64 [B, H, U, k]."""
    (b, _, h, _), listed = call.q.shape, _outputs(call)[-1]
    found = listed[..., : call.exact].long()  # tiles of tokens outside the grid follow
    return found.expand(b * h, -1, -1).unflatten(0, (b, h))


def _outputs(call: AdaptiveCall) -> tuple[Tensor, ...]:
    field, mask = call.field, call.mask
    q, k, v = (real(x, mask) for x in call[:3])
    options = (list(field.grid), *field[1:], call.exact, call.select, call.far, call.q_scale)
    return adaptive_op(q, k, v, mask, *options)
