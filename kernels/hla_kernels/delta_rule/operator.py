"""Custom operator `hla_kernels::delta`.

It saves its inputs only and recomputes the chunks in the backward pass. torch.compile traces it as a single operator,
whatever the number of tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..dispatch.operator import recomputed_op
from ..options import compute_dtype
from .chunked import chunked, framed
from .reference import reference


def evaluate(
    q: Tensor, k: Tensor, v: Tensor, log_f: Tensor, a: Tensor, b: Tensor, state: Tensor, frame: int = 0,
    by_token: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return o [B, N, H, Dv] in the dtype of q and the last state [B, H, D, Dv], in float32 or float64.

    q [B, N, H, D], k [B, N, H, s, D], v [B, N, H, s, Dv], log_f [B, N, H, 1 or D], a, b [B, N, H, r, D], state
    [B, H, D, Dv]. frame: tokens per frame, or 0. by_token: use the reference instead of chunks or whole frames.
    """
    dtype = compute_dtype(q.dtype)
    q_, k_, v_, f_, a_, b_ = (x.to(dtype).transpose(1, 2) for x in (q, k, v, log_f, a, b))
    state = state.to(dtype)
    with torch.autocast(q.device.type, enabled=False):
        if by_token:
            o, last = reference(q_, k_, v_, f_, a_, b_, state, frame or 1)
        elif frame:
            o, last = framed(q_, k_, v_, f_, a_, b_, state, frame)
        else:
            o, last = chunked(q_, k_, v_, f_, a_, b_, state)
    return o.transpose(1, 2).to(q.dtype).contiguous(), last.contiguous()


def _in_chunks(
    q: Tensor, k: Tensor, v: Tensor, log_f: Tensor, a: Tensor, b: Tensor, state: Tensor, frame: int
) -> tuple[Tensor, Tensor]:
    return evaluate(q, k, v, log_f, a, b, state, frame)


def _outputs(
    q: Tensor, k: Tensor, v: Tensor, log_f: Tensor, a: Tensor, b: Tensor, state: Tensor, frame: int
) -> tuple[Tensor, Tensor]:
    return q.new_empty((*q.shape[:3], v.shape[4])), state.new_empty(state.shape, dtype=compute_dtype(q.dtype))


delta_op, delta_backward = recomputed_op("delta", _in_chunks, _outputs)
