"""Pooled key tiles of the far field: number of tokens, mean and variance of keys, mean value."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Pooled(NamedTuple):
    """Pooled key tiles of the grid; zeros for a tile without a real token.

    n [B or 1, 1, T]; mean, variance (per channel) [B, H, T, D]; value [B, H, T, Dv]; moment [B, H, D, Dv], the sum of
    (k - mean) v' over all tokens.
    """

    n: Tensor
    mean: Tensor
    variance: Tensor
    value: Tensor
    moment: Tensor

    @property
    def tiles(self) -> Tensor:
        """Return the number of tiles with a real token, at least 1, [B or 1, 1, 1]."""
        return (self.n > 0).sum(-1, keepdim=True).clamp(min=1)


def pool(k: Tensor, v: Tensor, live: Tensor) -> Pooled:
    """Pool k, v [B, H, T, W, .], which are zero in slots outside `live`, [B or 1, 1, T, W] bool."""
    n = live.sum(-1).to(k.dtype)
    each = n.clamp(min=1)[..., None]
    mean = k.sum(-2) / each
    rest = (k - mean[..., None, :]).where(live[..., None], 0)
    moment = rest.flatten(2, 3).mT @ v.flatten(2, 3)
    return Pooled(n, mean, rest.square().sum(-2) / each, v.sum(-2) / each, moment)


def powers(q: Tensor, x: Pooled, variance: bool) -> Tensor:
    """Return the exponent shared by the tokens of a tile, [B, H, .., T]: q.mean, and with `variance` plus
    q^2.variance / 2 (the second cumulant for a diagonal covariance). q [B, H, .., D] has two axes of tokens."""
    a = q @ x.mean.mT.unsqueeze(2)
    return a + q.square() @ (x.variance.mT.unsqueeze(2) / 2) if variance else a
