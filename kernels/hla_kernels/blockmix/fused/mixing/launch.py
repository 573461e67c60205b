"""Launches of the mixing of moments: forward, and backward with the gradient of the matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ....dispatch.recording import launch
from .. import plan
from ..spec import Moments
from .kernels import blockmix_mix, blockmix_mix_long, blockmix_mixing_grads, blockmix_pad_mixing, blockmix_sum_parts

if TYPE_CHECKING:
    from ..launch import Call

BLOCK = 1024


def add(parts: Tensor, out: Tensor, groups: int, count: int, step: int, rows: int) -> None:
    """Compute out [groups, step], the sum over `count` parts [groups, count, step], `rows` at a time; `rows` is
    constant per caller, so that another number of tokens does not recompile."""
    columns = max(32, 4096 // rows)
    launch(blockmix_sum_parts, (-(-step // columns), groups), parts, out, count, step, BP=rows, BE=columns, num_warps=8)


def sum_of_mixing(call: Call, parts: Tensor, count: int) -> Tensor:
    """Return d mixing, the sum of `count` parts [H, B, count, M, M] per head and sample."""
    out = torch.empty_like(call.mixing, memory_format=torch.contiguous_format)
    groups = call.h if call.mixing.dim() == 3 else 1
    add(parts, out, groups, call.bh * count // groups, call.m * call.m, 512)
    return out


class Part:
    """Mixing of the matrices or the vectors of moments, x [M, B * H, columns]; back: by m', with the gradient of m from
    `other`, the moments that were mixed."""

    def __init__(self, call: Call, x: Tensor, to: Tensor, columns: int, other: Tensor | None = None) -> None:
        self.call, self.x, self.to, self.columns, self.other, self.back = call, x, to, columns, other, other is not None
        self.config = plan.mix_config(call.m, x.dtype, self.back)
        self.long, self.tiles = "BK" in self.config, -(-call.m // self.config["BM"])
        self.parts, self.chunk = plan.mix_parts(call.bh, self.tiles, columns, self.config, self.back)
        if self.back and self.long:  # d mixing by another kernel
            self.grads = plan.grads_config(call.m, x.dtype)
            self.grad_tiles = -(-call.m // self.grads["BM"])
            self.parts, self.chunk = plan.column_parts(call.bh, self.grad_tiles**2, columns, self.grads["BC"])

    def run(self, partial: Tensor | None = None, step: int = 0, first: int = 0) -> None:
        """Compute m x, and parts of d mixing at `first` of `step` in `partial` [H, B, step, M, M]."""
        call, config = self.call, self.config
        sizes = (call.bh, call.b, call.h, call.m, self.parts, self.chunk, step, first)
        common = {"C": self.columns, "TILES": self.tiles, **config}
        m, flags = self.padded()
        if not self.long:
            launch(
                blockmix_mix, self.tiles * call.bh * self.parts, m, self.x, self.other, self.to, partial, *sizes,
                STAGES=config["num_stages"], **flags, **common,
            )  # fmt: skip
            return
        programs = self.tiles * call.bh * -(-self.columns // config["BC"])
        launch(
            blockmix_mix_long, programs, m, self.x, self.to, call.bh, call.h, call.m, PREC=call.mix, **flags, **common
        )
        if partial is not None:
            launch(
                blockmix_mixing_grads, self.grad_tiles**2 * self.parts * call.bh, self.x, self.other, partial, *sizes,
                C=self.columns, TILES=self.grad_tiles, PREC=call.mix, **self.grads,
            )  # fmt: skip

    def padded(self) -> tuple[Tensor, dict[str, int]]:
        """Return m or m' padded to full tiles, and the arguments of the kernels that multiply by it."""
        m, mp = self.call.mixing, plan.padded(self.call.m)
        per_head = m.dim() == 3
        heads, steps = (self.call.h, m.stride()) if per_head else (1, (0, *m.stride()))
        out = self.call.buffer(heads, 2, mp, mp, dtype=self.x.dtype)
        sizes = {"MP": mp, "TURNED": self.back, "BLOCK": min(BLOCK, mp * mp)}
        launch(blockmix_pad_mixing, (heads, -(-mp * mp // BLOCK)), m, out, tuple(steps), self.call.m, **sizes)
        return out, {"PER_HEAD": per_head, "MP": mp}


def mixed(call: Call, x: Moments, out: Moments) -> None:
    """Compute X~ = m X."""
    for (part, columns), (to, _) in zip(x.columns(call.d, call.dv), out.columns(call.d, call.dv), strict=True):
        Part(call, part, to, columns).run()


def mixed_back(call: Call, dy: Moments, x: Moments, dx: Moments) -> Tensor:
    """Compute dX = m' dX~ and return d mixing_ib = <dX~_i, X_b> summed over the moments; in one pass over dX~ if it has
    the dtype of the tokens."""
    columns = (y.columns(call.d, call.dv) for y in (dy, dx, x))
    works = [Part(call, one, to, width, other) for (one, width), (to, _), (other, _) in zip(*columns, strict=True)]
    step, first = sum(work.parts for work in works), 0
    partial = call.buffer(call.bh * step, call.m, call.m)
    for work in works:
        work.run(partial, step, first)
        first += work.parts
    return sum_of_mixing(call, partial, step)
