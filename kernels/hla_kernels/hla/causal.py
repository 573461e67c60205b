"""The causal torch form: compositions of chunked linear attention, one stage per order.

    linear  r = LA(q, k, v)                      u = LA(q, k, k) + lambda q   (u_t = S_t q_t, the ridge makes S_t +
            lambda I)
    hla2    LA(q, u, v)        state S, F        ahla  LA(q, k, r) + lambda r   state P, E
    hla3    LA(q, u, r)        state S, P, F     hla2 by the paper's rule  LA(u, q, v) - LA(q, k, w), w_i = k_i' C_{i-1}

Every stage multiplies by the scale s and by gamma^(t-j). Centring subtracts the running (decay-weighted) mean of the
scores, cLA(q, k, v)_t = LA(q, k, v)_t - n_t (q_t.kbar_t) vbar_t, in the stages whose keys are k. With causal="frame",
all sums and means are over the tokens of a frame and of earlier frames. Plain differentiable torch code.

Without a state it is the custom operator `hla_kernels::causal`, which torch.compile traces as one for every N. It saves
its inputs only and recomputes the stages in the backward pass; the float32 copies and C x C scores of all chunks would
take many times the memory of the inputs in bfloat16.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..dispatch.operator import recomputed_op
from ..features import feature
from ..options import Options, compute_dtype, is_paper, needs_ones, plain_precision
from ..sequences import to_heads, to_tokens
from .chunked import Chunks, running_sum, stage
from .streaming.state import State


class Pass:
    """One causal call: tokens cut into chunks, tensors of the state before, and tensors of the state after."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, options: Options, log_gamma: Tensor | None,
        carry: dict[str, Tensor], want_state: bool,
    ) -> None:  # fmt: skip
        self.options, self.carry, self.want_state = options, carry, want_state
        self.chunks = Chunks(q.shape[-2], log_gamma, q, options.frame)
        self.out: dict[str, Tensor] = {}
        self.means: dict[str, Tensor] = {}
        self.inner: tuple[Tensor, ...] = ()  # u and r of hla3, which its summaries need
        self.weight = q  # placeholder of n_t, set below if the options need it
        if needs_ones(options):
            v = torch.cat([v, torch.ones_like(v[..., :1])], -1)
        self.q, self.k, self.v = (self.chunks.cut(x) for x in (q, k, v))
        if options.mean_path or options.center is not None:
            # n_t = sum_{j<=t} gamma^(t-j), [1, Hk or 1, 1 or G, c, C, 1]
            self.weight = self._keep("weight", running_sum(self._ones(), self.chunks, carry.get("weight"), want_state))
        if options.center == "qk":
            self.q = self.q - self.mean("q", self.q)
        self.sq = self.q if options.scale is None else self.q * options.scale

    def _ones(self) -> Tensor:
        g = self.chunks.log_gamma
        heads = (1, 1) if g is None else (g.shape[1], g.shape[2])
        return self.q.new_ones((1, *heads, self.chunks.count, self.chunks.size, 1))

    def _keep(self, name: str, result: tuple[Tensor, Tensor | None]) -> Tensor:
        y, state = result
        if state is not None:
            self.out[name] = state
        return y

    def mean(self, name: str, x: Tensor) -> Tensor:
        """Return the running, decay-weighted mean of x over tokens j <= t; `name` is its key in the state."""
        if name not in self.means:
            key = "sum_" + name
            total = self._keep(key, running_sum(x, self.chunks, self.carry.get(key), self.want_state))
            self.means[name] = total / self.weight
        return self.means[name]

    def stage(self, name: str, q: Tensor, k: Tensor, v: Tensor, strict: bool = False) -> Tensor:
        """Return LA(q, k, v) of scaled queries q, and store its state under `name`."""
        return self._keep(name, stage(q, k, v, self.chunks, self.carry.get(name), strict, self.want_state))

    def centred(self, name: str, v_name: str, v: Tensor) -> Tensor:
        """Return cLA(q, k, v) with centring, else LA(q, k, v)."""
        y = self.stage(name, self.sq, self.k, v)
        if self.options.center is None:
            return y
        scores = self.weight * (self.sq * self.mean("k", self.k)).sum(-1, keepdim=True)
        return y - scores * self.mean(v_name, v)

    def ridged(self, y: Tensor, x: Tensor) -> Tensor:
        """Return y + lambda x."""
        return y + self.options.ridge * x if self.options.ridge else y


def _linear(p: Pass) -> Tensor:
    return p.centred("P", "v", p.v)


def _hla2(p: Pass) -> Tensor:
    return p.stage("F", p.sq, p.ridged(p.centred("S", "k", p.k), p.q), p.v)


def _ahla(p: Pass) -> Tensor:
    r = p.centred("P", "v", p.v)
    return p.ridged(p.centred("E", "r", r), r)


