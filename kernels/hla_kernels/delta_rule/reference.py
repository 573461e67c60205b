"""Reference of the delta-rule recurrence, token by token."""

from __future__ import annotations

import torch
from torch import Tensor


def reference(
    q: Tensor, k: Tensor, v: Tensor, log_f: Tensor, a: Tensor, b: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return o [B, H, N, Dv] and the last state [B, H, D, Dv] of tokens in head layout.

    q [B, H, N, D], k [B, H, N, s, D], v [B, H, N, s, Dv], log_f [B, H, N, 1 or D], a, b [B, H, N, r, D].
    """
    outs = []
    for t in range(q.shape[2]):
        read = b[:, :, t] @ state  # B'S [B, H, r, Dv]
        state = log_f[:, :, t].exp().unsqueeze(-1) * state - a[:, :, t].mT @ read + k[:, :, t].mT @ v[:, :, t]
        outs.append((q[:, :, t].unsqueeze(-2) @ state).squeeze(-2))
    return torch.stack(outs, 2), state
