"""la, hla2, ahla and hla3 as compositions of sums over earlier and over later tokens.

    LA(x, y, z)_i = s Sum_{j<=i} g^(i-j) (x_i.y_j) z_j            LR(x, y, z)_j = s Sum_{i>=j} g^(i-j) (x_j.y_i) z_i

    la    o = LA(q,k,v)                       dq = LA(do,v,k)   dk = LR(v,do,q)   dv = LR(k,q,do)
    hla2  u = LA(q,k,k)  o = LA(q,u,v)        du = LR(v,do,q)   dv = LR(u,q,do)
          dq = LA(do,v,u) + LA(du,k,k)        dk = LR(k,du,q) + LR(k,q,du)
    ahla  r = LA(q,k,v)  o = LA(q,k,r)        dr = LR(k,q,do)   dv = LR(k,q,dr)
          dq = LA(do,r,k) + LA(dr,v,k)        dk = LR(r,do,q) + LR(v,dr,q)
    hla3  u = LA(q,k,k)  r = LA(q,k,v)  o = LA(q,u,r)
          du = LR(r,do,q)  dr = LR(u,q,do)    dv = LR(k,q,dr)
          dq = LA(do,r,u) + LA(du,k,k) + LA(dr,v,k)               dk = LR(k,du,q) + LR(k,q,du) + LR(v,dr,q)

A ratio has an extra channel of ones in v, whose output divides the others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .launch import Pass, Tokens


def forward(
    op: str, p: Pass, q: Tokens, k: Tokens, v: Tokens, eps: float | None
) -> tuple[Tokens, Tokens | None, Tokens | None]:
    """Return (o, u, r), None for what an operator does not have; o holds the divisor as extra channel if there is an
    eps."""
    ratio = eps is not None
    u = p.run((q, k, k)) if op in ("hla2", "hla3") else None
    r = p.run((q, k, v), extra=ratio) if op in ("ahla", "hla3") else None
    o = p.run((q, u or k, r or v), extra=ratio, eps=eps)
    return o, u, r


def backward(
    op: str, p: Pass, q: Tokens, k: Tokens, v: Tokens, u: Tokens | None, r: Tokens | None, do: Tokens,
    wide: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return (dq, dk, dv) per query head, gradients of keys and values in the dtype `wide`.

    For the gradient of the decay, partners are q in dq, and in reversed sums what the sum is the gradient of, once for
    each composed LA.
    """
    ratio = do.extra is not None
    if op == "linear_attention":
        dq = p.run((do, v, k), partner=q.x, pairs=True)
        dk = p.run((v, do, q), reverse=True, partner=k.x, dtype=wide)
        return dq.x, dk.x, p.run((k, q, do), reverse=True, dtype=wide).x
    if op == "hla2":
        assert u is not None
        du = p.run((v, do, q), reverse=True, partner=u.x)
        dv = p.run((u, q, do), reverse=True, dtype=wide)
        dq = p.run((do, v, u), (du, k, k), partner=q.x, pairs=True)
        dk = p.run((k, du, q), (k, q, du), reverse=True, partner=k.x, counted=1, dtype=wide)
        return dq.x, dk.x, dv.x
    assert r is not None
    if op == "ahla":
        dr = p.run((k, q, do), reverse=True, extra=ratio)
        dq = p.run((do, r, k), (dr, v, k), partner=q.x, pairs=True)
        dk = p.run((r, do, q), (v, dr, q), reverse=True, partner=k.x, dtype=wide)
        return dq.x, dk.x, p.run((k, q, dr), reverse=True, dtype=wide).x
    assert u is not None
    du = p.run((r, do, q), reverse=True, partner=u.x)
    dr = p.run((u, q, do), reverse=True, extra=ratio)
    dq = p.run((do, r, u), (du, k, k), (dr, v, k), partner=q.x, pairs=True)
    dk = p.run((v, dr, q), (k, du, q), (k, q, du), reverse=True, partner=k.x, counted=2, dtype=wide)
    return dq.x, dk.x, p.run((k, q, dr), reverse=True, dtype=wide).x
