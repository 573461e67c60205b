"""Inputs and definitions of mixers of the first order."""

import torch

from zoo.mixers import Context, build_mixer

B, N, H, HK, D, C = 2, 19, 4, 2, 8, 12  # two heads of queries share keys and values


def setting(name: str, **options):
    """A float64 mixer with random exponents, and q, k, v, ctx for it."""
    torch.manual_seed(0)
    mixer = build_mixer(name, C, H, D, num_kv_heads=HK, dtype=torch.float64, **options)
    for p in mixer.parameters():
        torch.nn.init.normal_(p)
    q, k, v = (torch.randn(B, N, heads, D, dtype=torch.float64) for heads in (H, HK, HK))
    return mixer, q, k, v, Context(x=torch.randn(B, N, C, dtype=torch.float64))


def phi(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """relu(x) to the power 1 + 4 sigmoid(weight) of each head, with its length kept."""
    y = x.clamp(min=0)
    raised = y ** (1 + 4 / (1 + (-weight).exp()))[:, None]
    return (raised * (y.norm(dim=-1) / raised.norm(dim=-1))[..., None]).nan_to_num(0)


def scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """[B, H, N, N]."""
    return torch.einsum("bthd,bjhd->bhtj", q, k.repeat_interleave(H // HK, 2))


def turn(t: torch.Tensor) -> torch.Tensor:
    angle = torch.linspace(0, 1.5, N, dtype=t.dtype)[None, :, None, None]
    even, odd = t[..., ::2], t[..., 1::2]
    return torch.cat([angle.cos() * even - angle.sin() * odd, angle.sin() * even + angle.cos() * odd], -1)
