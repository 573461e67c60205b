"""Reference of the delta-rule recurrence, token by token and frame by frame."""

from __future__ import annotations

import torch
from torch import Tensor


def reference(
    q: Tensor, k: Tensor, v: Tensor, log_f: Tensor, a: Tensor, b: Tensor, state: Tensor, frame: int = 1
) -> tuple[Tensor, Tensor]:
    """Return o [B, H, N, Dv] and the last state [B, H, D, Dv] of tokens in head layout.

    q [B, H, N, D], k [B, H, N, s, D], v [B, H, N, s, Dv], log_f [B, H, N, 1 or D], a, b [B, H, N, r, D]. The state
    after a frame of `frame` tokens is the mean of those that its tokens alone would leave.
    """
    outs = []
    for start in range(0, q.shape[2], frame):
        after = torch.zeros_like(state)
        for t in range(start, start + frame):
            read = b[:, :, t] @ state  # B'S [B, H, r, Dv]
            left = log_f[:, :, t].exp().unsqueeze(-1) * state - a[:, :, t].mT @ read + k[:, :, t].mT @ v[:, :, t]
            after = after + left / frame
        state = after
        outs += [(q[:, :, t].unsqueeze(-2) @ state).squeeze(-2) for t in range(start, start + frame)]
    return torch.stack(outs, 2), state
