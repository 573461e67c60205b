"""Feature maps of q and k inside an operator, with derivatives for the explicit backward."""

from __future__ import annotations

import torch
from torch import Tensor

FEATURE_MAPS = ("identity", "relu", "elu1", "softmax", "softmax_pair")


def feature_width(d: int, name: str | None) -> int:
    """Return the number of features for d channels per head: 2 d for the softmax pair, d otherwise."""
    return 2 * d if name == "softmax_pair" else d


def feature(x: Tensor, name: str | None) -> Tensor:
    """Return phi(x), elementwise or over the last dimension.

    identity: x.  relu: max(x, 0).  elu1: elu(x) + 1 > 0.  softmax: softmax over D.  softmax_pair: [softmax(x),
    softmax(-x)]. x [..., D] -> [..., D], the pair [..., 2 D], in the dtype of x. Linear attention with elu + 1:
    Katharopoulos et al., arXiv 2006.16236, Eq 7; the pair: Zhang et al., Hedgehog, arXiv 2402.04347, section 4.1.
    """
    if name is None or name == "identity":
        return x
    if name == "relu":
        return x.relu()
    if name == "elu1":
        # not elu(x) + 1, which rounds to 0 below x = -17; exp of x <= 0 only, so it cannot overflow; not
        # clamp(max=0), whose derivative at 0 is 0 in some versions of torch
        return x.masked_fill(x > 0, 0).exp() + x.relu()
    if name == "softmax_pair":
        return torch.cat([x.softmax(-1), (-x).softmax(-1)], -1)
    assert name == "softmax", name
    return x.softmax(-1)


def feature_grad(x: Tensor, phi: Tensor, grad: Tensor, name: str | None) -> Tensor:
    """Return d loss / d x [..., D] from grad = d loss / d phi(x); phi = feature(x)."""
    if name is None or name == "identity":
        return grad
    if name == "relu":
        return grad * (x > 0)
    if name == "elu1":
        return grad * phi.clamp(max=1)  # exp(x) below 0, where phi <= 1, and 1 above
    if name == "softmax_pair":
        plus, minus = (_softmax_grad(p, g) for p, g in zip(phi.chunk(2, -1), grad.chunk(2, -1), strict=True))
        return plus - minus
    assert name == "softmax", name
    return _softmax_grad(phi, grad)


def _softmax_grad(phi: Tensor, grad: Tensor) -> Tensor:
    return phi * (grad - (grad * phi).sum(-1, keepdim=True))
