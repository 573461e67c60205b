"""Public operators with a common signature.

Related: `blocks` (block mixing), `softmax` (Taylor expansion, multipoles), `delta`. In all of them, two-sided means not
causal; D and Dv are the channels of a key head and a value head; a moment is a sum over tokens such as P = s sum k v',
with the scale s. All symbols: `hla/__init__.py`.

Shapes: q [B, N, H, D], k [B, N, Hk, D], v [B, N, Hk, Dv] with any strides (the Triton forms read them in place and
require a contiguous last dimension); Hk divides H, and query head h uses key head h // (H // Hk). Returns o
[B, N, H, Dv], contiguous, in the dtype of q, or (o, state) with return_state. Tokens come before heads, unlike in
torch's scaled_dot_product_attention: tensors [B, H, N, D] are not recognized, but are read as H tokens of N heads.

Operators `.._qkvpacked` have one tensor qkv [B, N, 3, H, D], so as many key as query heads, and its gradient is one
tensor: the backward of a two-sided call writes dq, dk and dv to one buffer, other calls unbind qkv. Options, results
and errors are the same; a qkv of another shape raises ValueError.

Options
    causal        token t attends to tokens j <= t; otherwise all tokens attend to all tokens. Later tokens are
                  multiplied by zero, not skipped: NaN or Inf in them would reach earlier tokens, so pad at the end with
                  zeros. "frame": tokens attend to all tokens of their frame and of earlier frames (video; the state
                  does not grow with the number of frames)
    frame         tokens per frame for causal="frame", a divisor of N; frames are consecutive tokens
    feature_map   None, "identity", "relu", "elu1" (elu + 1), "softmax" (over D) or "softmax_pair" ([softmax(x),
                  softmax(-x)]: 2 D features, so D <= 128), applied to q and k in float32
    normalize     divide by the operator with v = 1, plus eps. Needs a non-negative feature_map, or "identity" if q and
                  k are non-negative. For `polynomial` the coefficients must be non-negative, too (not checked)
    eps           absolute, added to the denominator. The denominator is about s^p Sum (products of p feature
                  scores), which is small for small features (feature_map="softmax": about D^-p for two-sided order p);
                  use a smaller eps there, 1e-9, and less for third order at D = 128, where D^-3 is 5e-7. A warning is
                  given if eps exceeds a tenth of the denominator
    center        "k": subtract the token mean from the keys; "qk": also from the queries. Causal: running,
                  decay-weighted means
    mean_path     o = vbar + op(v - vbar) with vbar the mean of v (running if causal)
    decay         gamma in (0, 1], a float or a tensor [H] or [Hk], differentiable, causal only: a factor gamma^(t-j) in
                  every stage; t and j count frames if causal="frame". Checked after the cast to the dtype of the
                  moments; the values of CUDA tensors are not checked, and gamma <= 0 gives NaN
    decay_rule    "cascade", or "paper" for the serial second-order rule of the paper; they differ for decayed hla2 only
    ridge         lambda >= 0: S + lambda I in hla2 and hla3, R + lambda I in ahla (of the scaled moment)
    scale         factor of each moment; None is 1/N two-sided (N includes the tokens of the state) and 1 causal
    q_scale       factor on phi(q), 1 by default (such as D^-1/2), at no cost
    state, return_state   streaming; "mergeable" also stores what `merge` needs. Not supported by impl="reference"
    key_padding_mask   [B, N] bool, True for real tokens, False for padding (the opposite of nn.MultiheadAttention),
                  two-sided without state. Padded tokens are neither read nor written: they do not enter moments, N
                  counts real tokens, and their outputs and gradients are 0
    cu_seqlens    [S + 1] int32 from 0 to N: B = 1, and tokens cu_seqlens[i] .. cu_seqlens[i + 1] - 1 are sequence i,
                  independent of the others; without state, not with causal="frame". max_seqlen: length of the longest
                  sequence, or more. Values of CUDA tensors are not checked. Memory: causal calls and the torch form pad
                  to S x max_seqlen tokens; the two-sided Triton forms read the tokens in place
    impl          "auto", "torch", "reference" (N x N definition) or "triton"; an explicit choice never falls back

Defaults: causal=False, frame=0, feature_map=None, normalize=False, eps=1e-6, center=None, mean_path=False, decay=None,
decay_rule="cascade", ridge=0, scale=None, q_scale=1, state=None, return_state=False, no mask, one sequence per row of
the batch, impl="auto".

Every operator raises ValueError for wrong rank, shapes, dtypes or devices, D > 256, N = 0, unknown names, undefined
combinations of options, and states of other calls.

Derivatives: reverse mode, once. Calls without a state are custom operators with a backward formula: a second derivative
(create_graph=True) raises torch's error "no autograd formula was registered", torch.func.grad and jacrev are not
supported, and forward mode (torch.func.jvp, jacfwd, dual tensors) raises ValueError. return_state=True with
impl="torch", and impl="reference", are plain torch code and support all of them. torch.vmap runs calls one by one.

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
    """Keyword options of all operators; see the module docstring. key_padding_mask [B, N] is True for real tokens."""

    causal: bool | str
    frame: int
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
    Dv] -> [B, N, H, Dv], tokens before heads; key_padding_mask [B, N] is True for real tokens; ridge is not defined;
    options and errors in the module's docstring. Katharopoulos et al., arXiv 2006.16236, Eq 5.
    """
    return run("linear_attention", (q, k, v), **options)


