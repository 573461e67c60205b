"""Frame-causal block mixing of first order: moments of blocks, summed over frames.

    o_t = q_t' Sum_b m_ib P_b, P_b = Sum_f Sum_{j in block b of frame f} k_j v_j'    f up to the frame of t, i its block

The state holds P_b of all blocks of a frame, M F Dv numbers per head whatever the number of frames. Without a state
this is two-sided mixing of the blocks of all frames, with zeros in the mixing matrix for later frames: the form that
runs in Triton (`every_frame`, `mixing_of_frames`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .causal import mix
from .layout import BlockOptions, Layout, block_slots
from .torch_form import Prepared


class Frames:
    """Frames of a call with a layout (frames, ..)."""

    def __init__(self, layout: Layout) -> None:
        self.frame, self.size = Layout(layout.grid[1:], layout.blocks[1:]), math.prod(layout.grid[1:])

    def step(
        self, p: Prepared, q: Tensor, k: Tensor, v: Tensor, before: Sequence[Tensor]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return (W v without the ratio, moments (P,) after the frames) for features q, k and values v
        [B, Hk, 1 or G, N, .]; before: earlier moments, or none at the start."""
        tokens, places = block_slots(self.frame, q.device)
        # [.., T, M, W, F], zeros in unused slots
        q, k, v = (F.pad(x.unflatten(3, (-1, self.size)), (0, 0, 0, 1))[..., tokens, :] for x in (q * p.s, k, v))
        moments = (k.mT @ v).cumsum(3)
        for earlier in before:
            moments = moments + earlier.unsqueeze(3)
        y = q @ mix(moments, p.m.unsqueeze(2))
        return y.flatten(-3, -2)[..., places, :].flatten(3, 4), (moments[:, :, :, -1],)


def every_frame(options: BlockOptions) -> BlockOptions:
    """Return options of two-sided mixing of the blocks of every frame, for the mixing of `mixing_of_frames`; the same
    options if they are not of frames."""
    if options.causal != "frame":
        return options
    layout = options.layout._replace(blocks=(options.layout.grid[0], *options.layout.blocks[1:]))
    return options._replace(layout=layout, causal=False, scale=1.0 if options.scale is None else options.scale)


def mixing_of_frames(mixing: Tensor, frames: int) -> Tensor:
    """Return the mixing [.., frames M, frames M] of the blocks of every frame from [.., M, M]; it is 0 for later
    frames."""
    return torch.kron(torch.ones(frames, frames, dtype=mixing.dtype, device=mixing.device).tril(), mixing)
