"""The kernels of `power_pair` in Triton's interpreter. Not collected: tests/ops/citizen/test_power.py runs it."""

import pytest
import torch

from hla_kernels.dispatch import trial, verify
from hla_kernels.features import power_kernels
from hla_kernels.features.power import power_op, power_torch
from tests.helpers.powers import errors, ignores_unused_gradients, results, tokens, truth
from tests.ops.fused.cases import poison

LIMITS = {torch.float32: 4e-6, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


def alone(x, exponent):
    return power_op(x, x[:, :0], exponent, exponent)[0]


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize(("n", "h", "d"), [(37, 3, 64), (70, 2, 72), (21, 6, 128), (5, 1, 7)])
def test_kernels(monkeypatch, dtype, n, h, d):
    """k with two heads, of another length, with heads before tokens in memory."""
    q, k = tokens(dtype, n, h, d), tokens(dtype, n + 4, 2, d)
    k = [x.transpose(1, 2).contiguous().transpose(1, 2) if x.dim() == 4 else x for x in k]
    with monkeypatch.context() as patch:
        poison(patch)
        out = power_kernels.forward(q[0], k[0], q[1], k[1])
        dq, dk, dp_q, dp_k = power_kernels.backward((q[2], k[2]), q[0], k[0], q[1], k[1])
    for found, given in (((out[0], dq, dp_q), q), ((out[1], dk, dp_k), k)):
        found = errors(found, truth(*given))
        assert max(found) <= LIMITS[dtype], found


def test_infinite_gradients_of_zero_channels():
    assert ignores_unused_gradients(alone, *tokens(torch.float16, 21, 2, 40))


def test_offsets_beyond_32_bits():
    x, exponent, grad = tokens(torch.float16, 9, 2, 16)
    far = torch.empty(2**31 + 9 * 32, dtype=x.dtype).as_strided(x.shape, (2**31, 32, 16, 1)).copy_(x)
    both = [(t, t[:, :0], exponent, exponent) for t in (far, x)]
    pairs = [power_kernels.forward(*given) + power_kernels.backward((grad, grad[:, :0]), *given) for given in both]
    assert all(torch.equal(a, b) for a, b in zip(*pairs, strict=True))


def test_through_the_operator():
    """With gradients, from an expanded gradient; NaN stays NaN; no rows."""
    x, exponent, grad = tokens(torch.float32, 9, 2, 16)
    grad = grad[:, :1].expand_as(grad)
    found = errors(results(alone, x, exponent, grad), truth(x, exponent, grad))
    assert max(found) <= 4e-6
    assert alone(x.masked_fill(x > 1, float("nan")), exponent).isnan().any()
    empty = results(alone, x[:0], exponent, grad[:0])
    assert empty[0].shape == x[:0].shape and not empty[2].any()
    learned = exponent.requires_grad_()
    torch.library.opcheck(torch.ops.hla_kernels.power_pair, (x.requires_grad_(), x[:, :, 1:], learned, learned[1:]))


@pytest.mark.parametrize("size", [1e-30, 1e38])
@pytest.mark.parametrize("times", [1, 30])
def test_neither_large_tokens_nor_large_exponents_overflow(size, times):
    """The error grows with p, as the error of the logarithm does."""
    x, exponent, grad = tokens(torch.float32, 9, 2, 16)
    x, exponent = x / x.abs().max() * size, exponent * times
    exact = results(power_torch, x.double(), exponent.double(), grad.double())
    found = errors(results(alone, x, exponent, grad)[:2], exact[:2])
    assert max(found) <= 4e-6 * times, found


@pytest.mark.parametrize("dtype", LIMITS)
def test_the_check_on_first_use_passes(monkeypatch, dtype):
    monkeypatch.setattr(trial, "DEVICE", "cpu")
    monkeypatch.setattr(trial, "N", 12)
    (run,) = trial.runs(("power_pair", (dtype, dtype, torch.float32, torch.float32), (3, 2, 40)))
    assert verify.failure(run) is None