def _hla3(p: Pass) -> Tensor:
    p.inner = p.ridged(p.centred("S", "k", p.k), p.q), p.centred("P", "v", p.v)
    return p.stage("F", p.sq, *p.inner)


def _paper(p: Pass) -> Tensor:
    s = 1.0 if p.options.scale is None else p.options.scale
    u = p.ridged(p.stage("S", p.sq, p.k, p.k), p.q)
    seen = p.stage("C", u * s, p.q, p.v)
    w = stage(p.k, p.q, p.v, p.chunks, p.carry.get("C"), strict=True)[0]
    return seen - s * p.stage("G", p.sq, p.k, w)


FORMS = {"linear_attention": _linear, "hla2": _hla2, "ahla": _ahla, "hla3": _hla3}


def _summaries(op: str, p: Pass, state: State | None) -> dict[str, Tensor]:
    """Return the summaries of a segment after its pass, which `merge` needs to append it to an earlier one.

    hla2 C0 = Sum q v'     ahla R = Sum k q'     hla2 by the paper's rule S0 = Sum k k'     hla3 X0 = Sum q r',
    Y0 = Sum u q', W = Sum gamma^t q_t q_t' (t counts 1..n inside the segment). W alone is decayed. They are sums over
    tokens, so a call that continues a mergeable state adds to its summaries.
    """
    q, k, v, *inner = (p.chunks.join(x) for x in (p.q, p.k, p.v, *p.inner))
    new = {}
    if is_paper(op, p.options):
        new = {"S0": k.mT @ k}
    elif op == "hla2":
        new = {"C0": q.mT @ v}
    elif op == "ahla":
        new = {"R": k.mT @ q}
    elif op == "hla3":
        u, r = inner
        decayed = q
        if p.chunks.log_gamma is not None:  # the segment may begin in an earlier call
            t = torch.arange(1, q.shape[-2] + 1, device=q.device) + (0 if state is None else state.n)
            decayed = q * (p.chunks.log_gamma * t[:, None]).exp()
        new = {"X0": q.mT @ r, "Y0": u.mT @ q, "W": decayed.mT @ q}
    return new if state is None else {name: x + state.tensors[name].to(x.dtype) for name, x in new.items()}


def causal(
    op: str, q: Tensor, k: Tensor, v: Tensor, options: Options, gamma: Tensor | None, state: State | None,
    return_state: bool | str,
) -> tuple[Tensor, State | None]:  # fmt: skip
    """Return (o [B, N, H, Dv], state or None) for q [B, N, H, D], k [B, N, Hk, D], v [B, N, Hk, Dv], gamma
    [1, Hk, 1 or G, 1, 1]."""
    n_key_heads, dtype = k.shape[2], compute_dtype(q.dtype)
    qh, kh, vh = (to_heads(x, n_key_heads, dtype) for x in (q, k, v))
    qh, kh = feature(qh, options.feature_map), feature(kh, options.feature_map)
    carry = {} if state is None else {name: x.to(dtype) for name, x in state.tensors.items()}
    log_gamma = None if gamma is None else gamma.to(dtype).log()
    p = Pass(qh, kh, vh, options, log_gamma, carry, bool(return_state))
    form = _paper if is_paper(op, options) else FORMS[op]
    # remove padding first: with eps = 0 it would give 0 / 0, and NaN in the backward
    y = p.chunks.join(form(p))
    if options.normalize:
        y = y[..., :-1] / (y[..., -1:] + options.eps)
    if options.mean_path:
        vbar = p.chunks.join(p.mean("v", p.v))[..., :-1]
        y = y[..., :-1] + (1 - y[..., -1:]) * vbar
    out = to_tokens(y, q.dtype)
    if not return_state:
        return out, None
    if return_state == "mergeable":
        p.out.update(_summaries(op, p, state))
    if gamma is not None:
        p.out["gamma"] = gamma.to(dtype)
    count = torch.full((), q.shape[1], dtype=torch.int64, device=q.device)
    return out, State(op, options, count if state is None else count + state.n, p.out)


def evaluate(
    q: Tensor, k: Tensor, v: Tensor, gamma: Tensor | None, op: str, feature_map: str | None, normalize: bool,
    center: str | None, mean_path: bool, decay_rule: str, ridge: float, scale: float | None, eps: float, frame: int,
) -> Tensor:  # fmt: skip
    """Return o [B, N, H, Dv], see `causal`; arguments are checked by `op.run`."""
    order, decay = "frame" if frame else True, None if gamma is None else "tensor"
    options = Options(
        order, feature_map, normalize, center, mean_path, decay, decay_rule, ridge, scale, eps, 1.0, frame
    )
    with plain_precision(q):
        return causal(op, q, k, v, options, gamma, None, False)[0]


causal_op, causal_backward = recomputed_op(
    "causal", evaluate, lambda q, k, v, *_: q.new_empty((*q.shape[:3], v.shape[3]))
)
