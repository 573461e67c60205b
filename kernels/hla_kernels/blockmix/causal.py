"""Causal block mixing, forward and backward.

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


def mix_grad(d_mixed: Tensor, moments: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of the moments and of m [B, Hk, G, M, M] from the gradient of the mixed moments."""
    return mix(d_mixed, m.mT), d_mixed.flatten(-2) @ moments.flatten(-2).mT


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


def step(q: Tensor, k: Tensor, v: Tensor, m: Tensor, order: str, before: Moments) -> tuple[Tensor, Moments]:
    """Return (W v, moments after these tokens) for blocks [.., M, W, .] with scaled queries; before: moments of the
    preceding tokens."""
    inside, low, mu = (q @ k.mT).tril(), m.tril(-1), own(m)
    if order == "la":
        moment = before[0] + k.mT @ v
        return q @ (mix(moment, low) + mu * before[0]) + mu * (inside @ v), (moment,)
    a, b, pair = before
    if order == "ahla":
        reached = inside @ v + q @ b  # inner product of each token with its block so far
        after = a + k.mT @ q, b + k.mT @ v, pair + k.mT @ reached
        mixed = mix(after[1], low)
        operator, y = a @ mixed, inside @ (q @ mixed + mu * reached)
    else:
        reached = inside @ k + q @ a
        after = a + k.mT @ k, b + q.mT @ v, pair + reached.mT @ v
        mixed = mix(after[0], low)
        operator, y = mixed @ b, (q @ (q @ mixed + mu * reached).mT).tril() @ v
    earlier, _ = pairs(low, *after, order)
    return q @ (earlier + mu * (operator + mu * pair)) + mu * y, after


