"""The error rule of the Triton forms, against float64.

Relative L2 error of outputs and token gradients, and the error of the gradient of coefficients in units of the matrices
of whose product it is the sum.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hla_kernels.features import feature
from hla_kernels.features.mapped import MAPS
from hla_kernels.hla.moments import ORDERS, moments, operator_matrix, product, read_out, token_sums
from hla_kernels.options import Options
from hla_kernels.sequences import to_heads

LIMITS = {torch.bfloat16: 5e-3, torch.float16: 1e-3, torch.float32: 1e-5}  # of the dtype of the tokens
# Features that are softmaxes, and their gradients, are rounded outside of the kernels. In a simulation of the roundings
# of dk in bfloat16, these two alone give 2.0e-3 and 2.2e-3, 0.6 of the limit, and errors add as squares.
BEFORE = 0.6
COEFFICIENTS = 1e-3
NAMES = ("o", "dq", "dk", "dv")


def less(name: str | None, which: str, center: str | None) -> float:
    """Return what kernels subtract from features of "q" or "k": 1 from elu1 of what is centred."""
    return float(name == "elu1" and which in (center or ""))


def features_as_read(q: Tensor, k: Tensor, options: dict[str, Any], dtype: torch.dtype) -> tuple[Tensor, Tensor, dict]:
    """Return phi(q) and phi(k) in float64, with the gradients of phi, and the options of a call with them. Kernels of
    tokens of this dtype read relu and elu1 rounded to it, as they read `power`."""
    name = options.get("feature_map")
    if name not in MAPS:
        return q, k, options
    center = options.get("center")
    found = [feature(x, name) - less(name, which, center) for x, which in ((q, "q"), (k, "k"))]
    fq, fk = (y + (y.to(dtype).to(y.dtype) - y).detach() for y in found)
    return fq, fk, {**options, "feature_map": "identity"}


def relative_error(x: Tensor, truth: Tensor) -> float:
    """|x - truth| / |truth|; NaN when anything was not written."""
    return ((x.double() - truth).norm() / truth.norm().clamp_min(1e-30)).item()


def check_tokens(
    got: list[Tensor], truth: list[Tensor], where: object = "", feature_map: str | None = None
) -> None:
    """o, dq, dk and dv (or the first of them) are within the limit of their dtype, for this feature map."""
    for name, x, t in zip(NAMES, got[:4], truth[:4], strict=False):
        error, limit = relative_error(x, t), LIMITS[x.dtype]
        if feature_map in ("softmax", "softmax_pair"):
            limit *= math.hypot(1.0, BEFORE)
        assert error <= limit, (where, name, error)


def check_coefficients(got: Tensor, truth: Tensor, sizes: Tensor, where: object = "") -> None:
    """|dc - truth| <= 1e-3 |dM| |M_i|, summed over the batch: a difference of its terms may be any part of them."""
    error = ((got.double() - truth).abs() / sizes).max().item()
    assert error <= COEFFICIENTS, (where, "dc", error)


def sizes_of_coefficients(tokens: list[Tensor], c: Tensor, grad: Tensor, options: Options) -> Tensor:
    """Sum_b |dM| |M_i| [H, 4] of `polynomial`: M_i the operator of order i, dM the gradient of their mixture."""
    heads = tokens[1].shape[2]
    q, k, v, g = (to_heads(x.detach(), heads, torch.float64) for x in (*tokens, grad))
    q, k = (feature(x, options.feature_map) for x in (q, k))
    n, sums = q.shape[3], token_sums("polynomial", q, k, v, options)
    m = moments("polynomial", sums, n, options)
    matrix = operator_matrix("polynomial", sums, n, options, c.detach()).requires_grad_()
    (d_matrix,) = torch.autograd.grad(read_out(q, matrix, sums, n, options), matrix, g)
    sizes = [d_matrix.norm(dim=(-2, -1)) * product(order, m).norm(dim=(-2, -1)) for order in ORDERS]
    return torch.stack(sizes, -1).sum(0).flatten(0, 1)
