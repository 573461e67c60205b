"""Explicit backward of the two-sided form: dy -> matrix -> moments -> tokens.

    o = q M + b     dM = q'dy         dq = dy M'
    M from moments  moments.product_grad, times the mixture's coefficients
    G = s a'b       da = s b dG'      db = s a dG      (a or b centred: both enter minus their mean)

Gradients of key and value moments are summed over the query heads of a group as D x D matrices, before the products
with tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..features import feature, feature_grad
from ..options import Options, compute_dtype, needs_ones
from ..sequences import counts
from .layout import heads_view, live_heads, to_heads
from .moments import (
    FACTORS,
    MOMENTS,
    ORDERS,
    affine,
    is_centred,
    mixture_weights,
    moment_scale,
    moments,
    operator_matrix,
    product,
    product_grad,
    token_sums,
)

Grads = dict[str, Tensor]


def gradient(
    op: str, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, coefficients: Tensor | None, options: Options, outs: tuple,
    mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Write dq, dk, dv into `outs` (any strides), zeros for tokens outside `mask` [B, N]; return d coefficients, empty
    if there are none."""
    n_key_heads, dtype = k.shape[2], compute_dtype(q.dtype)
    n = q.shape[1] if mask is None else counts(mask, dtype)
    raw = {name: live_heads(to_heads(x, n_key_heads, dtype), mask) for name, x in (("q", q), ("k", k), ("v", v))}
    dy = live_heads(to_heads(grad, n_key_heads, dtype), mask)
    maps = {"q": options.feature_map, "k": options.feature_map, "v": None}
    tokens = {name: live_heads(feature(x, maps[name]), mask) for name, x in raw.items()}
    sums = token_sums(op, tokens["q"], tokens["k"], tokens["v"], options)
    m = moments(op, sums, n, options)
    weights = None if coefficients is None else mixture_weights(coefficients, n_key_heads, dtype)
    matrix = operator_matrix(op, m, weights)

    if options.normalize:
        d_matrix, dq, rows = _ratio_grad(dy, tokens["q"], matrix, options, mask)
    else:
        d_matrix, dq, rows = _affine_grad(dy, tokens["q"], matrix, sums, n, options)
    d_moments, d_weights = _mixture_grad(op, m, weights, d_matrix)
    grads = _token_grads(op, d_moments, tokens, sums, rows, {"q": dq}, n, options)
    for name, out in zip("qkv", outs, strict=True):
        phi_grad = feature_grad(raw[name], tokens[name], grads[name], maps[name])
        heads_view(out, n_key_heads).copy_(live_heads(phi_grad, mask))
    if coefficients is None:
        return q.new_empty((0,))
    return torch.stack(d_weights, -1).flatten(0, 1).to(coefficients.dtype)


def _ratio_grad(
    dy: Tensor, q: Tensor, matrix: Tensor, options: Options, mask: Tensor | None
) -> tuple[Tensor, Tensor, Grads]:
    """Return (dM, dq, None) for o = (q M_v) / (q M_1 + eps)."""
    inverse = live_heads(1 / (q @ matrix[..., -1:] + options.eps), mask)
    dy = dy * inverse
    d_total = -(dy * (q @ matrix[..., :-1] * inverse)).sum(-1, keepdim=True)
    d_matrix = torch.cat([q.mT @ dy, q.mT @ d_total], -1)
    return d_matrix, dy @ matrix[..., :-1].mT + d_total * matrix[..., -1:].mT, {}


def _affine_grad(
    dy: Tensor, q: Tensor, matrix: Tensor, sums: Grads, n: int | Tensor, options: Options
) -> tuple[Tensor, Tensor, Grads]:
    """Return (dM, dq, rows added to the gradients of all tokens) for o = q M + b of `moments.affine`."""
    folded, _ = affine(matrix, sums, n, options)
    d_folded, dq, rows = q.mT @ dy, dy @ folded.mT, {}
    if options.mean_path or options.center == "qk":
        d_row = dy.sum(-2, keepdim=True)  # [B, Hk, G, 1, Dv]
    if options.center == "qk":
        d_folded = d_folded - (sums["sum_q"] / n).mT @ d_row
        rows["q"] = -(d_row @ folded.mT) / n
    if not options.mean_path:
        return d_folded, dq, rows
    rows["v"] = (d_row - matrix[..., -1:].mT @ d_folded).sum(2, keepdim=True) / n
    return torch.cat([d_folded, -d_folded @ (sums["sum_v"] / n).mT], -1), dq, rows


def _mixture_grad(op: str, m: Grads, weights: list[Tensor] | None, grad: Tensor) -> tuple[Grads, list[Tensor]]:
    """Return the gradients of the moments, reduced to their shapes, and of the mixture weights [Hk, G] each."""
    total: Grads = {}
    d_weights = []
    for i, order in enumerate(ORDERS if weights is not None else (op,)):
        term = grad
        if weights is not None:
            d_weights.append((grad * product(order, m)).sum((0, -2, -1)))
            term = weights[i] * grad
        for name, value in product_grad(order, m, term).items():
            value = value.sum_to_size(m[name].shape)
            total[name] = total[name] + value if name in total else value
    return total, d_weights


def _token_grads(
    op: str, d_moments: Grads, tokens: Grads, sums: Grads, rows: Grads, grads: Grads, n: int | Tensor, options: Options
) -> Grads:
    """Return dq, dk, dv in head layout: `grads`, plus gradients through the moments, plus one row for all tokens."""
    s = moment_scale(n, options)
    for name in MOMENTS[op]:
        a, b = FACTORS[name]
        d = d_moments[name] * s
        centred = is_centred(name, options.center)
        if needs_ones(options) and b == "v":
            if not centred:
                _accumulate(rows, a, d[..., -1:].mT)
            d = d[..., :-1]
        pairs = [(a, b, d + d.mT)] if a == b else [(a, b, d.mT), (b, a, d)]
        for target, source, weight in pairs:
            _accumulate(grads, target, _to_shape(tokens[source] @ weight, tokens[target]))
            if centred:
                _accumulate(rows, target, _to_shape(-(sums["sum_" + source] / n) @ weight, tokens[target]))
    for name, row in rows.items():
        grads[name] += row
    return grads


def _to_shape(x: Tensor, like: Tensor) -> Tensor:
    """Sum over the query heads of a group if `like` has the shape of a key or a value."""
    return x.sum(2, keepdim=True) if like.shape[2] == 1 and x.shape[2] > 1 else x


def _accumulate(grads: Grads, name: str, value: Tensor) -> None:
    grads[name] = grads[name] + value if name in grads else value
