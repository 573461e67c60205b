"""Triton form of two-sided block mixing, forward and backward.

    forward   (mean of v) -> moments X per block -> X~ = m X -> (operator, a product of two) -> o
    backward  (operators) -> d operator, dq -> dX~ -> dX = m' dX~, d mixing -> dk, dv

Reading order: spec (what it runs, buffers), geometry (tokens of a block), tokens (vocabulary), features (rotary tables,
digits), reduce, mixing, apply, orders (products of moments), pairs (few tokens, without moments), plan (the static
table), launch. Tiles are shared with `hla.fused`. The first call imports Triton. relu, elu1 and softmax are evaluated
before the kernels (`features.mapped`).

Rounded to the dtype of the tokens: local and mixed moments of first order (exceptions in `spec.moments_dtype`),
features, operators (but not those that give gradients of softmax features), outputs, and the weights and the mixing
matrix in the form by pairs. Not rounded otherwise: the mixing matrix and rotated features. Rotary tables of bfloat16
tokens are read in float16. Ratios are computed for v minus its mean. On an H200, errors of o, dq, dk and dv of
bfloat16 tokens are at most 1.9 times the errors of the torch form, which come from rounding the output.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...features import mapped
from ..layout import BlockOptions
from .spec import Sizes, by_pairs, why_not

__all__ = ["backward", "forward", "saved_floats", "why_not"]


def saved_floats(q: Tensor, k: Tensor, v: Tensor, o: BlockOptions, turned: bool) -> int | torch.SymInt:
    """Return the length of the float32 buffer that `forward` fills for `backward`. The last argument: with rotary
    tables."""
    features = mapped.kept_floats(o.feature_map, q, k)
    if by_pairs(q, v, o, turned):
        return -(-q.shape[0] * q.shape[2] * q.shape[1] * (v.shape[3] + 1) // 4) * 4 * o.normalize + features
    return Sizes.of(q, v, o, turned).saved + features


def forward(
    q: Tensor, k: Tensor, v: Tensor, mixing: Tensor, o: BlockOptions, mask: Tensor | None = None,
    rotary: tuple[Tensor, Tensor] | None = None, save: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return o [B, N, H, Dv], contiguous, from q [B, N, H, D], k [B, N, Hk, D], v [B, N, Hk, Dv], and a buffer for
    `backward` (empty without `save`)."""
    from . import pair_launch
    from .launch import Call, forward_call

    new = torch.empty if mask is None else torch.zeros  # padded tokens are not written
    out = new((*q.shape[:3], v.shape[3]), dtype=q.dtype, device=q.device)
    pairs = by_pairs(q, v, o, rotary is not None)
    size = saved_floats(q, k, v, o, rotary is not None) if save or not pairs else 0
    buffer = torch.empty(size, dtype=torch.float32, device=q.device)
    rest, features = mapped.features(o.feature_map, q, k, buffer)
    call = Call(*features, v, mixing, o, mask, rotary)
    (pair_launch.forward_call if pairs else forward_call)(call, out, rest)
    return out, buffer if save else call.buffer(0)


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mixing: Tensor, o: BlockOptions, mask: Tensor | None,
    rotary: tuple[Tensor, Tensor] | None, outs: tuple[Tensor, Tensor, Tensor], saved: Tensor,
) -> Tensor:  # fmt: skip
    """Write dq, dk, dv into `outs` (any strides with contiguous last dimension) and return d mixing. saved: the buffer
    of `forward`; if it is empty, moments are recomputed."""
    from . import pair_launch
    from .launch import Call, backward_call

    grad = grad if grad.stride(3) == 1 else grad.contiguous()  # an expanded gradient (y.sum().backward()) has stride 0
    if saved.numel() == 0 and saved_floats(q, k, v, o, rotary is not None) > 0:
        saved = forward(q, k, v, mixing, o, mask, rotary, save=True)[1]
    rest, features = mapped.split(o.feature_map, saved, q, k)
    call = Call(*features, v, mixing, o, mask, rotary)
    pairs = by_pairs(q, v, o, rotary is not None)
    dq, dk, dv = outs
    if call.fine:
        new = torch.empty if mask is None else torch.zeros  # padded tokens are not written
        dq, dk = (new(x.shape, dtype=torch.float32, device=x.device) for x in outs[:2])
    dm = (pair_launch.backward_call if pairs else backward_call)(call, grad, (dq, dk, dv), rest)
    mapped.gradients(o.feature_map, q, k, (dq, dk), outs[:2])
    return dm
