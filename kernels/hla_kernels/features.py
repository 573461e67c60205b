"""Feature maps applied to q and k inside an operator, with their derivatives for the hand-written backward."""

from __future__ import annotations

from torch import Tensor

FEATURE_MAPS = ("identity", "relu", "elu1", "softmax")


def feature(x: Tensor, name: str | None) -> Tensor:
    """phi(x), elementwise or over the last dimension.

    identity: x.  relu: max(x, 0).  elu1: elu(x) + 1 > 0.  softmax: softmax over D.
    x [..., D] -> [..., D] in the dtype of x. Linear attention with elu + 1: Katharopoulos et al., arXiv 2006.16236, Eq
    7.
    """
    if name is None or name == "identity":
        return x
    if name == "relu":
        return x.relu()
    if name == "elu1":
        # not elu(x) + 1, which rounds to 0 below x = -17; exp of x <= 0 only, so that nothing overflows
        return x.clamp(max=0).exp() + x.relu()
    assert name == "softmax", name
    return x.softmax(-1)


def feature_grad(x: Tensor, phi: Tensor, grad: Tensor, name: str | None) -> Tensor:
    """d loss / d x from grad = d loss / d phi(x); phi = feature(x). All [..., D]."""
    if name is None or name == "identity":
        return grad
    if name == "relu":
        return grad * (x > 0)
    if name == "elu1":
        return grad * phi.clamp(max=1)  # exp(x) below 0, where phi <= 1, and 1 above
    assert name == "softmax", name
    return phi * (grad - (grad * phi).sum(-1, keepdim=True))
