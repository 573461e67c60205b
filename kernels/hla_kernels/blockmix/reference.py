"""Reference of block mixing: every order as an N x N matrix of weights W, o_t = sum_j W_tj v_j.

Slow and quadratic on purpose. A = phi(Q) phi(K)', m_tj = mixing[b(t), b(j)], s the scale of a moment:

    la    W = s m o A             ahla  W = s^2 m o ((m o A) A)           hla2  W = s^2 m o ((m o A) A')
    causal: every factor A, and W, is restricted to j <= t, with "frame" to j of the same frame or an earlier one

since q_t' (Sum_i m_ti k_i q_i') (Sum_j m_tj k_j v_j') = Sum_j m_tj Sum_i m_ti A_ti A_ij v_j. Evaluated in the dtype of
the inputs. First order is MHLA as in the paper; the other orders mix the moments of `hla` in the same way.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..hla.reference import phi
from ..sequences import real
from .layout import BlockOptions, block_table
from .torch_form import scale_of


def reference(
    q: Tensor, k: Tensor, v: Tensor, mixing: Tensor, options: BlockOptions, mask: Tensor | None = None,
    rotary: tuple[Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """Return o_t = sum_j W_tj v_j for q [B, N, H, D], k [B, N, Hk, D], v [B, N, Hk, Dv] -> [B, N, H, Dv].

    mixing [M, M] or [H, M, M]; mask [B, N], True for real tokens; rotary (cos, sin) [N, D / 2] or [N, H, D / 2] rotates
    phi(q) and phi(k) in the numerator only.
    """
    group = q.shape[2] // k.shape[2]
    q, k, v = (real(x, mask) for x in (q, k, v))
    q, k = phi(q, options.feature_map), phi(k, options.feature_map)
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    turned_q, turned_k = (x if rotary is None else turn(x, *rotary, options.rotary_half) for x in (q, k))
    y = weights(turned_q, turned_k, mixing, options, mask) @ v.transpose(1, 2)
    if options.normalize:
        total = weights(q, k, mixing, options, mask).sum(-1, keepdim=True)
        if mask is not None:
            total = total.where(mask[:, None, :, None], 1)  # the gradient of 0 / 0 is NaN, even at unused outputs
        y = y / (total + options.eps)
    return real(y.transpose(1, 2), mask).contiguous()


def weights(q: Tensor, k: Tensor, mixing: Tensor, options: BlockOptions, mask: Tensor | None) -> Tensor:
    """Return W [B, H, N, N] for the features q and k [B, N, H, F]."""
    n, block = q.shape[1], block_table(options.layout, q.device)[: q.shape[1]]
    a = q.transpose(1, 2) @ k.permute(0, 2, 3, 1)
    m = mixing.to(a.dtype)[..., block, :][..., block].expand(a.shape[1], n, n)
    if mask is not None:
        m = m * (mask[:, None, :, None] & mask[:, None, None, :])
    if options.causal:
        position = torch.arange(n, device=q.device)
        if options.causal == "frame":
            position = position // math.prod(options.layout.grid[1:])
        seen = position[:, None] >= position
        m, a = m * seen, a * seen
    s = scale_of(options, n, mask, a)
    s = s[:, 0, 0] if isinstance(s, Tensor) else s  # [B, 1, 1, 1]
    if options.order == "la":
        return s * m * a
    return s * s * m * ((m * a) @ (a if options.order == "ahla" else a.mT))


def turn(x: Tensor, cos: Tensor, sin: Tensor, half: bool) -> Tensor:
    """Rotate x [B, N, H, F]: every D channels, as D / 2 complex numbers, times cos + i sin [N, D / 2] or [N, H, D / 2].

    The pairs are channels (2i, 2i + 1), or with `half` channels (i, i + D / 2).
    """
    cos, sin = (t.to(x.dtype) if t.dim() == 3 else t.to(x.dtype)[:, None] for t in (cos, sin))
    factor = torch.complex(cos, sin)[:, :, None]  # [N, 1 or H, 1, D / 2]
    parts = x.unflatten(-1, (-1, 2 * cos.shape[-1]))  # [B, N, H, F / D, D]
    pairs = parts.unflatten(-1, (2, -1)).transpose(-1, -2) if half else parts.unflatten(-1, (-1, 2))
    product = torch.complex(pairs[..., 0], pairs[..., 1]) * factor
    turned = torch.stack([product.real, product.imag], -1)
    return (turned.transpose(-1, -2) if half else turned).flatten(-2).flatten(-2)
