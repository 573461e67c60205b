"""Reference of every operator as an N x N matrix of weights W, o_t = sum_j W_tj v_j.

Slow and quadratic on purpose: the other forms are tested against it. It is evaluated in the dtype of its inputs: exact
in float64, and a measure of the rounding error in lower precision. Symbols: A = phi(Q) phi(K)', s the scale of a
moment, Gamma_tj = gamma^(t-j) [j <= t] (all ones if two-sided; t and j count frames if causal="frame"), lambda the
ridge. Zhang et al., Higher-order Linear Attention, arXiv 2510.27258 (definitions of HLA2, AHLA, HLA3; masks as
matrices).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..options import Options, is_paper
from ..sequences import query_heads, real


def reference(
    op: str, q: Tensor, k: Tensor, v: Tensor, options: Options, gamma: Tensor | None = None,
    coefficients: Tensor | None = None, mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return o_t = sum_j W_tj v_j for q [B, N, H, D], k [B, N, Hk, D], v [B, N, Hk, Dv] -> [B, N, H, Dv].

    gamma: decay per query head [H]. coefficients: [H, 4], for `polynomial` only.
    normalize: W v / (W 1 + eps).  mean_path: vbar_t + sum_j W_tj (v_j - vbar_t).
    mask [B, N]: rows and columns of W, A and the averaging weights are zero at padded tokens.
    """
    q, k, v = query_heads(q, k, v, mask)
    q, k = phi(q, options.feature_map), phi(k, options.feature_map)
    past = past_weights(q, options, gamma, mask)
    average = past / past.sum(-1, keepdim=True).clamp(min=1 if mask is not None else 0)
    weights = causal_weights if options.causal else two_sided_weights
    w = weights(op, q, k, past, average, options, gamma, coefficients)
    y, total = w @ v, w.sum(-1, keepdim=True)
    if options.normalize:
        if mask is not None:
            total = total.where(mask[:, None, :, None], 1)  # the gradient of 0 / 0 is NaN, even at unused outputs
        y = y / (total + options.eps)
    y = real(y.transpose(1, 2), mask).transpose(1, 2)
    if options.mean_path:
        y = y + (1 - total) * (average @ v)
    return y.transpose(1, 2).contiguous()


def phi(x: Tensor, name: str | None) -> Tensor:
    """Apply a feature map, [..., D] -> [..., D] (softmax_pair: [..., 2 D]); independent of the torch form's code.

    identity: x.  relu: max(x, 0).  elu1: exp(x) below 0, x + 1 above.  softmax: exp(x_i) / sum_i exp(x_i).
    softmax_pair: [softmax(x), softmax(-x)].
    """
    if name is None or name == "identity":
        return x
    if name == "relu":
        return torch.where(x <= 0, 0, x)
    if name == "elu1":
        return torch.where(x <= 0, x.masked_fill(x > 0, 0).exp(), x + 1)
    if name == "softmax_pair":
        return torch.cat([phi(x, "softmax"), phi(-x, "softmax")], -1)
    assert name == "softmax", name
    e = (x - x.detach().amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


def past_weights(q: Tensor, options: Options, gamma: Tensor | None, mask: Tensor | None) -> Tensor:
    """Return the weights Gamma [H or 1, N, N] of causality and decay. With a mask: [B, 1, N, N], 1 where both tokens
    are real."""
    n = q.shape[2]
    if mask is not None:
        return (mask[:, None, :, None] & mask[:, None, None, :]).to(q.dtype)
    ones = torch.ones(1, n, n, dtype=q.dtype, device=q.device)
    if not options.causal:
        return ones
    if gamma is None:
        gamma = ones[:, 0, 0]
    return decay_powers(gamma.to(q.dtype), n, 0, options.frame or 1)


def decay_powers(gamma: Tensor, n: int, shift: int, frame: int = 1) -> Tensor:
    """Return gamma^(t-j-shift) [j + shift <= t], [H, N, N]; t and j count frames of `frame` tokens."""
    t = torch.arange(n, device=gamma.device) // frame
    distance = t[:, None] - t[None, :] - shift
    return torch.where(distance >= 0, gamma[:, None, None] ** distance.clamp(min=0), 0)


def two_sided_weights(
    op: str, q: Tensor, k: Tensor, past: Tensor, average: Tensor, options: Options, gamma: Tensor | None,
    coefficients: Tensor | None,
) -> Tensor:  # fmt: skip
    """Return W: LA sA; HLA2 s^2 A A'; AHLA s^2 A A; HLA3 s^3 A A' A; polynomial their mixture. Ridge: S + lambda I or
    R + lambda I."""
    if options.center is not None:
        k = k - average @ k
    if options.center == "qk":
        q = q - average @ q
    s = (
        options.q_scale / past.sum((-2, -1), keepdim=True).sqrt().clamp(min=1)
        if options.scale is None
        else options.scale
    )
    a = s * past * (q @ k.mT)
    qq = s * past * (q @ q.mT)
    forms = {
        "linear_attention": lambda: a,
        "hla2": lambda: a @ a.mT + options.ridge * qq,
        "ahla": lambda: a @ a + options.ridge * a,
        "hla3": lambda: (a @ a.mT + options.ridge * qq) @ a,
    }
    if op != "polynomial":
        return forms[op]()
    assert coefficients is not None
    c = coefficients.to(a.dtype)[:, :, None, None]
    return c[:, 0] * a + c[:, 1] * (a @ a.mT) + c[:, 2] * (a @ a) + c[:, 3] * (a @ a.mT @ a)


def causal_weights(
    op: str, q: Tensor, k: Tensor, past: Tensor, average: Tensor, options: Options, gamma: Tensor | None,
    coefficients: Tensor | None,
) -> Tensor:  # fmt: skip
    """Return W: LA W1 = s Gamma o A; AHLA W1 W1; HLA2 W2 = s Gamma o (A W1'); HLA3 W2 W1. With `center`, the scores in
    W1 are centred over tokens j <= t."""
    s = 1.0 if options.scale is None else options.scale
    if options.center == "qk":
        q = q - average @ q
    a, qq = q @ k.mT, q @ q.mT
    if is_paper(op, options):
        return paper_weights(a, past, gamma, s) + options.ridge * s * past * qq
    scores = a if options.center is None else a - (average * a).sum(-1, keepdim=True)
    w1 = s * past * scores
    w2 = s * past * (a @ w1.mT + options.ridge * qq)
    forms = {
        "linear_attention": lambda: w1,
        "hla2": lambda: w2,
        "ahla": lambda: w1 @ w1 + options.ridge * w1,
        "hla3": lambda: w2 @ w1,
    }
    return forms[op]()


def paper_weights(a: Tensor, past: Tensor, gamma: Tensor | None, s: float) -> Tensor:
    """Return W of the paper's serial rule S = gS + kk', C = gC + qv', G = gG + k (k'C_{t-1}), o = q'(S C - G).

    W_tj = s^2 sum_i (g^(2t-i-j) [i,j <= t] - g^(t-1-j) [j < i <= t]) A_ti A_ji: terms with i > j do not cancel when g <
    1.
    """
    assert gamma is not None
    n = a.shape[-1]
    seen = past * ((past * a) @ a.mT)
    removed = decay_powers(gamma.to(a.dtype), n, 1) * (a.tril() @ a.mT.tril(-1))
    return s * s * (seen - removed)
