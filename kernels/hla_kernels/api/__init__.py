"""The public operators. One signature for all here; `packed` has them for one qkv, `blocks` those that mix blocks,
`taylor` the expansion of softmax. `hla/__init__.py` has the symbols.

Shapes: q [B, N, H, D], k [B, N, Hk, D], v [B, N, Hk, Dv], any strides (the Triton forms read them in place where the
last dimension is contiguous, and run nothing else); Hk divides H and query head h reads key head h // (H // Hk).
Returns o [B, N, H, Dv], contiguous, in the dtype of q, or (o, state) with return_state.

Options
    causal        token t sees tokens j <= t; otherwise every token sees every token. Later tokens are multiplied by
                  zero: pad sequences at their ends with finite numbers (zeros), NaN or Inf would reach earlier tokens
    feature_map   None, "identity", "relu", "elu1" (elu + 1), "softmax" (over D) or "softmax_pair" ([softmax(x),
                  softmax(-x)]: 2 D features, so D <= 128), applied to q and k in float32
    normalize     divide by the same form with v = 1 (plus eps); needs a non-negative feature_map, or "identity" to
                  vouch for q and k. `polynomial` divides its mixture by the mixture with v = 1: there the coefficients
                  must be non-negative too, which is the caller's responsibility (values are not looked at)
    eps           absolute, added to that divisor. The divisor is about s^p Sum (products of p feature scores): it is
                  small for features of small entries (feature_map="softmax": about D^-p two-sided at order p), so take
                  a smaller eps there, 1e-9, and less still for third order at D = 128, where D^-3 is 5e-7; a warning
                  says where it is more than a tenth of that
    center        "k": keys minus their mean over the tokens; "qk": queries too. Causal: running, decay-weighted means
    mean_path     o = vbar + op(v - vbar), vbar the mean of v (running when causal)
    decay         gamma in (0, 1], float or tensor [H] or [Hk], differentiable, causal only: a factor gamma^(t-j) in
                  every stage. Checked after the cast to the dtype of the moments; the values of a tensor on the CPU
                  only, elsewhere (CUDA) they are the caller's responsibility and gamma <= 0 gives NaN
    decay_rule    "cascade", or "paper" for the paper's serial second-order rule; they differ for decayed hla2 only
    ridge         lambda >= 0: S + lambda I in hla2 and hla3, R + lambda I in ahla (on the scaled moment)
    scale         factor of each moment; None is 1/N two-sided (N counts the state's tokens) and 1 causal
    q_scale       a factor on phi(q), 1 by default (such as D^-1/2); it costs nothing
    state, return_state   streaming; "mergeable" also keeps what `merge` needs. state has no reference form
    key_padding_mask   [B, N] bool, True for a real token, two-sided without state. The others are neither read nor
                  written: they enter no moment, N counts the real ones, their outputs and gradients are 0
    cu_seqlens    [S + 1] int32 from 0 to N: B = 1, and the tokens cu_seqlens[i] .. cu_seqlens[i + 1] - 1 are sequence
                  i, each as if it were alone; two-sided without state. max_seqlen: the length of the longest (or
                  more). On CUDA their values are the caller's responsibility. Memory: the torch form lays the tokens
                  out as S x max_seqlen rows, up to S times the N tokens where one sequence is long and the others are
                  short; the Triton forms read them where they lie
    impl          "auto", "torch", "reference" (N x N definition) or "triton"; an explicit one never falls back

Defaults: causal=False, feature_map=None, normalize=False, eps=1e-6, center=None, mean_path=False, decay=None,
decay_rule="cascade", ridge=0, scale=None, q_scale=1, state=None, return_state=False, no mask and one sequence a row of
the batch, impl="auto".

Every operator raises ValueError on wrong rank, shapes, dtypes, devices, D > 256, N = 0, unknown names, undefined
combinations and states that are not those of the call.

Derivatives: reverse mode, once. Calls without a state are custom operators with their own backward, so that a second
derivative (create_graph=True) raises torch's error "no autograd formula was registered", torch.func.grad and jacrev are
refused by torch, and forward mode (torch.func.jvp, jacfwd, dual tensors) raises ValueError. return_state=True and
impl="reference" are plain torch code and have them all. torch.vmap makes one call after the other.

Source: Zhang et al., Higher-order Linear Attention, arXiv 2510.27258.
"""

from __future__ import annotations

from typing import Any, TypedDict, Unpack

from torch import Tensor

from ..hla.streaming.state import State
from ..op import run

# o, or (o, state) with return_state; not a union, which every caller would have to narrow
Result = Any


