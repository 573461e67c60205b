"""The power of a feature map: torch's form, the kernels in the interpreter (here by a child process) and on a GPU."""

from pathlib import Path

import pytest
import torch

from hla_kernels.features.power import power
from tests.helpers.powers import errors, results, tokens, truth
from tests.ops.fused.children import PYTEST, check_interpreted

CHILD = Path(__file__).parent.parent / "fused" / "children" / "power.py"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_form(dtype):
    args = tokens(dtype, 37, 3, 40)
    found = errors(results(power, *args), truth(*args))
    assert max(found) <= (2e-6 if dtype == torch.float32 else 2.0**-8), found


@pytest.mark.kernels
def test_interpreted():
    pytest.importorskip("triton")
    check_interpreted(*PYTEST, CHILD)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernels need a CUDA device: none here")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("n", "h", "d"), [(1024, 3, 64), (77, 16, 72), (5, 2, 128)])
def test_kernels(dtype, n, h, d):
    """At most twice torch's own error; the same bits again and under torch.compile."""
    x, exponent, grad = tokens(dtype, n, h, d, "cuda")
    exact = truth(x, exponent, grad)
    first, second = (results(power, x, exponent, grad) for _ in range(2))
    whole = results(torch.compile(power, fullgraph=True), x, exponent, grad)
    rounding = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 4e-6}[dtype]
    assert max(errors(first, exact)) <= rounding
    for a, b, c in zip(first, second, whole, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)
    args = x.detach().requires_grad_(), exponent.detach().requires_grad_()
    torch.library.opcheck(torch.ops.hla_kernels.power, args)
