"""Custom operator `hla_kernels::adaptive_multipole`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ....dispatch.operator import like, loadable, saved_op
from ....dispatch.recording import repeated
from ..layout import Field
from .plan import near_scores, tables

Outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def _field(options: Sequence[Any]) -> Field:
    grid, *sizes = options[:5]
    return Field(tuple(grid), *sizes)


def _call(q: Tensor, k: Tensor, mask: Tensor | None, options: Sequence[Any]):
    from .launch import Call

    exact, select, far, scale = options[5:]
    return Call(_field(options), exact, select, far, scale, mask is not None, q, k)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, grid: Sequence[int], prefix: int, suffix: int, q_tile: int,
    k_tile: int, exact: int, select: str, far: str, scale: float,
) -> Outputs:  # fmt: skip
    """Return o [B, N, H, D] and `launch.Saved`. q [B, N, H, D], k, v [B, N, Hk, D]; outputs of padded tokens are not
    written."""
    options = (tuple(grid), prefix, suffix, q_tile, k_tile, exact, select, far, scale)
    if not q.shape[0]:
        return _outputs(q, k, v, mask, *options)

    def work() -> tuple[Tensor, ...]:
        from .launch import forward

        call, (o,) = _call(q, k, mask, options), like(q)
        saved = call.outputs(q)
        forward(call, x, near, [loadable(t) for t in (q, k, v)], o, saved)
        return (o, *saved)

    with torch.cuda.device_of(q):
        x = tables(_field(options), mask, q.device)
        near = near_scores(_field(options), q.device) if select == "near" else None
        found = repeated(("adaptive_multipole", mask is None, *options), (q, k, v, near, *x), work)
        return cast(Outputs, found)


def _outputs(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *options: Any) -> Outputs:
    return (torch.empty_like(q, memory_format=torch.contiguous_format), *_call(q, k, mask, options).outputs(q))


def _backward(
    grads: list[Tensor], saved: list[Tensor], q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *options: Any
) -> tuple[Tensor, ...]:
    """Return (dq, dk, dv); saved: o and `launch.Saved`."""
    if not q.shape[0]:
        return like(q, k, v)

    def work() -> tuple[Tensor, ...]:
        from .launch import Saved, backward

        found = like(q, k, v)
        do, *tokens = (loadable(t) for t in (grads[0], q, k, v))
        backward(_call(q, k, mask, options), x, do, tokens, saved[0], Saved(*saved[1:]), found)
        return found

    with torch.cuda.device_of(q):
        x = tables(_field(options), mask, q.device)
        form = ("adaptive_multipole_backward", mask is None, tuple(options[0]), *options[1:])
        return repeated(form, (q, k, v, grads[0], *saved, *x), work)


adaptive_op, adaptive_backward = saved_op("adaptive_multipole", _forward, _outputs, _backward, count=3, kept=0)
