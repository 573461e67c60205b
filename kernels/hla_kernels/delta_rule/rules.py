"""Published members of the delta-rule family, as keyword arguments of `hla_kernels.delta`.

Shapes: k [B, N, H, D], v [B, N, H, Dv], beta [B, N, H] with values in (0, 1) or (0, 2). Decays are given as logarithms,
at most 0: log_f [B, N, H, D] per channel, or [B, N, H] or [H] per head.
"""

from __future__ import annotations

from typing import NotRequired, TypedDict

import torch
from torch import Tensor


class Arguments(TypedDict):
    """Keyword arguments of `hla_kernels.delta`."""

    k: Tensor
    v: Tensor
    log_f: NotRequired[Tensor]
    a: NotRequired[Tensor]
    b: NotRequired[Tensor]


def hdla(k: Tensor, v: Tensor, log_f: Tensor, beta: Tensor) -> Arguments:
    """S_t = (I - beta k k') F (I - beta k k') S + k v', F = diag(f): Householder-diagonalised linear attention.

    With A = [beta k, beta F k - beta^2 (k'F k) k] and B = [F k, k] this is F - A B'. k has length 1, beta in (0, 2).
    """
    kept, beta = log_f.exp() * k, beta.unsqueeze(-1)
    size = (k * kept).sum(-1, keepdim=True)
    a = torch.stack([beta * k, beta * kept - beta.square() * size * k], -2)
    return {"k": k, "v": v, "log_f": log_f, "a": a, "b": torch.stack([kept, k], -2)}


def delta_net(k: Tensor, v: Tensor, beta: Tensor) -> Arguments:
    """S_t = (I - beta k k') S + beta k v': DeltaNet."""
    written = beta.unsqueeze(-1) * k
    return {"k": written, "v": v, "a": written.unsqueeze(-2), "b": k.unsqueeze(-2)}


def gated_delta_net(k: Tensor, v: Tensor, log_f: Tensor, beta: Tensor) -> Arguments:
    """S_t = f (I - beta k k') S + beta k v', f a scalar per head: gated DeltaNet. log_f [B, N, H]."""
    written = beta.unsqueeze(-1) * k
    a = log_f.exp().unsqueeze(-1) * written
    return {"k": written, "v": v, "log_f": log_f, "a": a.unsqueeze(-2), "b": k.unsqueeze(-2)}


def kda(k: Tensor, v: Tensor, log_f: Tensor, beta: Tensor) -> Arguments:
    """S_t = (I - beta k k') F S + beta k v', F = diag(f): Kimi delta attention."""
    written = beta.unsqueeze(-1) * k
    return {
        "k": written, "v": v, "log_f": log_f, "a": written.unsqueeze(-2), "b": (log_f.exp() * k).unsqueeze(-2),
    }  # fmt: skip


def gated_delta_product(k: Tensor, v: Tensor, log_f: Tensor, beta: Tensor) -> Arguments:
    """Two steps of the gated delta rule per token, the decay before the first: k, v [B, N, H, 2, .], beta [B, N, H, 2],
    log_f [B, N, H].

    S_t = (I - b2 k2 k2') ((I - b1 k1 k1') f S + b1 k1 v1') + b2 k2 v2'.
    """
    (k1, k2), (b1, b2) = k.unbind(-2), beta.unsqueeze(-1).unbind(-2)
    w = b1 * (k1 - b2 * (k2 * k1).sum(-1, keepdim=True) * k2)  # the write of the first step after the second step
    written, f = torch.stack([w, b2 * k2], -2), log_f.exp()[..., None, None]
    return {"k": written, "v": v, "log_f": log_f, "a": f * written, "b": k}


def gla(k: Tensor, v: Tensor, log_f: Tensor) -> Arguments:
    """S_t = F S + k v', F = diag(f): gated linear attention. With one decay per head it is RetNet (log_f [H]) or
    Mamba-2 (log_f [B, N, H])."""
    return {"k": k, "v": v, "log_f": log_f}


def rwkv7(k: Tensor, v: Tensor, log_f: Tensor, removal: Tensor, rate: Tensor) -> Arguments:
    """S_t = (F - (rate r) r') S + k v', r the removal key of length 1, rate in (0, 1) per channel: RWKV-7."""
    return {"k": k, "v": v, "log_f": log_f, "a": (rate * removal).unsqueeze(-2), "b": removal.unsqueeze(-2)}
