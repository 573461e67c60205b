"""Explicit backward of the two-sided form: dy -> matrix -> sums over tokens -> tokens.

    o = q M + b         dM = q'dy         db = sum dy         dq = dy M'
    M, b from the sums  by autograd: products of D x D matrices
    G = a'b             da = b dG'        db = a dG           and the gradient of a plain sum is one row for all tokens

Gradients of key and value moments are summed over the query heads of a group as D x D matrices, before the products
with tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..dispatch.operator import vjp
from ..features import feature, feature_grad
from ..options import Options, compute_dtype
from ..sequences import counts, live_heads, to_heads, to_tokens
from .moments import FACTORS, affine, operator_matrix, token_sums

Tensors = dict[str, Tensor]


def gradient(
    op: str, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, coefficients: Tensor | None, options: Options,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Return dq, dk, dv, zeros for tokens outside `mask` [B, N], and d coefficients, None if there are none."""
    n_key_heads, dtype = k.shape[2], compute_dtype(q.dtype)
    n = q.shape[1] if mask is None else counts(mask, dtype)
    raw = {name: live_heads(to_heads(x, n_key_heads, dtype), mask) for name, x in (("q", q), ("k", k), ("v", v))}
    dy = live_heads(to_heads(grad, n_key_heads, dtype), mask)
    maps = {"q": options.feature_map, "k": options.feature_map, "v": None}
    tokens = {name: live_heads(feature(x, maps[name]), mask) for name, x in raw.items()}
    sums = token_sums(op, tokens["q"], tokens["k"], tokens["v"], options)

    def read(*given: Tensor) -> tuple[Tensor, ...]:
        """Return (M,) or (M, b) from the sums and the coefficients; with normalize, M with the column for v = 1."""
        named = dict(zip(sums, given, strict=False))
        matrix = operator_matrix(op, named, n, options, *given[len(named) :])
        return (matrix,) if options.normalize else affine(matrix, named, n, options)

    out, pull = vjp(read, *sums.values(), *([] if coefficients is None else [coefficients]))
    if options.normalize:
        d_matrix, dq = _ratio_grad(dy, tokens["q"], out[0], options.eps, mask)
    else:
        d_matrix, dq = tokens["q"].mT @ dy, dy @ out[0].mT
    d_out = (d_matrix,) if len(out) == 1 else (d_matrix, dy.sum(-2, keepdim=True))
    d_given = pull(tuple(d.sum_to_size(x.shape) for d, x in zip(d_out, out, strict=True)))
    grads = _token_grads(dict(zip(sums, d_given, strict=False)), tokens, dq)

    def of(name: str, x: Tensor) -> Tensor:
        d = feature_grad(raw[name], tokens[name], grads.pop(name), maps[name])
        return to_tokens(live_heads(d, mask), x.dtype)

    return of("q", q), of("k", k), of("v", v), None if coefficients is None else d_given[-1]


def _ratio_grad(dy: Tensor, q: Tensor, matrix: Tensor, eps: float, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return (dM, dq) for o = (q M_v) / (q M_1 + eps)."""
    inverse = live_heads(1 / (q @ matrix[..., -1:] + eps), mask)
    dy = dy * inverse
    d_total = -(dy * (q @ matrix[..., :-1] * inverse)).sum(-1, keepdim=True)
    d_matrix = torch.cat([q.mT @ dy, q.mT @ d_total], -1)
    return d_matrix, dy @ matrix[..., :-1].mT + d_total * matrix[..., -1:].mT


def _token_grads(d_sums: Tensors, tokens: Tensors, dq: Tensor) -> Tensors:
    """Return dq, dk, dv in head layout: the given dq, and gradients through the sums."""
    grads = {"q": dq}
    for name, d in d_sums.items():
        a, b = FACTORS.get(name, (name.removeprefix("sum_"), ""))
        if not b:
            grads[a] = grads[a] + d
            continue
        for target, source, weight in [(a, b, d + d.mT)] if a == b else [(a, b, d.mT), (b, a, d)]:
            value = (tokens[source] @ weight).sum_to_size(tokens[target].shape)  # over the query heads of a group
            grads[target] = grads[target] + value if target in grads else value
    return grads