def hla2(q: Tensor, k: Tensor, v: Tensor, **options: Unpack[Keywords]) -> Result:
    """Second order, HLA2: o_t = q_t' S C, S = s sum k k', C = s sum q v', that is s^2 A A' V with A = phi(Q) phi(K)'.

    Causal: o = LA(q, LA(q, k, k), v); state S [D, D], F [D, Dv]; decay_rule="paper": S = gS + kk', C = gC + qv',
    G = gG + k (k'C_{t-1}), o = s^2 q'(S C - G). Shapes and options as `linear_attention`; key_padding_mask is True for
    real tokens. Zhang et al., arXiv 2510.27258, HLA2 := (A A') V masked as in Theorem 3.1; without decay it equals the
    recurrence of Eq. 4.1.
    """
    return run("hla2", (q, k, v), **options)


def ahla(q: Tensor, k: Tensor, v: Tensor, **options: Unpack[Keywords]) -> Result:
    """Second order, asymmetric (AHLA): o_t = q_t' R P, R = s sum k q', P = s sum k v', that is s^2 A A V.

    Causal: o = LA(q, k, LA(q, k, v)); state P, E [D, Dv]. Shapes and options as `linear_attention`;
    key_padding_mask is True for real tokens. Zhang et al., arXiv 2510.27258, AHLA := A A V, Theorem 6.1.
    """
    return run("ahla", (q, k, v), **options)


def hla3(q: Tensor, k: Tensor, v: Tensor, **options: Unpack[Keywords]) -> Result:
    """Third order, HLA3: o_t = q_t' S Qm P, S = s sum k k', Qm = s sum q q', P = s sum k v', that is s^3 A A' A V.

    Causal: o = LA(q, LA(q, k, k), LA(q, k, v)), the strictly causal third order; state S [D, D], P, F [D, Dv]. Shapes
    and options as `linear_attention`; key_padding_mask is True for real tokens. Zhang et al., arXiv 2510.27258,
    HLA3 := (A A' A) V; its Theorem 7.1 drops terms (tests/ops/test_errata.py).
    """
    return run("hla3", (q, k, v), **options)


def polynomial(q: Tensor, k: Tensor, v: Tensor, coefficients: Tensor, **options: Unpack[Keywords]) -> Result:
    """Learned polynomial of orders per head: o = q M, M = c1 P + c2 S C + c3 R P + c4 S Qm P.

    coefficients: [H, 4] = (c1, c2, c3, c4) of A, A A', A A, A A' A. One D x Dv matrix per head, so the cost per token
    does not depend on the orders. Two-sided only (causal raises ValueError), no ridge. With center="k" and
    mean_path=True the first term is the first-order Taylor expansion of softmax attention. Calls are faster if
    coefficients need no gradient (`explain` reports `fixed`), the backward pass most. Shapes and options as
    `linear_attention`; key_padding_mask is True for real tokens. Orders as in Zhang et al., arXiv 2510.27258.
    """
    return run("polynomial", (q, k, v), coefficients, **options)


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, **options: Unpack[Keywords]) -> Result:
    """Softmax attention, the quadratic baseline: o_t = sum_j softmax_j(s q_t.k_j) v_j, s = D^-1/2 by default.

    Shapes as `linear_attention`. Supports causal, scale, key_padding_mask (True for real tokens) and cu_seqlens with
    max_seqlen; other options raise ValueError. impl="torch" is torch's scaled_dot_product_attention. Vaswani et al.,
    arXiv 1706.03762, Eq. 1.
    """
    return run("softmax_attention", (q, k, v), **options)


def linear_attention_qkvpacked(qkv: Tensor, **options: Unpack[Keywords]) -> Result:
    """`linear_attention` of qkv [B, N, 3, H, D] -> [B, N, H, D]: o = q' P; key_padding_mask: True for real tokens."""
    return run("linear_attention", (qkv,), **options)


def hla2_qkvpacked(qkv: Tensor, **options: Unpack[Keywords]) -> Result:
    """`hla2` of qkv [B, N, 3, H, D] -> [B, N, H, D]: o = q' S C; key_padding_mask: True for real tokens."""
    return run("hla2", (qkv,), **options)


def ahla_qkvpacked(qkv: Tensor, **options: Unpack[Keywords]) -> Result:
    """`ahla` of qkv [B, N, 3, H, D] -> [B, N, H, D]: o = q' R P; key_padding_mask: True for real tokens."""
    return run("ahla", (qkv,), **options)


def hla3_qkvpacked(qkv: Tensor, **options: Unpack[Keywords]) -> Result:
    """`hla3` of qkv [B, N, 3, H, D] -> [B, N, H, D]: o = q' S Qm P; key_padding_mask: True for real tokens."""
    return run("hla3", (qkv,), **options)


def polynomial_qkvpacked(qkv: Tensor, coefficients: Tensor, **options: Unpack[Keywords]) -> Result:
    """`polynomial` of qkv [B, N, 3, H, D] with coefficients [H, 4] -> [B, N, H, D]: o = q' (c1 P + c2 S C + c3 R P + c4
    S Qm P); key_padding_mask: True for real tokens."""
    return run("polynomial", (qkv,), coefficients, **options)


def softmax_attention_qkvpacked(qkv: Tensor, **options: Unpack[Keywords]) -> Result:
    """`softmax_attention` of qkv [B, N, 3, H, D] -> [B, N, H, D]; key_padding_mask: True for real tokens."""
    return run("softmax_attention", (qkv,), **options)
