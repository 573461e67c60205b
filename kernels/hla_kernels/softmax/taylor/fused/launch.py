"""Host side: which kernels a call launches, in which order, with which buffers."""

from __future__ import annotations

import torch
from torch import Tensor

from ....hla.fused.spec import alignment, split_width, strides
from . import plan
from .grads import key_grads, query_grads, sum_parts
from .output import read_out, sum_tokens
from .spec import buffer_sizes, total_width


class Call:
    """One call's sizes and constexpr arguments, shared by its launches."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, c: Tensor, mask: Tensor | None, normalize: bool, scale: float):
        self.q, self.k, self.v, self.c, self.scale = q, k, v, c.contiguous(), scale
        self.b, self.n, self.h, self.d = q.shape
        self.hk, self.dv = k.shape[2], v.shape[3]
        self.keep = None if mask is None else mask.contiguous().view(torch.uint8)
        (f1, f2), (v1, v2) = split_width(self.d), split_width(self.dv)
        self.w = {"D": self.d, "F1": f1, "F2": f2, "DV": self.dv, "V1": v1, "V2": v2}
        self.normalize = normalize
        self.parts = plan.parts(self.n)
        self.flags = {"NORM": normalize, "W": total_width(self.d, self.dv, normalize), "PARTS": self.parts, **self.w}
        # of weights: without it those of float16 tokens overflow where x^2 is 2^16, with it at 2^24
        self.unit = 2.0**-8 if q.dtype == torch.float16 else 1.0

    def sizes(self, blocks: int) -> tuple:
        """N, H, G, blocks, scale."""
        return self.n, self.h, self.h // self.hk, blocks, self.scale

    def split(self, saved: Tensor, save: bool) -> tuple[Tensor, Tensor, Tensor]:
        """(totals, rows, rest of o) in the buffer of a forward; the last two are empty without `save`."""
        totals, rows, rest = saved.split(buffer_sizes(self.q, self.k, self.v, self.normalize, save))
        return totals, rows, rest.view(self.q.dtype)

    def buffer(self, size: int) -> Tensor:
        """An uninitialised float32 tensor on the call's device."""
        return torch.empty(size, dtype=torch.float32, device=self.q.device)


def forward_call(call: Call, o: Tensor, buffer: Tensor, save: bool) -> None:
    """Launch the forward."""
    q, k, v = call.q, call.k, call.v
    totals, rows, rest = call.split(buffer, save)
    a = alignment(k, v)
    sum_tokens[(call.parts * call.b * call.hk,)](
        k, v, call.keep, totals, strides(k, a), strides(v, a), call.n, call.hk, ALIGN=a, **call.flags, BN=256, ROWS=32,
        num_warps=8, num_stages=1,
    )  # fmt: skip
    config = plan.peeled(call.n, plan.read_config(call.w))
    blocks, a = -(-call.n // config["BM"]), alignment(q, k, v, o)
    read_out[(blocks * call.b * call.h,)](
        q, k, v, o, rest, call.c, call.keep, totals, rows, *(strides(x, a) for x in (q, k, v, o)), *call.sizes(blocks),
        UNIT=call.unit, SAVE=save, ALIGN=a, **call.flags, **config,
    )  # fmt: skip


def backward_call(call: Call, grad: Tensor, o: Tensor, outs: tuple[Tensor, Tensor, Tensor], saved: Tensor) -> Tensor:
    """Launch the backward; returns the gradient of the coefficients."""
    (q, k, v), (dq, dk, dv) = (call.q, call.k, call.v), outs
    totals, rows, rest = call.split(saved, True)
    config = plan.peeled(call.n, plan.query_config(call.w))
    blocks = -(-call.n // config["BM"])
    deltas = call.buffer(rows.numel())
    parts, pulls = (call.buffer(call.h * call.b * blocks * size) for size in (2, call.d))
    read = (q, k, v, grad, o, dq)
    a = alignment(*read)
    query_grads[(blocks * call.b * call.h,)](
        q, k, v, grad, o, rest, dq, call.c, call.keep, totals, rows, deltas, parts, pulls,
        *(strides(x, a) for x in read), *call.sizes(blocks), ALIGN=a, **call.flags, **config,
    )  # fmt: skip
    config = plan.key_config(call.w)
    count, blocks, read = blocks, -(-call.n // config["BN"]), (q, k, v, grad, dk, dv)
    a = alignment(*read)
    key_grads[(blocks * call.b * call.hk,)](
        *read, call.c, call.keep, totals, deltas, pulls, *(strides(x, a) for x in read), *call.sizes(blocks), count,
        UNIT=call.unit, ALIGN=a, **call.flags, **config,
    )  # fmt: skip
    dc = torch.empty_like(call.c)
    sum_parts[(call.h,)](parts, dc, parts.numel() // (2 * call.h), BP=1024, num_warps=4)
    return dc
