"""Delta rules over frames, whose tokens act on the state before the frame and read the state after it.

    S_f = Mean_t ((D_t - A_t B_t') S_{f-1} + K_t V_t')    o_t = S_f' q_t      over the n tokens t of frame f

This is one step per frame, with D = Mean_t D_t and the columns of all tokens in A / n, B, K / n and V. A mean of
transitions that enlarge nothing enlarges nothing. Frames of one token are the recurrence over tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor


def framed(
    q: Tensor, k: Tensor, v: Tensor, log_f: Tensor, a: Tensor, b: Tensor, state: Tensor, frame: int
) -> tuple[Tensor, Tensor]:
    """Compute the same as `reference` from one D x D transition per frame of `frame` tokens, a divisor of N."""
    q, k, v, log_f, a, b = (x.unflatten(2, (-1, frame)) for x in (q, k, v, log_f, a, b))
    kept = log_f.exp().mean(3).expand(-1, -1, -1, q.shape[-1])
    transition = torch.diag_embed(kept) - _product(a, b) / frame  # [B, H, F, D, D]
    written, states = _product(k, v) / frame, []
    for i in range(q.shape[2]):
        state = transition[:, :, i] @ state + written[:, :, i]
        states.append(state)
    return (q @ torch.stack(states, 2)).flatten(2, 3), state


def _product(x: Tensor, y: Tensor) -> Tensor:
    """Return the sum over tokens and columns of x y', [.., n, r, D] and [.., n, r, E] -> [.., D, E]."""
    return x.flatten(-3, -2).mT @ y.flatten(-3, -2)
