"""Reference of adaptive multipole attention: N x N weights and selection scores, exact in float64."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from ...options import compute_dtype
from ...sequences import query_heads, real
from .call import AdaptiveCall
from .layout import Field, box_of, distances
from .routing import PART


def definition(call: AdaptiveCall) -> Tensor:
    """Run `reference` with `routing` on a checked call, in at least float32; returns the dtype of its queries."""
    q, k, v = (x.to(compute_dtype(call.q.dtype)) for x in call[:3])
    chosen = routing(q, k, call.field, call.select, call.exact, call.q_scale, call.mask)
    return reference(q, k, v, chosen, call.field, call.far, call.q_scale, call.mask).to(call.q.dtype)


def reference(
    q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, field: Field, far: str, q_scale: float, mask: Tensor | None = None
) -> Tensor:
    """Return o_t = sum_j w_tj v_j / sum_j w_tj, q [B, N, H, D], k [B, N, Hk, D], v [B, N, Hk, Dv] -> [B, N, H, Dv].

    chosen: [B, H, U, T] bool, the exact key tiles of each query tile. Exact pairs have the weight exp(s_tj), tokens of
    a far tile b exp(a_tb), where a_tb is the mean of s_tj over its tile, or zero with far="none". far="variance" adds
    half the variance of s_tj, of a diagonal covariance, to a_tb. far="first" adds to the weight of every token of the
    grid (sum of exp(a_tb) over far tiles / number of tiles) (s_tj - a_tb); this sums to zero.
    """
    live, (q, k, v) = _live(q, mask), query_heads(q, k, v, mask)
    q = q * q_scale
    s, member = q @ k.mT, _members(field, field.k_tile, live).to(q.dtype)
    n = member.sum(-2)
    mean = (member.mT @ k) / n.clamp(min=1)[..., None]
    variance = (member.mT @ (k - member @ mean).square()) / n.clamp(min=1)[..., None]
    a = q @ mean.mT
    b = a + q.square() @ variance.mT / 2 if far == "variance" else a
    own = _members(field, field.q_tile, live).to(q.dtype)
    near = own @ chosen.to(q.dtype)  # [B, H, N, T], 1 where a tile is exact for a query
    on_grid = own.sum(-1, keepdim=True)
    is_far = (on_grid * (1 - near)).bool() & (n > 0)[..., None, :]
    far_token = (is_far.to(q.dtype) @ member.mT).bool()
    power = torch.where(far_token, b @ member.mT, s).masked_fill(~live, float("-inf"))
    if far == "none":
        power = power.masked_fill(far_token, float("-inf"))
    top = power.amax(-1, keepdim=True)
    top = top.where(top.isfinite(), 0)
    w = (power - top).exp()
    total = w.sum(-1, keepdim=True)
    if far == "first":
        tiles = (n > 0).sum(-1)[..., None, None].clamp(min=1)
        average = (b - top).masked_fill(~is_far, float("-inf")).exp().sum(-1, keepdim=True) / tiles
        w = w + average * (s - a @ member.mT) * member.sum(-1)[..., None, :]
    return real(((w / total) @ v).transpose(1, 2), mask).contiguous()


def routing(
    q: Tensor, k: Tensor, field: Field, select: str, exact: int, q_scale: float, mask: Tensor | None = None
) -> Tensor:
    """Return the `exact` key tiles with the highest scores per query tile, [B, H, U, T] bool; of equal ones the
    first."""
    live, (q, k, _) = _live(q, mask), query_heads(q, k, k, mask)
    q = q * q_scale
    member, own = (_members(field, size, live).to(q.dtype) for size in (field.k_tile, field.q_tile))
    n = member.sum(-2)
    mean = (member.mT @ k) / n.clamp(min=1)[..., None]
    variance = (member.mT @ (k - member @ mean).square()) / n.clamp(min=1)[..., None]
    pooled = own if select == "mean" else _parts(field, live).to(q.dtype)
    m = pooled.sum(-2)[..., None]
    q, own = (pooled.mT @ q) / m.clamp(min=1), pooled.mT @ own  # own: number of queries of a part that a tile has
    b, spread = q @ mean.mT + q.square() @ variance.mT / 2, q.square() @ variance.mT
    p = (b + n.log()[..., None, :]).softmax(-1).nan_to_num(0)
    found = {
        "error": lambda: own.mT @ (p * spread),
        "mass": lambda: own.mT @ p,
        "mean": lambda: q @ mean.mT,
        "near": lambda: -distances(field, q.device).to(q).expand(*q.shape[:2], -1, -1),
    }[select]()
    if select != "near":
        found = found.masked_fill((n == 0)[..., None, :], float("-inf"))
    order = found.argsort(dim=-1, descending=True, stable=True)[..., :exact]
    return torch.zeros_like(found, dtype=torch.bool).scatter(-1, order, True)


def _live(q: Tensor, mask: Tensor | None) -> Tensor:
    return (torch.ones(q.shape[:2], dtype=torch.bool, device=q.device) if mask is None else mask)[:, None, None]


def _parts(field: Field, live: Tensor) -> Tensor:
    """Return which real tokens of the grid lie in which part of a query tile, [B, 1, N, parts] bool: `PART` tokens that
    are consecutive in the order of their interleaved coordinates."""
    box = box_of(field.grid, field.q_tile)
    tiles: dict[tuple[int, ...], list[tuple[list[int], int]]] = {}
    for token, place in enumerate(itertools.product(*map(range, field.grid))):
        tile = tuple(x // s for x, s in zip(place, box, strict=True))
        bits = [x % s >> i & 1 for i in reversed(range(8)) for x, s in zip(place, box, strict=True)]
        tiles.setdefault(tile, []).append((bits, token))
    number = torch.zeros(field.n_grid, dtype=torch.int64, device=live.device)
    for first, tokens in enumerate(tiles.values()):
        for i, (_, token) in enumerate(sorted(tokens)):
            number[token] = first * field.q_tile + i // PART
    inside = F.one_hot(number.unique(return_inverse=True)[1]).bool()
    return F.pad(inside, (0, 0, field.prefix, field.suffix)) & live.mT


def _members(field: Field, size: int, live: Tensor) -> Tensor:
    """Return which real tokens of the grid lie in which tile, [B, 1, N, tiles] bool."""
    places = torch.cartesian_prod(*(torch.arange(n, device=live.device) for n in field.grid)).view(field.n_grid, -1)
    number = torch.zeros_like(places[:, 0])
    for x, length, s in zip(places.unbind(-1), field.grid, box_of(field.grid, size), strict=True):
        number = number * -(-length // s) + x // s
    tiles = int(number.max()) + 1
    inside = number[:, None] == torch.arange(tiles, device=live.device)
    return F.pad(inside, (0, 0, field.prefix, field.suffix)) & live.mT
