"""The power of a feature map: torch's form, the kernel in the interpreter (here by a child process), compiled without a
GPU, and on a GPU."""

from pathlib import Path

import pytest
import torch

from hla_kernels.features.power import power, power_pair, power_torch
from tests.helpers.powers import errors, ignores_unused_gradients, results, tokens, truth
from tests.ops.fused.children import PYTEST, check_compiled, check_interpreted

CHILD = Path(__file__).parent.parent / "fused" / "children" / "power.py"
GATE = Path(__file__).with_name("power_gate.py")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_form(dtype):
    args = tokens(dtype, 37, 3, 40)
    found = errors(results(power, *args), truth(*args))
    assert max(found) <= (2e-6 if dtype == torch.float32 else 2.0**-8), found


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_infinite_gradients_of_zero_channels(device):
    """As a ratio has them in float16 for queries that read few features of the keys."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("the kernels need a CUDA device: none here")
    assert ignores_unused_gradients(power, *tokens(torch.float16, 37, 3, 40, device))


def test_sizes_that_do_not_fit():
    q, p, _ = tokens(torch.float32, 5, 3, 16)
    with pytest.raises(ValueError, match=r"k has 2 heads and needs as many exponents, got \(3,\)"):
        power_pair(q, q[:, :, 1:], p, p)
    with pytest.raises(ValueError, match="equal numbers of channels per head, got 16 and 8"):
        power_pair(q, q[..., 8:], p, p)


@pytest.mark.kernels
def test_interpreted():
    pytest.importorskip("triton")
    check_interpreted(*PYTEST, CHILD)


@pytest.mark.kernels
def test_compiled(tmp_path):
    """Forward and backward, without spills."""
    pytest.importorskip("triton")
    calls = [(d, dtype) for d in (32, 64, 72, 96, 128) for dtype in ("bfloat16", "float32")]
    check_compiled(0, 2, tmp_path, GATE, *calls)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernels need a CUDA device: none here")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("n", "h", "d"), [(1024, 3, 64), (77, 16, 72), (5, 2, 128)])
def test_kernels(dtype, n, h, d):
    """Within the rounding of the dtype; the same bits again, with a pair and under torch.compile."""
    x, exponent, grad = tokens(dtype, n, h, d, "cuda")
    exact = truth(x, exponent, grad)
    first, second = (results(power, x, exponent, grad) for _ in range(2))
    paired = results(lambda x, p: power_pair(x, x[:, 1:, :1], p, p[:1])[0], x, exponent, grad)
    as_k = results(lambda x, p: power_pair(x[:, 1:, :1], x, p[:1], p)[1], x, exponent, grad)
    whole = results(torch.compile(power, fullgraph=True), x, exponent, grad)
    rounding = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 4e-6}[dtype]
    assert max(errors(first, exact) + errors(as_k, exact)) <= rounding
    for a, *others in zip(first, second, paired, whole, strict=True):
        assert all(torch.equal(a, b) for b in others)
    args = [t.detach().requires_grad_() for t in (x, x[:, 1:, :1], exponent, exponent[:1])]
    torch.library.opcheck(torch.ops.hla_kernels.power_pair, args)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernels need a CUDA device: none here")
def test_large_numbers():
    """Near the largest numbers, with p = 135; NaN stays NaN."""
    x, exponent, grad = tokens(torch.float32, 9, 2, 16, "cuda")
    x, exponent = x / x.abs().max() * 1e38, exponent * 30
    exact = results(power_torch, x.double(), exponent.double(), grad.double())
    found = errors(results(power, x, exponent, grad)[:2], exact[:2])
    assert max(found) <= 4e-6 * 30, found  # as the error of the logarithm, it grows with p
    assert power(x.masked_fill(x > 1e37, float("nan")), exponent).isnan().any()
