"""Custom operator `hla_kernels::adaptive_multipole`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ....dispatch.operator import like, loadable, saved_op
from ..layout import Field


def _call(q, k, mask, grid, prefix, suffix, q_tile, k_tile, exact, select, far, scale):
    from .launch import Call

    return Call(Field(tuple(grid), prefix, suffix, q_tile, k_tile), exact, select, far, scale, q, k, mask)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, grid: Sequence[int], prefix: int, suffix: int, q_tile: int,
    k_tile: int, exact: int, select: str, far: str, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return o [B, N, H, D] and `launch.Saved`. q [B, N, H, D], k, v [B, N, Hk, D]; outputs of padded tokens are not
    written."""
    from .launch import forward

    call = _call(q, k, mask, grid, prefix, suffix, q_tile, k_tile, exact, select, far, scale)
    (o,), saved = like(q), call.outputs(q)
    if q.shape[0]:
        with torch.cuda.device_of(q):
            forward(call, loadable(q), loadable(k), loadable(v), o, saved)
    return (o, *saved)


def _outputs(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *options: Any) -> tuple[Tensor, ...]:
    return (*like(q), *_call(q, k, mask, *options).outputs(q))


def _backward(
    grads: list[Tensor], saved: list[Tensor], q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *options: Any
) -> tuple[Tensor, ...]:
    """Return (dq, dk, dv); saved: o and `launch.Saved`."""
    from .launch import Saved, backward

    found = like(q, k, v)
    if q.shape[0]:
        call = _call(q, k, mask, *options)
        with torch.cuda.device_of(q):
            do, q, k, v = (loadable(x) for x in (grads[0], q, k, v))
            backward(call, do, q, k, v, saved[0], Saved(*saved[1:]), *found)
    return found


adaptive_op, adaptive_backward = saved_op("adaptive_multipole", _forward, _outputs, _backward, count=3, kept=0)
