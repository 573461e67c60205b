"""Launches of `heads.summed`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ....dispatch.recording import launch
from .. import plan
from ..heads.summed import (
    summed_backward,
    summed_forward,
    summed_middle,
    summed_queries,
    summed_tokens,
    summed_weights,
)
from ..plan import sums
from . import apply_grads_call
from .call import Call, Outs, Saved, area, half_room, placed


class Kept(NamedTuple):
    """Saved tensors per head: vectors [B * H, K] in float32, the operator (or memory for it if it is not saved),
    float16 factors and units."""

    vectors: Tensor
    matrix: Tensor
    factors: Tensor
    units: Tensor

    @classmethod
    def of(cls, buffer: Tensor, call: Call) -> Kept:
        """Split a buffer of `plan.sums.kept_floats`."""
        lay, size, dtype = call.lay.vectors(), call.lay.fd * call.lay.dv, call.q.dtype
        room = lay.matrix_floats(dtype.itemsize) if sums.keeps_operator(call.spec) else 0
        lengths = [call.bh * x for x in (4, lay.K, room, plan.factors(call.spec) * area(call) // 2)]
        units, vectors, matrix, factors = buffer[: sum(lengths)].split(lengths)
        matrix = matrix.view(dtype)[: call.bh * size] if room else call.buffer(call.bh * size, dtype=dtype)
        return cls(vectors, matrix.view(call.bh, lay.fd, lay.dv), factors.view(torch.float16), units)

    @classmethod
    def none(cls, call: Call, o: Tensor) -> Kept:
        """Return tensors for a forward that saves nothing: memory for factors of a ratio that go through memory,
        otherwise o as a placeholder."""
        if call.w.F.D2 == 0 or not call.spec.normalize:
            return cls(o, o, o, o)
        factors = call.buffer(call.bh, plan.factors(call.spec) * area(call), dtype=torch.float16)
        return cls(o, o, factors, call.buffer(call.bh, 4))


def summed_widths(call: Call) -> dict:
    """Return the constexpr widths of the kernels of `heads.summed`."""
    kept = {"L": call.lay.vectors(), "KF": plan.factors(call.spec) * area(call)}
    return {"F": call.w.F, **kept, **call.pick("ORDER", "NORM", "CENTER", "MEAN")}


def room_of(call: Call, g: Tensor) -> tuple[Tensor, int]:
    """Allocate three float16 matrices per head, unless factors of one block need none (then g is a placeholder); return
    them and the length per head."""
    needed = call.spec.normalize or call.w.F.D2 > 0
    return (half_room(call, 3), 3 * area(call)) if needed else (g, 0)


def summed_forward_call(call: Call, o: Tensor, saved: Tensor) -> None:
    """Compute o from q, k, v in one launch; store tensors for the backward unless `saved` is empty."""
    q, k, v = call.q, call.k, call.v
    save = saved.numel() > 0
    kept = Kept.of(saved, call) if save else Kept.none(call, o)
    at, a = placed(q, k, v, o)
    launch(
        summed_forward, call.bh, q, k, v, o, *kept, *at, call.n, call.h, call.scale, call.spec.eps, ALIGN=a, SAVE=save,
        PREC=call.prec["PREC"], **summed_widths(call), **call.tiles(sums.forward_config, call.spec, call.w, call.most),
    )  # fmt: skip


def summed_backward_call(call: Call, g: Tensor, outs: Outs, saved: Tensor) -> None:
    """Compute dq, dk, dv in one launch."""
    q, k, v = call.q, call.k, call.v
    at, a = placed(q, k, v, g, *outs)
    room, length = room_of(call, g)  # for three matrices, then for as many of the dtype of the tokens
    rows, sizes = call.buffer(call.bh, 3 * call.lay.fd), summed_widths(call)
    if call.spec.op == "hla3":  # where the padded matrices of room are
        sizes["L"] = sizes["L"]._replace(P=0, S=area(call), W=2 * area(call))
    launch(
        summed_backward, call.bh, q, k, v, g, *outs, call.ratio(), *Kept.of(saved, call), room, room.view(q.dtype),
        rows, *at, call.n, call.h, call.scale, call.spec.eps, ALIGN=a, KR=length,
        PREC=call.prec["PREC"], **sizes, **call.tiles(sums.backward_config, call.spec, call.w, call.most),
    )  # fmt: skip


def summed_two_step_call(call: Call, g: Tensor, outs: Outs, saved: Tensor) -> None:
    """Compute the weights with one program per head, then the gradients of tokens with several (two launches)."""
    q, kept = call.q, Kept.of(saved, call)
    call.lay = lay = call.lay.vectors()
    at, a = placed(q, g)
    room, length = room_of(call, g)
    weights = call.buffer(call.bh, lay.KW, dtype=call.weights_dtype)
    ratio, rows = call.ratio(), call.buffer(call.bh, 3 * lay.fd)
    launch(
        summed_weights, call.bh, q, g, ratio, *kept, room, weights, rows, *at, call.n, call.h, call.scale,
        call.spec.eps, ALIGN=a, KR=length, PREC=call.prec["PREC"], **summed_widths(call),
        **sums.SUMS,
    )  # fmt: skip
    apply_grads_call(call, g, outs, Saved(kept.vectors, kept.matrix), ratio, weights, rows, True)


def summed_ratio_call(call: Call, g: Tensor, outs: Outs, saved: Tensor, at_once: bool) -> None:
    """Compute the gradients of a ratio with a separate launch for sums over queries (one program per head at 72
    channels, or two), then the gradients of tokens."""
    q, k, v, kept = call.q, call.k, call.v, Kept.of(saved, call)
    call.lay = lay = call.lay.vectors()
    at, a = placed(q, g)
    room, length = room_of(call, g)
    count, chunk = sums.query_parts(call.w, call.planned, call.most, sums.SUMS["BN"])
    ratio, rows, ones = call.ratio(), call.buffer(call.bh, 3 * lay.fd), call.buffer(call.bh, count, lay.fd)
    parts = call.buffer(call.bh, count, lay.fd, lay.dv) if count > 1 else None
    sizes = {**summed_widths(call), "KR": length}
    prec = call.prec["PREC"]
    short = {x: sizes[x] for x in ("ORDER", "NORM", "MEAN", "F", "L", "KR")}
    launch(
        summed_queries, call.bh * count, q, g, ratio, kept.vectors, kept.matrix, kept.units, room, parts, ones, *at,
        call.n, call.h, chunk, call.spec.eps, ALIGN=a, PREC=prec, PARTS=count, **short, **sums.SUMS,
    )  # fmt: skip
    if at_once:
        at, a = placed(q, k, v, g, *outs)
        launch(
            summed_tokens, call.bh, q, k, v, g, *outs, ratio, *kept, room, ones, rows, *at, call.n, call.h, call.scale,
            ALIGN=a, PREC=prec, **sizes, **call.tiles(sums.tokens_config, call.spec),
        )  # fmt: skip
        return
    weights = call.buffer(call.bh, lay.KW, dtype=call.weights_dtype)
    launch(
        summed_middle, call.bh, *kept, room, parts, ones, weights, rows, call.n, call.scale,
        PARTS=count, **sizes, **sums.MIDDLE,
    )  # fmt: skip
    apply_grads_call(call, g, outs, Saved(kept.vectors, kept.matrix), ratio, weights, rows, True)
