"""Kernel launches and buffers of a call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ....dispatch.recording import launch
from ....hla.fused.spec import alignment, split_width, strides
from . import plan
from .grads import key_grads, query_grads, sum_parts
from .output import read_out, sum_tokens
from .spec import buffer_sizes, padded, total_width


class Call:
    """Sizes and constexpr arguments shared by the launches of a call; q2 and k2 are None without a narrow pair."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, c: Tensor, q2: Tensor | None, k2: Tensor | None, mask: Tensor | None,
        normalize: bool, scale: float,
    ):  # fmt: skip
        self.q, self.k, self.v, self.q2, self.k2, self.c, self.scale = q, k, v, q2, k2, c.contiguous(), scale
        self.b, self.n, self.h, self.d = q.shape
        self.hk, self.dv, self.r = k.shape[2], v.shape[3], 0 if q2 is None else q2.shape[3]
        self.keep = None if mask is None else mask.contiguous().view(torch.uint8)
        (f1, f2), (r1, r2), (v1, v2) = (split_width(x) for x in (self.d, self.r, self.dv))
        self.w = {
            "D": self.d, "F1": f1, "F2": f2, "R": self.r, "R1": r1, "R2": r2, "DV": self.dv, "V1": v1, "V2": v2
        }  # fmt: skip
        self.normalize = normalize
        self.parts = plan.parts(self.n)
        width = total_width(self.d, self.r, self.dv, normalize)
        self.flags = {"NORM": normalize, "W": width, "PARTS": self.parts, **self.w}
        # scale of weights: without it, weights of float16 tokens overflow at x^2 = 2^16, with it at 2^24
        self.unit = 2.0**-8 if q.dtype == torch.float16 else 1.0

    def sizes(self, blocks: int) -> tuple:
        """Return N, H, G, blocks, scale."""
        return self.n, self.h, self.h // self.hk, blocks, self.scale

    def split(self, saved: Tensor, save: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Split the buffer of a forward into (totals, rows, rounding error of o); rows and error are empty without
        `save`."""
        totals, rows, rest = saved.split(buffer_sizes(self.q, self.k, self.v, self.q2, self.normalize, save))
        return totals, rows, rest.view(self.q.dtype)

    def buffer(self, size: int) -> Tensor:
        """Return an uninitialised float32 tensor on the device of the call."""
        return torch.empty(size, dtype=torch.float32, device=self.q.device)


def steps(tensors: tuple[Tensor | None, ...]) -> tuple[list[tuple[int, int, int] | None], int]:
    """Return the strides of the tensors (None for None) in units of the alignment, and the alignment."""
    a = alignment(*(x for x in tensors if x is not None))
    return [None if x is None else strides(x, a) for x in tensors], a


def forward_call(call: Call, o: Tensor, buffer: Tensor, save: bool) -> None:
    """Launch the kernels of the forward."""
    totals, rows, rest = call.split(buffer, save)
    read: tuple[Tensor | None, ...] = (call.k, call.k2, call.v)
    found, a = steps(read)
    launch(
        sum_tokens, call.parts * call.b * call.hk,
        *read, call.keep, totals, *found, call.n, call.hk, ALIGN=a, **call.flags, BN=256, ROWS=32, num_warps=8,
        num_stages=1,
    )  # fmt: skip
    config = plan.peeled(call.n, plan.read_config(call.w))
    blocks, read = -(-call.n // config["BM"]), (call.q, call.q2, *read, o)
    found, a = steps(read)
    launch(
        read_out, blocks * call.b * call.h,
        *read, rest, call.c, call.keep, totals, rows, *found, *call.sizes(blocks), UNIT=call.unit, SAVE=save, ALIGN=a,
        **call.flags, **config,
    )  # fmt: skip


def backward_call(call: Call, grad: Tensor, o: Tensor, outs: Sequence[Tensor | None], saved: Tensor) -> Tensor:
    """Launch the kernels of the backward and return the gradient of the coefficients."""
    dq, dk, dv, dq2, dk2 = outs
    totals, rows, rest = call.split(saved, True)
    config = plan.peeled(call.n, plan.query_config(call.w))
    blocks = -(-call.n // config["BM"])
    deltas = torch.empty(2, call.b * call.h, padded(call.n), dtype=torch.float32, device=grad.device)
    parts, pulls = (call.buffer(call.h * call.b * blocks * size) for size in (2, call.d + call.r))
    tokens = (call.q, call.q2, call.k, call.k2, call.v, grad)
    found, a = steps((*tokens, o, dq, dq2))
    launch(
        query_grads, blocks * call.b * call.h,
        *tokens, o, rest, dq, dq2, call.c, call.keep, totals, rows, deltas, parts, pulls, *found, *call.sizes(blocks),
        ALIGN=a, **call.flags, **config,
    )  # fmt: skip
    config = plan.key_config(call.w)
    count, blocks, read = blocks, -(-call.n // config["BN"]), (*tokens, dk, dk2, dv)
    found, a = steps(read)
    launch(
        key_grads, blocks * call.b * call.hk,
        *read, call.c, call.keep, totals, deltas, pulls, *found, *call.sizes(blocks), count, UNIT=call.unit, ALIGN=a,
        **call.flags, **config,
    )  # fmt: skip
    dc = torch.empty_like(call.c)
    launch(sum_parts, call.h, parts, dc, parts.numel() // (2 * call.h), BP=1024, num_warps=4)
    return dc
