"""Explicit backward of the torch form; blocks and moments are recomputed from the inputs.

With O_i the operator of block i (P~_i, R~_i P~_i or S~_i C~_i) and dO_i = Sum_t q_t dy_t' over its tokens:

    dq = dy O'                                                      and through the moments of queries
    la     dP~ = dO                                                 dk = v dP'               dv = k dP
    ahla   dR~ = dO P~'   dP~ = R~' dO      dq += k dR              dk = q dR' + v dP'       dv = k dP
    hla2   dS~ = dO C~'   dC~ = S~' dO      dq += v dC'             dk = k (dS + dS')        dv = q dC
    dP_b = s Sum_i m_ib dP~_i (and so for R, S, C)                  dm_ib = <dP~_i, P_b> summed over the moments

For the ratio o = y / z: dy = do / z, dz = -(do . o) / z, where z is treated as an additional column of y.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..features import feature_grad
from ..hla.layout import live_heads, to_heads, to_tokens
from . import causal
from .causal import mix, mix_grad
from .options import BlockOptions
from .torch_form import Blocks, Prepared, numerator, prepare_heads, rotate

Grads = tuple[Tensor, Tensor, Tensor, Tensor]


def gradient(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mixing: Tensor, options: BlockOptions, mask: Tensor | None,
    rotary: tuple[Tensor, Tensor] | None,
) -> Grads:  # fmt: skip
    """Return (dq, dk, dv, dmixing) of `torch_form.evaluate` in the shapes and dtypes of the inputs; grad
    [B, N, H, Dv]."""
    p = prepare_heads(q, k, v, mixing, options, mask, rotary)
    g = live_heads(to_heads(grad, k.shape[2], p.v.dtype), mask)
    dq, dk, dv, dm = _of_numerator(g, p, mask, options, rotary)
    dq, dk = (live_heads(feature_grad(*x, options.feature_map), mask) for x in ((p.q, p.phi_q, dq), (p.k, p.phi_k, dk)))
    dm = dm.flatten(0, 1).to(mixing.dtype)
    tokens = (to_tokens(live_heads(d, mask), q.dtype) for d in (dq, dk, dv))
    return (*tokens, dm[0] if mixing.dim() == 2 else dm)  # type: ignore[return-value]


def _of_numerator(
    g: Tensor, p: Prepared, mask: Tensor | None, options: BlockOptions, rotary: tuple[Tensor, Tensor] | None
) -> Grads:
    """Return the gradients of phi(q), phi(k), v and m from the gradient of the output."""
    turned = p.turned or (p.phi_q, p.phi_k)
    if not options.normalize:
        return _turn_back(_weigh_grad(g, *turned, p.v, p, options), p, options, rotary)
    y, total = numerator(p, mask, options)
    assert total is not None
    dy = g / total
    dz = -(dy * (y / total)).sum(-1, keepdim=True)
    ones = torch.ones_like(p.v[..., :1])
    if rotary is None:
        grads = _weigh_grad(torch.cat([dy, dz], -1), *turned, torch.cat([p.v, ones], -1), p, options)
        return grads[0], grads[1], grads[2][..., :-1], grads[3]
    first = _turn_back(_weigh_grad(dy, *turned, p.v, p, options), p, options, rotary)
    second = _weigh_grad(dz, p.phi_q, p.phi_k, ones, p, options)
    return first[0] + second[0], first[1] + second[1], first[2], first[3] + second[3]


def _turn_back(grads: Grads, p: Prepared, options: BlockOptions, rotary: tuple[Tensor, Tensor] | None) -> Grads:
    """Propagate gradients through the rotation, that is, rotate them by the opposite angles. Query heads that share a
    key head may use different angles, so dk is rotated per query head, then summed."""
    if rotary is None:
        return grads
    dq, dk = (rotate(d, rotary[0], -rotary[1], options.rotary_half) for d in grads[:2])
    return dq, _sum_to(dk, p.phi_k), grads[2], grads[3]


def _weigh_grad(dy: Tensor, q: Tensor, k: Tensor, v: Tensor, p: Prepared, options: BlockOptions) -> Grads:
    """Return (dq, dk, dv, dm) of `torch_form.weigh`, each with the groups and heads of its input."""
    blocks = Blocks(options, q)
    dyb, qb, kb, vb = (blocks.cut(x) for x in (dy, q, k, v))
    if options.causal:
        dqb, *grads, dm = causal.gradient(dyb, qb * p.s, kb, vb, blocks.mixing(p.m), options.order)
        grads = [dqb * p.s, *grads]
    else:
        *grads, dm = _two_sided_grad(dyb, qb, kb, vb, blocks.mixing(p.m), p.s, options.order)
    dq, dk, dv = (_sum_to(blocks.join(d), x) for d, x in zip(grads, (q, k, v), strict=True))
    full = torch.zeros_like(p.m)
    full[..., : blocks.count, : blocks.count] = _sum_to(dm.sum(0), full)
    return dq, dk, dv, full


def _sum_to(x: Tensor, like: Tensor) -> Tensor:
    """Sum over the axes of heads or groups that have length 1 in `like`."""
    for dim in range(x.dim() - 2):
        if like.shape[dim] == 1 and x.shape[dim] > 1:
            x = x.sum(dim, keepdim=True)
    return x


def _two_sided_grad(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, m: Tensor, s: float | Tensor, order: str
) -> tuple[Tensor, ...]:
    d_operator = q.mT @ dy
    if order == "la":
        moment = k.mT @ v * s
        d, dm = mix_grad(d_operator, moment, m)
        return dy @ mix(moment, m).mT, v @ (d * s).mT, k @ (d * s), dm
    a, b = (k.mT @ q * s, k.mT @ v * s) if order == "ahla" else (k.mT @ k * s, q.mT @ v * s)
    mixed_a, mixed_b = mix(a, m), mix(b, m)
    da, dm_a = mix_grad(d_operator @ mixed_b.mT, a, m)
    db, dm_b = mix_grad(mixed_a.mT @ d_operator, b, m)
    da, db, dm = da * s, db * s, dm_a + dm_b
    dq = dy @ (mixed_a @ mixed_b).mT
    if order == "ahla":
        return dq + k @ da, q @ da.mT + v @ db.mT, k @ db, dm
    return dq + v @ db.mT, k @ (da + da.mT), q @ db, dm
