"""Token-by-token streaming algorithm, the serial reference of the causal operators.

    n = g n + 1        S = g S + k k'      P = g P + k v'      C = g C + q v'
    u = s S q + lambda q,  r = s P'q       (S, P centred: S - (sum k)(sum k)'/n, P - (sum k)(sum v)'/n)
    linear o = r       hla2 F = g F + u v', o = s F'q     ahla E = g E + k r', o = s E'q + lambda r
    hla3   F = g F + u r', o = s F'q                      paper G = g G + k (k'C before the token), o = s^2 (S C - G)'q
           + ..

Zhang et al., Higher-order Linear Attention, arXiv 2510.27258 (serial rules of sections 3, 4, 6). Without decay, the
two-state forms of HLA2 and HLA3 equal its (S, C, G) recurrences, and avoid subtracting large terms. Slow; shares no
code with the torch form.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hla_kernels.hla.reference import phi
from hla_kernels.options import Options, is_paper, needs_ones


def recurrent(
    op: str, q: Tensor, k: Tensor, v: Tensor, options: Options, gamma: Tensor | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return (o [B, N, H, Dv], states per query head) for q [B, N, H, D], k [B, N, Hk, D], v [B, N, Hk, Dv], gamma [H]
    or None."""
    group = q.shape[2] // k.shape[2]
    q, k = phi(q, options.feature_map), phi(k, options.feature_map)
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    if needs_ones(options):
        v = torch.cat([v, torch.ones_like(v[..., :1])], -1)
    g = q.new_ones(q.shape[2], 1, 1) if gamma is None else gamma.to(q.dtype)[:, None, None]
    memory = Memory(g)
    steps = (token(op, memory, q[:, t], k[:, t], v[:, t], options) for t in range(q.shape[1]))
    outputs = [finish(y, memory, options) for y in steps]
    return torch.stack(outputs, 1), memory.tensors


class Memory:
    """Decayed sums by name, initially zero: x <- g x + new. One sum per query head, [B, H, rows, columns]."""

    def __init__(self, g: Tensor) -> None:
        self.g, self.tensors = g, dict[str, Tensor]()

    def add(self, name: str, new: Tensor) -> Tensor:
        """Decay what is stored under `name`, add `new` and return the sum."""
        old = self.tensors.get(name)
        self.tensors[name] = new if old is None else self.g * old + new
        return self.tensors[name]

    def mean(self, name: str, x: Tensor) -> Tensor:
        """Return the running mean of the vectors x [B, H, D]; requires n to be updated before."""
        return self.add("sum_" + name, x[:, :, None])[:, :, 0] / self.tensors["weight"][..., 0]


def outer(a: Tensor, b: Tensor) -> Tensor:
    """Return a b' for vectors [B, H, D], [B, H, E]."""
    return a[..., :, None] * b[..., None, :]


def apply(state: Tensor, q: Tensor) -> Tensor:
    """Return state' q: [B, H, D, E], [B, H, D] -> [B, H, E]."""
    return (q[..., None, :] @ state)[..., 0, :]


def token(op: str, memory: Memory, q: Tensor, k: Tensor, v: Tensor, options: Options) -> Tensor:
    """Run one step of `op`: q, k [B, H, D], v [B, H, E] -> o [B, H, E] before normalization."""
    s = 1.0 if options.scale is None else options.scale
    if options.center is not None or options.mean_path:
        memory.add("weight", torch.ones_like(memory.g))
    if options.mean_path:
        memory.mean("v", v)
    if options.center == "qk":
        q = q - memory.mean("q", q)
    if is_paper(op, options):
        return paper_token(memory, q, k, v, s, options.ridge)
    kbar = memory.mean("k", k) if options.center is not None else None
    first = op != "hla2"
    r = s * centred(memory, "P", q, k, v, "v", kbar, options) if first else v
    u = s * centred(memory, "S", q, k, k, "k", kbar, options) + options.ridge * q if op in ("hla2", "hla3") else k
    if op == "linear_attention":
        return r
    if op == "ahla":
        return s * centred(memory, "E", q, k, r, "r", kbar, options) + options.ridge * r
    return s * apply(memory.add("F", outer(u, r)), q)


def centred(
    memory: Memory, name: str, q: Tensor, k: Tensor, v: Tensor, v_name: str, kbar: Tensor | None, options: Options
) -> Tensor:
    """Return state' q for the state Sum k v' stored under `name`, minus n (kbar.q) vbar with centring."""
    y = apply(memory.add(name, outer(k, v)), q)
    if kbar is None:
        return y
    if v_name == "k":
        vbar = kbar
    elif v_name == "v" and options.mean_path:
        vbar = memory.tensors["sum_v"][:, :, 0] / memory.tensors["weight"][..., 0]
    else:
        vbar = memory.mean(v_name, v)
    return y - memory.tensors["weight"][..., 0] * (q * kbar).sum(-1, keepdim=True) * vbar


def paper_token(memory: Memory, q: Tensor, k: Tensor, v: Tensor, s: float, ridge: float) -> Tensor:
    """Run one step of the paper's serial rule: S = gS + kk', G = gG + k (k'C_{t-1}), C = gC + qv',
    o = s^2 q'(S C - G) + lambda s q'C."""
    before = memory.tensors.get("C", torch.zeros_like(outer(q, v)))
    g = memory.add("G", outer(k, apply(before, k)))
    c = memory.add("C", outer(q, v))
    return s * s * apply(memory.add("S", outer(k, k)) @ c - g, q) + ridge * s * apply(c, q)


def finish(y: Tensor, memory: Memory, options: Options) -> Tensor:
    """Apply the denominator, or the mean-value path vbar + op(v - vbar); y [B, H, E] -> [B, H, Dv]."""
    if options.normalize:
        return y[..., :-1] / (y[..., -1:] + options.eps)
    if options.mean_path:
        vbar = memory.tensors["sum_v"][:, :, 0, :-1] / memory.tensors["weight"][..., 0]
        return y[..., :-1] + (1 - y[..., -1:]) * vbar
    return y
