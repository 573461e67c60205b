"""RMSNorm of 16-bit tokens with float32 weights: its kernels on a CUDA device, against float64 and torch's own form.
Interpreted, they run in `tests/ops/fused/children/around.py`."""

import pytest
import torch
import torch.nn.functional as F

from hla_kernels.features.rms_norm import prepared, rms_norm
from tests.ops.fused.cases import relative_error


def inputs(dtype, channels=1536, device="cpu"):
    """Tokens that are rows of a wider tensor, weights, an output gradient."""
    g = torch.Generator(device).manual_seed(channels)
    x = (1 + 3 * torch.randn(2, 77, 3 * channels, generator=g, device=device)).to(dtype)[..., :channels]
    weight = 1 + 0.3 * torch.randn(channels, generator=g, device=device)
    return x, weight, torch.randn(2, 77, channels, generator=g, device=device).to(dtype)


def results(norm, x, weight, grad):
    """y, dx, dw."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    y = norm(x, weight)
    return [y.detach(), *torch.autograd.grad(y, (x, weight), grad.to(y.dtype))]


def by_hand(x, weight):
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def tables(x, width):
    """Angles [N, D / 2] of heads of D = `width` channels."""
    g = torch.Generator(x.device).manual_seed(width)
    angles = 6 * torch.rand(x.shape[1], width // 2, generator=g, device=x.device)
    return angles.cos(), angles.sin()


def prepared_by_hand(x, weight, relu, cos, sin):
    """Norm, positive part, pairs of channels as complex numbers times those of the tables; of any norm `y`."""
    return turned(by_hand(x, weight), relu, cos, sin)


def turned(y, relu, cos, sin):
    y = y.relu() if relu else y
    heads = y.unflatten(-1, (-1, cos.shape[1], 2))  # [B, N, H, D / 2, 2]
    turns = torch.complex(cos, sin)[:, None].to(torch.promote_types(y.dtype, torch.float32).to_complex())
    complex_ = torch.view_as_complex(heads.to(turns.dtype.to_real()).contiguous())
    return torch.view_as_real(complex_ * turns).flatten(2).to(y.dtype)


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
