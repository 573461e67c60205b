"""Reference of multipole attention with N x N weights; exact in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from ...options import compute_dtype
from ...sequences import real
from .call import MultipoleCall
from .layout import membership, near


def definition(call: MultipoleCall) -> Tensor:
    """Return o [B, N, H, Dv] of a checked call in the dtype of its queries, computed in at least float32."""
    field, degree, mask, group = call.field, call.degree, call.mask, call.q.shape[2] // call.k.shape[2]
    q, k, v = (real(x, mask).to(compute_dtype(call.q.dtype)) for x in call[:3])
    live = torch.ones(q.shape[:2], dtype=torch.bool, device=q.device) if mask is None else mask
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    s = call.q_scale * torch.einsum("bihd,bjhd->bhij", q, k)
    first, last = field.prefix, field.prefix + field.n_grid
    outer = torch.ones(s.shape[-1], dtype=torch.bool, device=q.device)
    outer[first:last] = False
    exact = outer[:, None] | outer
    tokens = torch.arange(field.n_grid, device=q.device)
    exact[first:last, first:last] = near(field.layout.grid, field.radius, tokens, tokens)
    anchor = s.clone()
    for block in membership(field.layout, q).mT.bool():
        tokens = first + block.nonzero()[:, 0]
        weight = live[:, None, None, tokens].to(s.dtype)
        mean = (s[..., tokens] * weight).sum(-1, keepdim=True) / weight.sum(-1, keepdim=True).clamp(min=1)
        anchor[..., tokens] = mean.expand(*mean.shape[:-1], len(tokens))
    power = torch.where(exact, s, anchor).masked_fill(~live[:, None, None], float("-inf"))
    largest = power.amax(-1, keepdim=True)
    w = (power - largest.where(largest.isfinite(), 0)).exp()
    if degree:
        r = s - anchor
        w = w * torch.where(exact, 1, 1 + r if degree == 1 else 1 + r + r**2 / 2)
    o = torch.einsum("bhij,bjhd->bihd", w / w.sum(-1, keepdim=True), v)
    return real(o, mask).to(call.q.dtype).contiguous()
