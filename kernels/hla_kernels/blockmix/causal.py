"""Causal block mixing.

Tokens attend to earlier blocks through moments, and to tokens of their own block through scores.

ahla: o_t = Sum m_ti A_ti m_tj A_ij v_j over j <= i <= t. hla2: A_ji instead of A_ij, over i <= j <= t. This is the
two-sided form with every product causal. With scaled queries s q, I = [j <= i] q k' inside a block, and per block

    la    P = k'v                           o_t = q_t (P~ + m_cc P)
    ahla  R = k'q   P = k'v   E = k'(I v)   o_t = q_t (Sum_a m_ca (R_a T_ca + m_ca E_a) + m_cc (R P~ + m_cc E))
    hla2  S = k'k   C = q'v   E = (I k)'v   o_t = q_t (Sum_a m_ca (T_ca C_a + m_ca E_a) + m_cc (S~ C + m_cc E))

for t in block c. a runs over the blocks before c; P~ and S~ are mixed over these blocks; T_ca mixes P or S over the
blocks before a; moments without an index are sums over the tokens of block c up to t.
"""

from __future__ import annotations

import torch
from torch import Tensor

MOMENTS = {"la": ("P",), "ahla": ("R", "P", "E"), "hla2": ("S", "C", "E")}
OF_QUERIES, OF_FEATURES = ("R", "C", "E"), ("R", "S")  # moments that contain queries; moments of size F x F
Moments = tuple[Tensor, ...]


def mix(moments: Tensor, m: Tensor) -> Tensor:
    """Return Sum_b m_ib moments_b: [B, Hk, 1 or G, M, F, E], [1 or Hk, 1 or G, C, M] -> [B, Hk, 1 or G, C, F, E]."""
    return (m @ moments.flatten(-2)).unflatten(-1, moments.shape[-2:])


def own(m: Tensor) -> Tensor:
    """Return m_ii [.., M, 1, 1]."""
    return m.diagonal(dim1=-2, dim2=-1)[..., None, None]


def no_moments(q: Tensor, k: Tensor, v: Tensor, n_blocks: int, order: str) -> Moments:
    """Return zero moments of `order` for features q, k and values v [B, Hk, 1 or G, .., .]."""
    f, e = k.shape[-1], v.shape[-1]
    of_keys, of_all = (torch.broadcast_shapes(k.shape[:3], x.shape[:3]) for x in (v, q))
    shapes = {
        "la": ((of_keys, e),),
        "ahla": ((of_all, f), (of_keys, e), (of_all, e)),
        "hla2": ((k.shape[:3], f), (torch.broadcast_shapes(q.shape[:3], v.shape[:3]), e), (of_all, e)),
    }[order]
    return tuple(v.new_zeros((*heads, n_blocks, f, width)) for heads, width in shapes)


def step(
    q: Tensor, k: Tensor, v: Tensor, m: Tensor, order: str, before: Moments, rows: Tensor | None = None
) -> tuple[Tensor, Moments]:
    """Return (W v, moments after these tokens) for blocks [.., C, W, .] with scaled queries; rows [C]: their numbers,
    all M blocks if None; before: moments of the preceding tokens, of all blocks."""
    inside = (q @ k.mT).tril()
    if rows is None:
        here, low, mu = before, m.tril(-1), own(m)
    else:
        here, row = tuple(x.index_select(-3, rows) for x in before), m.index_select(-2, rows)
        low = row * (torch.arange(m.shape[-1], device=m.device) < rows[:, None])
        mu = own(row.index_select(-1, rows))

    def after(*new: Tensor) -> Moments:
        both = zip(before, new, strict=True)
        return tuple(x + y if rows is None else x.index_add(-3, rows, y) for x, y in both)

    if order == "la":
        moments = after(k.mT @ v)
        return q @ (mix(moments[0], low) + mu * here[0]) + mu * (inside @ v), moments
    a, b, pair = here
    if order == "ahla":
        reached = inside @ v + q @ b  # inner product of each token with its block so far
        moments = after(k.mT @ q, k.mT @ v, k.mT @ reached)
        mixed = mix(moments[1], low)
        operator, y = a @ mixed, inside @ (q @ mixed + mu * reached)
    else:
        reached = inside @ k + q @ a
        moments = after(k.mT @ k, q.mT @ v, reached.mT @ v)
        mixed = mix(moments[0], low)
        operator, y = mixed @ b, (q @ (q @ mixed + mu * reached).mT).tril() @ v
    return q @ (pairs(low, moments, order) + mu * (operator + mu * pair)) + mu * y, moments


def pairs(low: Tensor, moments: Moments, order: str) -> Tensor:
    """Return Sum_a m_ca (R_a T_ca + m_ca E_a) or Sum_a m_ca (T_ca C_a + m_ca E_a) for the rows `low` [.., C, M] of
    m."""
    a, b, pair = moments
    summed, other = (b, a) if order == "ahla" else (a, b)
    operator = mix(pair, low * low)
    heads = torch.broadcast_shapes(low.shape[:-2], summed.shape[:-3])
    total = summed.new_zeros((*heads, low.shape[-2], *summed.shape[-2:]))
    for i in range(low.shape[-1]):
        w, x = low[..., i, None, None], other[..., i, None, :, :]
        operator = operator + w * (x @ total if order == "ahla" else total @ x)
        total = total + w * summed[..., i, None, :, :]
    return operator