def one(
    q: Tensor, k: Tensor, v: Tensor, m: Tensor, order: str, before: Moments, block: Tensor
) -> tuple[Tensor, Moments]:
    """Run `step` for one token [.., 1, F] of the block `block` [1]."""
    row = m.index_select(-2, block)
    mu, low = row.index_select(-1, block), row * (torch.arange(m.shape[-1], device=m.device) < block)

    def add(moment: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
        """Return the moments (of all blocks, of this block) including the token."""
        after = moment.index_add(-3, block, new[..., None, :, :])
        return after, after.index_select(-3, block).squeeze(-3)

    if order == "la":
        moment, here = add(before[0], k.mT @ v)
        return q @ (mix(moment, low).squeeze(-3) + mu * here), (moment,)
    if order == "ahla":
        a, here_a = add(before[0], k.mT @ q)
        b, here_b = add(before[1], k.mT @ v)
        pair, here = add(before[2], k.mT @ (q @ here_b))
        operator = here_a @ mix(b, low).squeeze(-3)
    else:
        a, here_a = add(before[0], k.mT @ k)
        b, here_b = add(before[1], q.mT @ v)
        pair, here = add(before[2], (q @ here_a).mT @ v)
        operator = mix(a, low).squeeze(-3) @ here_b
    earlier, _ = pairs(low, a, b, pair, order)
    return q @ (earlier.squeeze(-3) + mu * (operator + mu * here)), (a, b, pair)


def pairs(low: Tensor, a: Tensor, b: Tensor, pair: Tensor, order: str) -> tuple[Tensor, list[Tensor]]:
    """Return Sum_a m_ca (R_a T_ca + m_ca E_a) or Sum_a m_ca (T_ca C_a + m_ca E_a) for the rows `low` [.., C, M] of m,
    and T_ca [.., C, F, E] for each a."""
    summed, other = (b, a) if order == "ahla" else (a, b)
    operator, kept = mix(pair, low * low), []
    heads = torch.broadcast_shapes(low.shape[:-2], summed.shape[:-3])
    total = summed.new_zeros((*heads, low.shape[-2], *summed.shape[-2:]))
    for i in range(low.shape[-1]):
        kept.append(total)
        w, x = low[..., i, None, None], other[..., i, None, :, :]
        operator = operator + w * (x @ total if order == "ahla" else total @ x)
        total = total + w * summed[..., i, None, :, :]
    return operator, kept


def pairs_grad(
    d: Tensor, low: Tensor, a: Tensor, b: Tensor, pair: Tensor, kept: list[Tensor], order: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of low [B, Hk, G, M, M], a, b and pair (for all query heads) from the gradient d of the
    sums of `pairs`."""
    summed, other = (b, a) if order == "ahla" else (a, b)
    d_pair, d_square = mix_grad(d, pair, low * low)
    d_total, columns, d_other, d_summed = torch.zeros_like(kept[0] * d[..., :1, :1]), [], [], []
    for i in reversed(range(low.shape[-1])):
        w, x, total = low[..., i, None, None], other[..., i, None, :, :], kept[i]
        product = x @ total if order == "ahla" else total @ x
        columns.append((d * product).sum((-2, -1)) + (d_total * summed[..., i, None, :, :]).sum((-2, -1)))
        d_summed.append((w * d_total).sum(-3))
        d_other.append((w * (d @ total.mT if order == "ahla" else total.mT @ d)).sum(-3))
        d_total = d_total + w * (x.mT @ d if order == "ahla" else d @ x.mT)
    d_low = torch.stack(columns[::-1], -1) + 2 * low * d_square
    ds, do = torch.stack(d_summed[::-1], -3), torch.stack(d_other[::-1], -3)
    return (d_low, do, ds, d_pair) if order == "ahla" else (d_low, ds, do, d_pair)


def gradient(dy: Tensor, q: Tensor, k: Tensor, v: Tensor, m: Tensor, order: str) -> tuple[Tensor, ...]:
    """Return (dq, dk, dv, dm) of `step` without preceding tokens."""
    return {"la": _la_grad, "ahla": _ahla_grad, "hla2": _hla2_grad}[order](dy, q, k, v, m)


def _la_grad(dy: Tensor, q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> tuple[Tensor, ...]:
    inside, low, mu, moment = (q @ k.mT).tril(), m.tril(-1), own(m), k.mT @ v
    d, d_low = mix_grad(q.mT @ dy, moment, low)
    d_inside = mu * (dy @ v.mT).tril()
    dq, dk = dy @ mix(moment, low).mT + d_inside @ k, v @ d.mT + d_inside.mT @ q
    dv = k @ d + mu * (inside.mT @ dy)
    return dq, dk, dv, _rows(d_low, (dy * (inside @ v)).sum((-2, -1)))


def _ahla_grad(dy: Tensor, q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> tuple[Tensor, ...]:
    inside, low, mu = (q @ k.mT).tril(), m.tril(-1), own(m)
    reached = inside @ v
    a, b, pair = k.mT @ q, k.mT @ v, k.mT @ reached
    mixed = mix(b, low)
    seen = q @ mixed + mu * reached
    operator, kept = pairs(low, a, b, pair, "ahla")
    d_low, da, db, d_pair = pairs_grad(q.mT @ dy, low, a, b, pair, kept, "ahla")
    d_seen = mu * (inside.mT @ dy)
    d_own = (dy * (inside @ seen)).sum((-2, -1)) + (d_seen * reached).sum((-2, -1))
    d_mixed, d_low_mixed = mix_grad(q.mT @ d_seen, b, low)
    db = db + d_mixed
    d_reached = mu * d_seen + k @ d_pair
    d_inside = (mu * (dy @ seen.mT) + d_reached @ v.mT).tril()
    dq = dy @ operator.mT + d_seen @ mixed.mT + k @ da + d_inside @ k
    dk = reached @ d_pair.mT + q @ da.mT + v @ db.mT + d_inside.mT @ q
    return dq, dk, inside.mT @ d_reached + k @ db, _rows(d_low + d_low_mixed, d_own)


def _hla2_grad(dy: Tensor, q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> tuple[Tensor, ...]:
    inside, low, mu = (q @ k.mT).tril(), m.tril(-1), own(m)
    reached = inside @ k
    a, b, pair = k.mT @ k, q.mT @ v, reached.mT @ v
    mixed = mix(a, low)
    seen = q @ mixed + mu * reached
    scores = (q @ seen.mT).tril()
    operator, kept = pairs(low, a, b, pair, "hla2")
    d_low, da, db, d_pair = pairs_grad(q.mT @ dy, low, a, b, pair, kept, "hla2")
    d_scores = mu * (dy @ v.mT).tril()
    d_seen = d_scores.mT @ q
    d_own = (dy * (scores @ v)).sum((-2, -1)) + (d_seen * reached).sum((-2, -1))
    d_mixed, d_low_mixed = mix_grad(q.mT @ d_seen, a, low)
    da = da + d_mixed
    d_reached = mu * d_seen + v @ d_pair.mT
    d_inside = (d_reached @ k.mT).tril()
    dq = dy @ operator.mT + d_scores @ seen + d_seen @ mixed.mT + v @ db.mT + d_inside @ k
    dk = inside.mT @ d_reached + k @ (da + da.mT) + d_inside.mT @ q
    dv = mu * (scores.mT @ dy) + reached @ d_pair + q @ db
    return dq, dk, dv, _rows(d_low + d_low_mixed, d_own)


def _rows(d_low: Tensor, d_own: Tensor) -> Tensor:
    """Return dm from the gradients of the weights of earlier blocks and of the diagonal [.., M]."""
    return d_low.tril(-1) + torch.diag_embed(d_own)
