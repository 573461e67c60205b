"""Reference implementation of a checked call: N x N matrices, one sequence at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..hla.reference import reference as linear_reference
from ..options import compute_dtype
from ..softmax.reference import reference as softmax_reference

if TYPE_CHECKING:
    from ..op import Call


def definition(call: Call) -> Tensor:
    """Return o [B, N, H, Dv] in the dtype of q."""
    dtype = compute_dtype(call.q.dtype)
    q, k, v = (x.to(dtype) for x in (call.q, call.k, call.v))
    if call.sequences.cu_seqlens is None:
        return _whole(call, q, k, v, call.sequences.mask).to(call.q.dtype)
    lengths = call.sequences.cu_seqlens.diff().tolist()
    each = zip(*(x.split(lengths, 1) for x in (q, k, v)), strict=True)
    return torch.cat([_whole(call, qs, ks, vs, None) for qs, ks, vs in each], 1).to(call.q.dtype)


def _whole(call: Call, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    if call.op == "softmax_attention":
        return softmax_reference(q, k, v, bool(call.options.causal), call.options.scale, mask)
    gamma = None
    if call.gamma is not None:  # one per query head
        gamma = call.gamma.expand(1, k.shape[2], q.shape[2] // k.shape[2], 1, 1).flatten()
    return linear_reference(call.op, q, k, v, call.options, gamma, call.coefficients, mask)
