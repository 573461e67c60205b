"""The kernels of `power` in Triton's interpreter. Not collected: tests/ops/citizen/test_power.py runs it."""

import pytest
import torch

from hla_kernels.features import power_kernels
from hla_kernels.features.power import power_op
from tests.helpers.powers import errors, results, tokens, truth
from tests.ops.fused.cases import poison


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 4e-6), (torch.float16, 2.0**-11)])
@pytest.mark.parametrize(("n", "h", "d"), [(37, 3, 64), (70, 2, 72), (5, 1, 7)])
def test_kernels(monkeypatch, dtype, limit, n, h, d):
    x, exponent, grad = tokens(dtype, n, h, d)
    with monkeypatch.context() as patch:
        poison(patch)
        found = [power_kernels.forward(x, exponent), *power_kernels.backward(grad, x, exponent)]
    found = errors(found, truth(x, exponent, grad))
    assert max(found) <= limit, found


def test_through_the_operator():
    """With gradients, from an expanded gradient; NaN stays NaN; no rows."""
    x, exponent, grad = tokens(torch.float32, 9, 2, 16)
    grad = grad[:, :1].expand_as(grad)
    found = errors(results(power_op, x, exponent, grad), truth(x, exponent, grad))
    assert max(found) <= 4e-6
    assert power_op(x.masked_fill(x > 1, float("nan")), exponent).isnan().any()
    empty = results(power_op, x[:0], exponent, grad[:0])
    assert empty[0].shape == x[:0].shape and not empty[2].any()
    torch.library.opcheck(torch.ops.hla_kernels.power, (x.requires_grad_(), exponent.requires_grad_()))
