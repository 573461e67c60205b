"""Torch form of multipole attention: by tokens (N x N) or by blocks, whichever is cheaper.

Plain differentiable torch code in at least float32, which torch.compile can fuse.
"""

from __future__ import annotations

from torch import Tensor

from ...sequences import real
from ..heads import to_layout
from . import by_blocks, by_tokens
from .call import MultipoleCall


def evaluate(call: MultipoleCall) -> Tensor:
    """Return o [B, N, H, Dv] in the dtype of q."""
    x = to_layout(*call[:3], call.q_scale, call.mask)
    if linear(call):
        o = by_blocks.by_blocks(x, call.field, call.degree)
    else:
        o = by_tokens.by_tokens(x, call.field, call.degree)
    return real(o.transpose(1, 2), call.mask).to(call.q.dtype).contiguous()


def linear(call: MultipoleCall) -> bool:
    """Whether this call goes by blocks, which then needs fewer multiplications."""
    d, dv = call.q.shape[-1], call.v.shape[-1]
    return by_blocks.multiplications(call.field, d, dv, call.degree) < by_tokens.multiplications(call.field, d, dv)
