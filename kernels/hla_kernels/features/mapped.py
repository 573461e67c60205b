"""Features relu, elu1 and softmax of q and k around kernels that take tokens as they are.

A forward keeps them for the backward, in the dtype of the tokens, at the end of its buffer: twice the bytes of q.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

MAPS = ("relu", "elu1", "softmax")
Pair = tuple[Tensor, Tensor]


def kept_floats(name: str | None, q: Tensor, k: Tensor) -> int | torch.SymInt:
    """Return the float32 numbers that a forward keeps: features of q and then of k, each a multiple of 16 bytes."""
    return sum(_floats(q, k)) if name in MAPS else 0


def _floats(*tokens: Tensor) -> list:
    return [-(-math.prod(x.shape) * x.element_size() // 16) * 4 for x in tokens]


def split(name: str | None, buffer: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Pair]:
    """Return what is in front of the features in a buffer, and phi(q) [B, N, H, D] and phi(k) [B, N, Hk, D],
    contiguous: q and k without a map."""
    if name not in MAPS:
        return buffer, (q, k)
    sizes = _floats(q, k)
    rest, *parts = buffer.split([buffer.numel() - sum(sizes), *sizes])
    fq, fk = (x.view(q.dtype)[: y.numel()].view(y.shape) for x, y in zip(parts, (q, k), strict=True))
    return rest, (fq, fk)


def features(
    name: str | None, q: Tensor, k: Tensor, buffer: Tensor, center: str | None = None
) -> tuple[Tensor, Pair]:
    """Compute what `split` returns; features have memory for themselves if the buffer is empty.

    center: "k" or "qk", whose features the operator centres. They are written as elu1 - 1, which changes no centred
    feature: tensor cores truncate a sum at every addition, and sums of smaller features lose less.
    """
    if name in MAPS and buffer.numel() == 0:
        buffer = torch.empty(sum(_floats(q, k)), dtype=torch.float32, device=q.device)
    rest, found = split(name, buffer, q, k)
    if name in MAPS:
        from .map_kernels import map_pair

        of_q, of_k = ("elu" if name == "elu1" and x in (center or "") else name for x in "qk")
        map_pair((of_q, of_k), (q, k), found)
    return rest, found


def gradients(name: str | None, q: Tensor, k: Tensor, grads: Pair, to: Pair) -> None:
    """Write gradients of q and k to `to`, from gradients of phi(q) and phi(k), which may be the same tensors."""
    if name in MAPS:
        from .map_kernels import map_pair

        map_pair((name, name), (q, k), to, grads)
