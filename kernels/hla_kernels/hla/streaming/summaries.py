"""Summaries of a causal segment, which `merge` needs to append it to an earlier one.

    hla2 C0 = Sum q v' (undecayed)     ahla R = Sum k q' (undecayed)     hla2 by the paper's rule S0 = Sum k k'
                                       (undecayed)
    hla3 W = Sum gamma^u q_u q_u' (u counts 1..n inside the segment)   X0 = Sum q_u r_u'   Y0 = Sum u_u q_u'   (both
                                                                       undecayed)

They are sums over the tokens of the segment, so a call that continues a mergeable state adds to its summaries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...options import is_paper
from .state import State


def summaries(op: str, p, inner: dict[str, Tensor], state: State | None) -> dict[str, Tensor]:
    """Return the summaries of `op` after the pass `p` (a `causal.Pass`); inner: its inner stages u, r in chunk
    layout."""
    join = p.chunks.join
    q, k, v = join(p.q), join(p.k), join(p.v)
    if is_paper(op, p.options):
        new = {"S0": k.mT @ k}
    elif op == "hla2":
        new = {"C0": q.mT @ v}
    elif op == "ahla":
        new = {"R": k.mT @ q}
    elif op == "hla3":
        u, r = join(inner["u"]), join(inner["r"])
        new = {"X0": q.mT @ r, "Y0": u.mT @ q, "W": _decayed(q, p.chunks.log_gamma, state).mT @ q}
    else:
        new = {}
    if state is None:
        return new
    return {name: x + state.tensors[name].to(x.dtype) for name, x in new.items()}


def _decayed(q: Tensor, log_gamma: Tensor | None, state: State | None) -> Tensor:
    """Return gamma^u q_u, with u counted from the start of the segment, which may lie in an earlier call."""
    if log_gamma is None:
        return q
    u = torch.arange(1, q.shape[-2] + 1, device=q.device)
    u = u if state is None else u + state.n
    return q * (log_gamma * u[:, None]).exp()