class Keywords(TypedDict, total=False):
    """Keyword options of every operator; meaning and defaults above."""

    causal: bool
    feature_map: str | None
    normalize: bool
    center: str | None
    mean_path: bool
    decay: float | Tensor | None
    decay_rule: str
    ridge: float
    scale: float | None
    q_scale: float
    eps: float
    state: State | None
    return_state: bool | str
    key_padding_mask: Tensor | None
    cu_seqlens: Tensor | None
    max_seqlen: int | None
    impl: str


def linear_attention(q: Tensor, k: Tensor, v: Tensor, **options: Unpack[Keywords]) -> Result:
    """First order: o_t = s sum_j (q_t.k_j) v_j = q_t' P, P = s sum k v'.

    Causal: o_t = s sum_{j<=t} gamma^(t-j) (q_t.k_j) v_j; state P [D, Dv]. q [B, N, H, D], k [B, N, Hk, D], v [B, N, Hk,
    Dv] -> [B, N, H, Dv]; options and errors in the module's docstring; ridge is not defined. Katharopoulos et al.,
    arXiv 2006.16236, Eq 5.
    """
    return run("linear_attention", q, k, v, **options)


def hla2(q: Tensor, k: Tensor, v: Tensor, **options: Unpack[Keywords]) -> Result:
    """Second order, HLA2: o_t = q_t' S C, S = s sum k k', C = s sum q v', that is s^2 A A' V with A = phi(Q) phi(K)'.

    Causal: o = LA(q, LA(q, k, k), v); state S [D, D], F [D, Dv]; decay_rule="paper": S = gS + kk', C = gC + qv',
    G = gG + k (k'C_{t-1}), o = s^2 q'(S C - G). Shapes as `linear_attention`; options and errors in the module's
    docstring. Zhang et al., arXiv 2510.27258, HLA2 := (A A') V masked as in Theorem 3.1; without decay equal to its Eq
    4.1 recurrence.
    """
    return run("hla2", q, k, v, **options)


def ahla(q: Tensor, k: Tensor, v: Tensor, **options: Unpack[Keywords]) -> Result:
    """Second order, asymmetric (AHLA): o_t = q_t' R P, R = s sum k q', P = s sum k v', that is s^2 A A V.

    Causal: o = LA(q, k, LA(q, k, v)); state P, E [D, Dv]. Shapes as `linear_attention`; options and errors in the
    module's docstring. Zhang et al., arXiv 2510.27258, AHLA := A A V, Theorem 6.1.
    """
    return run("ahla", q, k, v, **options)


def hla3(q: Tensor, k: Tensor, v: Tensor, **options: Unpack[Keywords]) -> Result:
    """Third order, HLA3: o_t = q_t' S Qm P, S = s sum k k', Qm = s sum q q', P = s sum k v', that is s^3 A A' A V.

    Causal: o = LA(q, LA(q, k, k), LA(q, k, v)), the strictly causal third order; state S [D, D], P, F [D, Dv]. Shapes
    as `linear_attention`; options and errors in the module's docstring. Zhang et al., arXiv 2510.27258, HLA3 := (A A'
    A) V; its Theorem 7.1 drops terms (tests/ops/test_errata.py).
    """
    return run("hla3", q, k, v, **options)


def polynomial(q: Tensor, k: Tensor, v: Tensor, coefficients: Tensor, **options: Unpack[Keywords]) -> Result:
    """A learned mixture of orders per head: o = q M, M = c1 P + c2 S C + c3 R P + c4 S Qm P.

    coefficients [H, 4] = (c1, c2, c3, c4) of A, A A', A A, A A' A. One D x Dv matrix per head: mixing orders costs
    nothing per token. Two-sided only (causal raises ValueError), no ridge. With center="k", mean_path=True the first
    term is the first-order Taylor expansion of softmax attention. Coefficients that need no gradient (frozen, or under
    no_grad: `explain` says `fixed`) make the call faster, the backward most. Shapes as `linear_attention`; options and
    errors in the module's docstring. Orders as in Zhang et al., arXiv 2510.27258.
    """
    return run("polynomial", q, k, v, coefficients, **options)


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, **options: Unpack[Keywords]) -> Result:
    """The quadratic baseline: o_t = sum_j softmax_j(s q_t.k_j) v_j, s = D^-1/2 by default.

    Shapes as `linear_attention`. Takes causal, scale, key_padding_mask and cu_seqlens with max_seqlen; any other
    option raises ValueError. impl="torch" is torch's scaled_dot_product_attention. Vaswani et al., arXiv 1706.03762,
    Eq 1.
    """
    return run("softmax_attention", q, k, v, **options)
