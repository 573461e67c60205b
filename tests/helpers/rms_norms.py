"""Norms in plain torch, and inputs for them."""

import torch


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
    """Norm, relu, and rotation of channel pairs as complex numbers."""
    return turned(by_hand(x, weight), relu, cos, sin)


def turned(y, relu, cos, sin):
    y = y.relu() if relu else y
    heads = y.unflatten(-1, (-1, cos.shape[1], 2))  # [B, N, H, D / 2, 2]
    turns = torch.complex(cos, sin)[:, None].to(torch.promote_types(y.dtype, torch.float32).to_complex())
    complex_ = torch.view_as_complex(heads.to(turns.dtype.to_real()).contiguous())
    return torch.view_as_real(complex_ * turns).flatten(2).to(y.dtype)
