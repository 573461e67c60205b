"""Focused feature map x -> |y| y^p / |y^p| with y = relu(x) and one exponent p per head.

From FLatten Transformer (arXiv 2308.00442, Eq 5): sharpens the direction of the features and keeps their norm. With
s = |y|, u = y^p / |y^p| and the gradient g of s u:

    dy = (g . u) y / s + p s (u / y) (g - u (g . u)),    dp = s sum_i u_i ln(y_i) (g_i - u_i (g . u)).

On CUDA one launch reads each token of q and k once, and saves only them for the backward; plain torch code saves
float32 tensors of the size of the tokens, compiled or not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..dispatch.gate import trusted
from ..dispatch.operator import like, saved_op

KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def power_pair(q: Tensor, k: Tensor, of_q: Tensor, of_k: Tensor) -> tuple[Tensor, Tensor]:
    """Apply the map to q [B, N, H, D] and k [B, M, Hk, D] with exponents of_q [H] and of_k [Hk] > 1, in one launch.

    Returns tensors of the shapes and dtypes of q and k, computed in float32 (float64 for float64). Heads without a
    positive channel give zeros. Raises ValueError for exponents of other heads and for q and k of different D.
    """
    for name, x, exponent in (("q", q, of_q), ("k", k, of_k)):
        if exponent.shape != x.shape[2:3]:
            raise ValueError(f"{name} has {x.shape[2]} heads and needs as many exponents, got {tuple(exponent.shape)}")
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"q and k need equal numbers of channels per head, got {q.shape[3]} and {k.shape[3]}")
    if _on_kernels(q, k, of_q, of_k):
        return torch.ops.hla_kernels.power_pair(q, k, of_q, of_k)
    return power_torch(q, of_q), power_torch(k, of_k)


def power(x: Tensor, exponent: Tensor) -> Tensor:
    """Apply the map to x [B, N, H, D] with exponent [H], like `power_pair`."""
    return power_pair(x, x[:, :0], exponent, exponent)[0] if x.is_cuda else power_torch(x, exponent)


def _on_kernels(q: Tensor, k: Tensor, of_q: Tensor, of_k: Tensor) -> bool:
    if not (q.is_cuda and k.is_cuda and q.dtype in KERNEL_DTYPES and k.dtype in KERNEL_DTYPES):
        return False
    dtypes = (q.dtype, k.dtype, of_q.dtype, of_k.dtype)
    return trusted("power_pair", q.device, dtypes, (q.shape[2], k.shape[2], q.shape[3]))


def power_torch(x: Tensor, exponent: Tensor) -> Tensor:
    """Compute `power` in plain torch."""
    y = x.relu().to(torch.promote_types(x.dtype, torch.float32))
    top = y.amax(-1, keepdim=True)
    part = y / top.clamp(min=torch.finfo(y.dtype).tiny)  # in [0, 1], so that its power cannot overflow
    raised = part ** exponent[:, None]
    lengths = [z.square().sum(-1, keepdim=True).clamp(min=1) for z in (part, raised)]  # below 1 only if all are 0
    found = raised * top * (lengths[0] / lengths[1]).sqrt()
    # the gradient of a zero channel has no effect, but in float16 it may be infinite, if a ratio divides by little
    return found.masked_fill(raised == 0, 0.0).to(x.dtype)


def _forward(q: Tensor, k: Tensor, of_q: Tensor, of_k: Tensor) -> tuple[Tensor, Tensor]:
    from .power_kernels import forward

    return forward(q, k, of_q, of_k)


def _backward(grads: list[Tensor], _: list[Tensor], *given: Tensor) -> tuple[Tensor, ...]:
    from .power_kernels import backward

    return backward((grads[0], grads[1]), *given)


power_op, _ = saved_op("power_pair", _forward, lambda *given: like(*given[:2]), _backward, count=4, results=2)
