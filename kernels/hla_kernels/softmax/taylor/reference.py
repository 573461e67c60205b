"""Reference of second-order Taylor attention with N x N weights; exact in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from ...options import compute_dtype
from ...sequences import real
from .call import TaylorCall


def definition(call: TaylorCall) -> Tensor:
    """Run `reference` on a checked call in at least float32; returns the dtype of its queries."""
    wide = compute_dtype(call.q.dtype)
    narrow = None if call.q2 is None or call.k2 is None else (call.q2.to(wide), call.k2.to(wide))
    q, k, v = (x.to(wide) for x in call[:3])
    return reference(q, k, v, call.coefficients, narrow, call.normalize, call.q_scale, call.mask).to(call.q.dtype)


def reference(
    q: Tensor, k: Tensor, v: Tensor, coefficients: Tensor, narrow: tuple[Tensor, Tensor] | None, normalize: bool,
    q_scale: float, mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return o of `taylor` for q [B, N, H, D], k [B, N, Hk, D], v [B, N, Hk, Dv], coefficients [H, 2] -> [B, N, H, Dv],
    in the dtype of q. Means run over tokens inside `mask` [B, N]; outputs of other tokens are 0."""
    group = q.shape[2] // k.shape[2]
    live = torch.ones(q.shape[:2], dtype=torch.bool, device=q.device) if mask is None else mask
    n = live.sum(1).clamp(min=1).to(q.dtype)[:, None, None, None]
    weight = live.to(q.dtype)[:, None, None, :] / n  # [B, 1, 1, N]
    q2, k2 = narrow if narrow is not None else (q, k)
    q, k, v, q2, k2 = (real(x, mask).transpose(1, 2) for x in (q, k, v, q2, k2))
    k, v, k2 = (x.repeat_interleave(group, dim=1) for x in (k, v, k2))
    mean = weight @ v
    s = q_scale * (q @ (k - weight @ k).mT)
    r = s if narrow is None else q_scale * (q2 @ (k2 - weight @ k2).mT)
    c1, c2 = coefficients.to(q.dtype)[:, :, None, None].unbind(1)
    o = (weight * (c1 * s + c2 * r.square() / 2)) @ (v - mean)
    if normalize:
        o = o / (1 + (weight * c2 * r.square() / 2).sum(-1, keepdim=True))
    return real((mean + o).transpose(1, 2), mask).contiguous()
