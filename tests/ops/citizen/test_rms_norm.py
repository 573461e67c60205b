"""RMSNorm of 16-bit tokens with float32 weights: its kernels on a CUDA device, against float64 and torch's own form.
Interpreted, they run in `tests/ops/fused/children/around.py`."""

import pytest
import torch
import torch.nn.functional as F

from hla_kernels.features.rms_norm import prepared, rms_norm
from tests.helpers.error_rule import relative_error
from tests.helpers.rms_norms import by_hand, inputs, prepared_by_hand, results, tables, turned


def test_definition():
    x, weight, grad = (t.double() for t in inputs(torch.float32, 48))
    for a, b in zip(
        results(lambda *t: rms_norm(*t, 1e-6), x, weight, grad), results(by_hand, x, weight, grad), strict=True
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernels need a CUDA device: none here")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("channels", [1536, 2240, 100])
def test_kernels(dtype, channels):
    x, weight, grad = inputs(dtype, channels, "cuda")
    truth = results(by_hand, *(t.double() for t in (x, weight, grad)))
    plain = results(lambda x, w: F.rms_norm(x, (channels,), w, 1e-6), x, weight, grad)
    first, second = (results(lambda *t: rms_norm(*t, 1e-6), x, weight, grad) for _ in range(2))
    for a, b, c, t in zip(first, second, plain, truth, strict=True):
        assert a.dtype == c.dtype and torch.equal(a, b)
        assert relative_error(a, t) <= 2 * relative_error(c, t)
    args = x.detach().requires_grad_(), weight.detach().requires_grad_(), 1e-6
    torch.library.opcheck(torch.ops.hla_kernels.rms_norm, args)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernels need a CUDA device: none here")
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize(("dtype", "channels", "width"), [(torch.bfloat16, 1536, 128), (torch.float16, 240, 40)])
def test_prepared(dtype, channels, width, relu):
    """With feature map and rotation in the same pass, against float64 and the steps one by one."""
    x, weight, grad = inputs(dtype, channels, "cuda")
    cos, sin = tables(x, width)
    exact = [t.double() for t in (x, weight, grad)]
    truth = results(lambda x, w: prepared_by_hand(x, w, relu, cos.double(), sin.double()), *exact)
    plain = results(lambda x, w: turned(F.rms_norm(x, (channels,), w, 1e-6).to(dtype), relu, cos, sin), x, weight, grad)
    first, second = (results(lambda *t: prepared(*t, 1e-6, relu, cos, sin), x, weight, grad) for _ in range(2))
    for a, b, c, t in zip(first, second, plain, truth, strict=True):
        assert torch.equal(a, b) and relative_error(a, t) <= 2 * relative_error(c, t)
    args = x.detach().requires_grad_(), weight.detach().requires_grad_(), 1e-6, relu, cos, sin
    torch.library.opcheck(torch.ops.hla_kernels.rms_norm, args)
