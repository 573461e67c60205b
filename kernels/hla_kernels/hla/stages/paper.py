"""hla2 with the paper's decay rule as a composition of sums, and its gradients.

LA, LR and states are explained in `compose`.

    u = LA(q,k,k)    w = LA(k,q',v')    o = LA(q,k,w) + LA(u,q,v)         with q'_i = q_{i-1} and v'_i = -v_{i-1}

Because q' and v' are one token later, w reads only earlier tokens. The state of (u,q,v) is C, and w begins with C over
-g. The state of (q,k,w) is -s G. There is no ratio.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .compose import Adjoint, States
from .launch import Pass, Tokens


def moved(x: Tensor, step: int) -> Tensor:
    """Return the tokens one place later (step 1) or earlier (-1), with zeros where there are none."""
    zeros = torch.zeros_like(x[:, :1])
    return torch.cat([zeros, x[:, :-1]] if step > 0 else [x[:, 1:], zeros], 1)


def _decay(p: Pass) -> Tensor:
    """Return the decay per query head, [H, 1, 1]."""
    assert p.log2 is not None
    return p.log2.exp2()[:, None, None]


def _read_states(p: Pass, states: States | None) -> dict[str, list[Tensor] | None]:
    """Return the states before the tokens of each stage: u, w, and both terms of o."""
    if states is None:
        return {"u": None, "w": None, "o": None}
    return {"u": [states["S"]], "w": [-states["C"] / _decay(p)], "o": [-p.scale * states["G"], states["C"]]}


def forward(
    p: Pass, q: Tokens, k: Tokens, v: Tokens, first: States | None, keep: bool, dtype: torch.dtype
) -> tuple[Tokens, Tokens | None, Tokens | None, States]:  # fmt: skip
    """Return (o in `dtype`, u, w, states after the tokens if `keep`); first: states before the tokens."""
    before = _read_states(p, first)
    last: list[Tensor] | None = [] if keep else None
    u = p.run((q, k, k), first=before["u"], last=last, inner=True)
    w = p.run((k, Tokens(moved(q.x, 1)), Tokens(-moved(v.x, 1))), first=before["w"], inner=True)
    o = p.run((q, k, w), (u, q, v), first=before["o"], last=last, dtype=dtype)
    if last is None:
        return o, u, w, {}
    return o, u, w, {"S": last[0], "C": last[2], "G": last[1] / -(p.scale or 1.0)}


def backward(
    p: Pass, q: Tokens, k: Tokens, v: Tokens, u: Tokens | None, w: Tokens | None, do: Tokens, a: Adjoint
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return (dq, dk, dv) in float32; gradients of states are left in `a`."""
    assert u is not None and w is not None
    late_q, late_v = Tokens(moved(q.x, 1)), Tokens(-moved(v.x, 1))
    if a.first is not None and a.after is not None:
        c = a.first["C"]
        a.first |= {"G": a.first["G"] * -p.scale, "W": -c / _decay(p)}
        a.after |= {"G": a.after["G"] / -(p.scale or 1.0), "W": torch.zeros_like(c)}
    of_c, of_w, of_k = a.last(), a.last(), a.last()
    wide: dict[str, Any] = {"dtype": torch.float32}
    back: dict[str, Any] = {"reverse": True, **wide}

    dw = p.run((k, q, do), reverse=True, inner=True, first=a.grad("G"))
    du = p.run((do, v, q), inner=True, partner=u.x, pairs=True, first=a.turned("C"))
    dq = p.run((do, w, k), (du, k, k), **wide, partner=q.x, pairs=True, first=a.turned("G", "S")).x
    dq += p.run((v, do, u), **back, partner=q.x, first=a.grads_turned("C"), last=of_c).x
    late = p.run((late_v, dw, k), **back, partner=late_q.x, first=a.grads_turned("W"), last=of_w).x
    dq += moved(late, -1)
    ends = None if a.after is None else [*(a.grads_turned("G", "S") or ()), a.after["S"]]
    dk = p.run((w, do, q), (k, du, q), (k, q, du), **back, partner=k.x, counted=2, first=ends, last=of_k).x
    dk += p.run((dw, late_v, late_q), **wide, partner=k.x, pairs=True, first=a.turned("W")).x
    dv = p.run((q, u, do), **back, first=a.grad("C")).x
    dv -= moved(p.run((late_q, k, dw), **back, first=a.grad("W")).x, -1)
    if of_c is not None and of_w is not None and a.first is not None:
        a.keep(of_c, "C")
        a.keep(of_w, "W")
        a.keep(of_k, "G", "S")
        of_before = a.grads.pop("W")
        a.grads |= {"G": a.grads["G"] * -p.scale, "C": a.grads["C"] - of_before / _decay(p)}
        if p.sums is not None:  # token i reads C decayed by g^i, not by g^(i + 1)
            p.sums.add_states(a.first["C"], of_before * p.scale, -1)
    return dq, dk, dv
