"""Tokens for the tests of `power`, and its definition."""

from collections.abc import Callable

import torch
from torch import Tensor

from tests.helpers.error_rule import relative_error


def tokens(dtype: torch.dtype, n: int, h: int, d: int, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """(x, a part of a packed tensor, exponents, gradient); one token has no positive channel, another only one."""
    torch.manual_seed(0)
    qkv = torch.randn(2, n, 3, h, d).to(device, dtype)
    qkv[0, 0] = -1
    qkv[0, 1, :, :, 1:] = -1
    return qkv[:, :, 1], torch.linspace(1.2, 4.5, h).to(device), torch.randn(2, n, h, d).to(device, dtype)


def by_hand(x: Tensor, exponent: Tensor) -> Tensor:
    """|y| y^p / |y^p|, y = relu(x), as it stands in the paper; zero for y = 0."""
    y = x.relu()
    safe = torch.where(y > 0, y, 1.0)
    raised = torch.where(y > 0, safe ** exponent[:, None], 0.0)
    squares = [z.square().sum(-1, keepdim=True) for z in (y, raised)]
    lengths = [torch.where(square > 0, square, 1.0).sqrt() for square in squares]
    return raised * lengths[0] / lengths[1]


def results(form: Callable[[Tensor, Tensor], Tensor], x: Tensor, exponent: Tensor, grad: Tensor) -> list[Tensor]:
    """[features, dx, dp]."""
    x, exponent = x.detach().clone().requires_grad_(), exponent.detach().clone().requires_grad_()
    out = form(x, exponent)
    out.backward(grad)
    assert x.grad is not None and exponent.grad is not None
    return [out.detach(), x.grad, exponent.grad]


def ignores_unused_gradients(
    form: Callable[[Tensor, Tensor], Tensor], x: Tensor, exponent: Tensor, grad: Tensor
) -> bool:
    """Whether an infinite gradient of channels without a positive value leaves the results as they are."""
    pair = (results(form, x, exponent, grad.masked_fill(x <= 0, value)) for value in (0.0, float("inf")))
    return all(torch.equal(a, b) for a, b in zip(*pair, strict=True))


def truth(x: Tensor, exponent: Tensor, grad: Tensor) -> list[Tensor]:
    """The same by hand in float64."""
    return results(by_hand, x.double(), exponent.double(), grad.double())


def errors(found: list[Tensor], exact: list[Tensor]) -> list[float]:
    """Relative error of each."""
    return [relative_error(a, b) for a, b in zip(found, exact, strict=True)]
