"""Torch form of adaptive multipole attention, computed for groups of query tiles in at least float32.

Tokens are gathered into tiles. The far field is computed for all key tiles and the exact field for the selected ones,
and both are added in one sum of exponentials. Working memory is at most `BLOCK` numbers, or the memory of one query
tile; with gradients, intermediates are recomputed in the backward pass. The routing has no gradient.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ...sequences import real
from ..attention import SMALLEST, Heads, largest, to_layout
from .call import AdaptiveCall
from .layout import Field, distances, tokens_of
from .pooling import Pooled, pool, powers
from .routing import highest, nearest, scores

BLOCK = 2**25  # numbers in memory for one group of query tiles


class Keys(NamedTuple):
    """Keys and values. Tiles of the grid: k, v [B, H, T, W, .], slots with a real token [B or 1, 1, T, W], and pooled
    tiles. Tokens outside the grid: k, v [B, H, P, .], and mask of real ones, [B, 1, 1, P] or None."""

    k: Tensor
    v: Tensor
    live: Tensor
    pooled: Pooled
    k_outer: Tensor
    v_outer: Tensor
    live_outer: Tensor | None


def evaluate(call: AdaptiveCall, given: Tensor | None = None) -> Tensor:
    """Return o [B, N, H, Dv] in the dtype of q. given: exact tiles [B, H, U, k] if another form selected them."""
    x, field = to_layout(*call[:3], call.q_scale, call.mask), call.field
    keys, table = keys_of(x, field), tokens_of(field, field.q_tile, x.q.device)
    u = field.n_query_tiles
    q, live = rows(x.q, table[:u]), slots(x, table[:u])
    step = u if torch.compiler.is_compiling() else max(1, BLOCK // max(1, numbers(q, keys, call.exact)))
    parts = []
    for i in range(0, u, step):
        some = q.narrow(2, i, min(step, u - i))
        if given is None:
            chosen = route(some, live.narrow(2, i, min(step, u - i)), keys, call, i)
        else:
            chosen = given.narrow(2, i, min(step, u - i))
        if step < u:
            parts.append(checkpoint(read, some, chosen, keys, call.far, use_reentrant=False))
        else:
            parts.append(read(some, chosen, keys, call.far))
    found = torch.cat(parts, 2).flatten(2, 3)
    if field.n_outer:
        at = table[u:].flatten()[: field.n_outer]
        found = torch.cat([found, attend(x.q[..., at, :], x)], 2)
    place = table.new_zeros(table.numel()).scatter(0, table.flatten(), torch.arange(table.numel(), device=table.device))
    o = found[..., place[: field.n_tokens], :]
    return real(o.transpose(1, 2), call.mask).to(call.q.dtype).contiguous()


def keys_of(x: Heads, field: Field) -> Keys:
    """Return the keys and values that queries read."""
    table, t = tokens_of(field, field.k_tile, x.k.device), field.n_key_tiles
    live = slots(x, table[:t])
    k, v = (rows(y, table[:t]) for y in (x.k, x.v))
    outer = table[t:].flatten()[: field.n_outer]
    live_outer = None if x.live is None else x.live[..., outer, :].mT
    return Keys(k, v, live, pool(k, v, live), x.k[..., outer, :], x.v[..., outer, :], live_outer)


def rows(x: Tensor, table: Tensor) -> Tensor:
    """Gather the rows [.., I, J, D] of x [.., N, D] by a table [I, J]; index N gives zeros."""
    return F.pad(x, (0, 0, 0, 1))[..., table, :]


def slots(x: Heads, table: Tensor) -> Tensor:
    """Return which slots of a table hold a real token, [B or 1, 1, I, J]."""
    full = (table < x.k.shape[-2])[None, None]
    return full if x.live is None else full & F.pad(x.live, (0, 0, 0, 1))[..., table, 0]


def numbers(q: Tensor, keys: Keys, exact: int) -> int:
    """Return the numbers in memory per query tile: its weights, and the gathered keys and values."""
    b, h, t, w, d = keys.k.shape
    near = exact * w + keys.k_outer.shape[2]
    return b * h * (2 * q.shape[3] * (t + near) + exact * w * (d + keys.v.shape[-1]))


@torch.no_grad()
def route(q: Tensor, live: Tensor, keys: Keys, call: AdaptiveCall, first: int) -> Tensor:
    """Return the exact tiles [B, H, C, k] of the query tiles q [B, H, C, W, D]; first: index of the first one."""
    if call.select == "near":
        chosen = nearest(call.field, call.exact, q.device).narrow(0, first, q.shape[2])
        return chosen.expand(*q.shape[:2], -1, -1)
    found = scores(q, live[..., None], keys.pooled, call.select)
    return highest(found, keys.pooled.n, call.exact)


@torch.no_grad()
def selection(call: AdaptiveCall) -> tuple[Tensor, Tensor]:
    """Return the scores of all key tiles [B, H, U, T] and the exact tiles [B, H, U, k]."""
    x, field = to_layout(*call[:3], call.q_scale, call.mask), call.field
    keys, table = keys_of(x, field), tokens_of(field, field.q_tile, x.q.device)[: field.n_query_tiles]
    q, live = rows(x.q, table), slots(x, table)
    chosen = route(q, live, keys, call, 0)
    if call.select == "near":
        return -distances(field, q.device).expand(*chosen.shape[:3], -1), chosen
    return scores(q, live[..., None], keys.pooled, call.select), chosen


def read(q: Tensor, chosen: Tensor, keys: Keys, far: str) -> Tensor:
    """Return o [B, H, C, W, Dv] of the queries in some tiles."""
    x = keys.pooled
    n = x.n[:, :, None, None]
    is_far = torch.ones(chosen.shape[:3] + n.shape[-1:], dtype=torch.bool, device=q.device).scatter(-1, chosen, False)
    is_far &= far != "none"
    power = powers(q, x, far == "variance").masked_fill(~(is_far[:, :, :, None] & (n > 0)), float("-inf"))
    exact: list[tuple[Any, ...]] = [
        (take(keys.k, chosen), take(keys.v, chosen), take(keys.live, chosen)[:, :, :, None])
    ]
    if keys.k_outer.shape[2]:
        one = (t.unsqueeze(2) for t in (keys.k_outer, keys.v_outer))
        exact.append((*one, True if keys.live_outer is None else keys.live_outer[:, :, None]))
    scores = [(q @ k.mT).masked_fill(~torch.as_tensor(live, device=q.device), float("-inf")) for k, _, live in exact]
    top = largest(power + n.clamp(min=1).log(), *scores)
    p = (power - top).exp()
    o, z = (p * n) @ x.value.unsqueeze(2), (p * n).sum(-1, keepdim=True)
    for (_, v, _), s in zip(exact, scores, strict=True):
        w = (s - top).exp()
        o, z = o + w @ v, z + w.sum(-1, keepdim=True)
    if far == "first":
        o = o + p.sum(-1, keepdim=True) / x.tiles[..., None, None] * (q @ x.moment.unsqueeze(2))
    return o / z.clamp(min=SMALLEST)


def attend(q: Tensor, x: Heads) -> Tensor:
    """Return exact softmax attention of the queries q [B, H, P, D] to all tokens, [B, H, P, Dv]."""
    power = q @ x.k.mT
    if x.live is not None:
        power = power.masked_fill(~x.live.mT, float("-inf"))
    w = (power - largest(power)).exp()
    return (w @ x.v) / w.sum(-1, keepdim=True).clamp(min=SMALLEST)


def take(x: Tensor, chosen: Tensor) -> Tensor:
    """Return the slots of the selected tiles, [B, H, C, k W, ..], of x [B or 1, H or 1, T, W, ..]. By indexing, whose
    backward is deterministic."""
    b, h = (
        torch.arange(n, device=x.device) if m > 1 else torch.zeros(n, dtype=torch.int64, device=x.device)
        for n, m in zip(chosen.shape[:2], x.shape[:2], strict=True)
    )
    return x[b[:, None, None, None], h[None, :, None, None], chosen].flatten(3, 4)
