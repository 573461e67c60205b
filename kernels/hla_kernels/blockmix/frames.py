"""Frame-causal block mixing of first order: blocks of each frame, moments summed over its own and earlier frames.

    o_t = q_t' Sum_b m_ib P_b, P_b = Sum_f Sum_{j in block b of frame f} k_j v_j'    f up to the frame of t, i its block

The state holds P_b of all blocks of a frame, M F Dv numbers per head whatever the number of frames. Plain
differentiable torch code.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ..hla.layout import to_tokens
from .causal import mix
from .layout import Layout, block_slots
from .options import BlockOptions
from .streaming import BlockState
from .torch_form import prepare_heads


def evaluate(
    q: Tensor, k: Tensor, v: Tensor, mixing: Tensor, options: BlockOptions, rotary: tuple[Tensor, Tensor] | None,
    state: BlockState | None,
) -> tuple[Tensor, BlockState]:  # fmt: skip
    """Return (o [B, N, H, Dv], state) of the frames of `options.layout`, after those of `state`."""
    p, before = prepare_heads(q, k, v, mixing, options, None, rotary), {} if state is None else state.tensors
    y, after = _weigh(*(p.turned or (p.phi_q, p.phi_k)), p.v, p.m, options.layout, before.get("P"))
    moments = {"P": after}
    if options.normalize:
        total, moments["zP"] = _weigh(
            p.phi_q, p.phi_k, torch.ones_like(p.v[..., :1]), p.m, options.layout, before.get("zP")
        )
        y = y * p.s / (total * p.s + options.eps)
    else:
        y = y * p.s
    n = torch.full((), q.shape[1], dtype=torch.int64, device=q.device)
    return to_tokens(y, q.dtype), BlockState(options, n if state is None else n + state.n, moments)


def _weigh(
    q: Tensor, k: Tensor, v: Tensor, m: Tensor, layout: Layout, before: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return (o without scale and ratio, moments P after the frames) for features q, k and values v
    [B, Hk, 1 or G, N, .]."""
    tokens, places = block_slots(Layout(layout.grid[1:], layout.blocks[1:]), q.device)
    frame = math.prod(layout.grid[1:])
    # [.., T, M, W, F], zeros in unused slots
    q, k, v = (F.pad(x.unflatten(3, (-1, frame)), (0, 0, 0, 1))[..., tokens, :] for x in (q, k, v))
    moments = (k.mT @ v).cumsum(3)
    if before is not None:
        moments = moments + before.to(moments.dtype).unsqueeze(3)
    y = q @ mix(moments, m.unsqueeze(2))
    return y.flatten(-3, -2)[..., places, :].flatten(3, 4), moments[:, :, :, -1]
