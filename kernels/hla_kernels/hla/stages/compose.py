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

A state H before the tokens starts LA(x, y, z), and its transpose starts the sum for dx. What LR(z, do, x) holds after
the first token is the transpose of the gradient of H. The gradient of the state after the tokens starts the reversed
sums.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..streaming.contents import STAGES
from .launch import Pass, Tokens

States = dict[str, Tensor]  # of the stages, see `contents.STAGES`: float32 [B, H, D, Dz]


def forward(
    op: str, p: Pass, q: Tokens, k: Tokens, v: Tokens, eps: float | None, first: States | None, keep: bool,
    dtype: torch.dtype,
) -> tuple[Tokens, Tokens | None, Tokens | None, States]:  # fmt: skip
    """Return (o in `dtype`, u, r, states after the tokens if `keep`), None for what an operator does not have; o holds
    the divisor as extra channel if there is an eps. first: states before the tokens."""
    ratio, after = eps is not None, dict[str, Tensor]()

    def stage(name: str, *term: Tokens, **options: Any) -> Tokens:
        last: list[Tensor] | None = [] if keep else None
        y = p.run(term, first=None if first is None else [first[name]], last=last, **options)  # type: ignore[arg-type]
        if last is not None:
            after[name] = last[0]
        return y

    u = stage("S", q, k, k, inner=True) if op in ("hla2", "hla3") else None
    r = stage("P", q, k, v, extra=ratio, inner=True) if op in ("ahla", "hla3") else None
    o = stage(STAGES[op][-1], q, u or k, r or v, extra=ratio, eps=eps, dtype=dtype)
    return o, u, r, after


class Adjoint:
    """States for the launches of a backward. first: states before the tokens; after: gradients of the states after
    them; both or neither. In a backward, the sum over earlier tokens starts with a transposed state, and the reversed
    sums of a stage start with its gradient or the transpose of it."""

    def __init__(self, first: States | None, after: States | None, ratio: bool) -> None:
        self.first, self.after, self.ratio = first, after, ratio
        self.grads: States = {}  # of `first`

    def turned(self, *names: str) -> list[Tensor] | None:
        """Return the states of stages, transposed."""
        return None if self.first is None else [self.first[name].mT.contiguous() for name in names]

    def grads_turned(self, *names: str) -> list[Tensor] | None:
        """Return the gradients of the states after the tokens, transposed."""
        return None if self.after is None else [self.after[name].mT.contiguous() for name in names]

    def grad(self, name: str, extra: bool = False) -> list[Tensor] | None:
        """Return the gradient of one state after the tokens, with or without the column of a ratio."""
        if self.after is None:
            return None
        x = self.after[name]
        return [x[..., :-1].contiguous() if self.ratio and not extra else x]

    def last(self) -> list[Tensor] | None:
        """Return where a launch puts the states after it."""
        return None if self.first is None else []

    def keep(self, last: list[Tensor] | None, *names: str) -> None:
        """Store transposed gradients of states before the tokens."""
        if last is not None:
            self.grads |= {name: x.mT for name, x in zip(names, last, strict=False)}


def backward(
    op: str, p: Pass, q: Tokens, k: Tokens, v: Tokens, u: Tokens | None, r: Tokens | None, do: Tokens,
    wide: torch.dtype, a: Adjoint,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return (dq, dk, dv), gradients of keys and values in the dtype `wide`; gradients of states are left in `a`.

    For the gradient of the decay, the partner of dq is q, and the partner of a reversed sum is the tensor whose
    gradient it is, once for each composed LA.
    """
    ratio = do.extra is not None
    back: dict[str, Any] = {"reverse": True}
    within = {**back, "inner": True}
    last, more = a.last(), a.last()
    if op == "linear_attention":
        dq = p.run((do, v, k), partner=q.x, pairs=True, first=a.turned("P"))
        dk = p.run((v, do, q), **back, partner=k.x, dtype=wide, first=a.grads_turned("P"), last=last)
        a.keep(last, "P")
        return dq.x, dk.x, p.run((k, q, do), **back, dtype=wide, first=a.grad("P")).x
    if op == "hla2":
        assert u is not None
        du = p.run((v, do, q), **within, partner=u.x, first=a.grads_turned("F"), last=last)
        dv = p.run((u, q, do), **back, dtype=wide, first=a.grad("F"))
        dq = p.run((do, v, u), (du, k, k), partner=q.x, pairs=True, first=a.turned("F", "S"))
        ends = None if a.after is None else [*(a.grads_turned("S") or ()), a.after["S"]]
        dk = p.run(
            (k, du, q), (k, q, du), **back, partner=k.x, counted=1, dtype=wide, first=ends, last=more
        )
        a.keep(last, "F")
        a.keep(more, "S")
        return dq.x, dk.x, dv.x
    assert r is not None
    if op == "ahla":
        dr = p.run((k, q, do), **within, extra=ratio, first=a.grad("E", ratio))
        dq = p.run((do, r, k), (dr, v, k), partner=q.x, pairs=True, first=a.turned("E", "P"))
        ends = a.grads_turned("E", "P")
        dk = p.run((r, do, q), (v, dr, q), **back, partner=k.x, dtype=wide, first=ends, last=last)
        a.keep(last, "E", "P")
        return dq.x, dk.x, p.run((k, q, dr), **back, dtype=wide, first=a.grad("P")).x
    assert u is not None
    du = p.run((r, do, q), **within, partner=u.x, first=a.grads_turned("F"), last=last)
    dr = p.run((u, q, do), **within, extra=ratio, first=a.grad("F", ratio))
    dq = p.run(
        (do, r, u), (du, k, k), (dr, v, k), partner=q.x, pairs=True, first=a.turned("F", "S", "P")
    )
    ends = None if a.after is None else [*(a.grads_turned("P", "S") or ()), a.after["S"]]
    dk = p.run(
        (v, dr, q), (k, du, q), (k, q, du), **back, partner=k.x, counted=2, dtype=wide, first=ends, last=more
    )
    a.keep(last, "F")
    a.keep(more, "P", "S")
    return dq.x, dk.x, p.run((k, q, dr), **back, dtype=wide, first=a.grad("P")).x
