"""Launches of `heads.plain`."""

from __future__ import annotations

import torch
from torch import Tensor

from ....dispatch.recording import launch
from .. import plan
from ..heads.plain import plain_backward, plain_forward, plain_weights
from ..plan.tiles import plain_config, plain_forward_config, plain_weights_config
from . import apply_grads_call, pairs
from .call import Call, Outs, Saved, area, half_room, placed


def factors_of(call: Call, saved: Tensor) -> tuple[Tensor, Tensor]:
    """Return float16 factors [B * H, 2 or 3 matrices] and units [B * H, 4] in a buffer of `plan.factor_floats`."""
    units = call.bh * 4
    return saved[units:].view(torch.float16), saved[:units]


def plain_widths(call: Call) -> dict:
    """Return the constexpr widths of the kernels of `heads.plain`."""
    w = {name: call.w[name] for name in ("D", "F1", "F2")}
    return {**w, "PREC": call.prec["PREC"], "KF": plan.factors(call.spec) * w["D"] ** 2, **call.pick("ORDER")}


def plain_forward_call(call: Call, o: Tensor, saved: Tensor) -> None:
    """Compute o from q, k, v in one launch; store the factors unless `saved` is empty."""
    q, k, v = call.q, call.k, call.v
    save = saved.numel() > 0
    if pairs.paired_forward(call):
        buffer = saved if save else call.buffer(call.bh * plan.factor_floats(call.spec, call.w, call.most))
        return pairs.forward_higher_call(call, o, buffer, False)
    factors, units = factors_of(call, saved) if save else (o, o)
    at, a = placed(q, k, v, o)
    launch(
        plain_forward, call.bh,
        q, k, v, o, factors, units, *at, call.n, call.h, call.scale, ALIGN=a, SAVE=save, **plain_widths(call),
        **call.tiles(plain_forward_config, call.w),
    )  # fmt: skip


def room_of(call: Call) -> tuple[Tensor, int]:
    """Allocate three float16 matrices per head; return them and the length per head."""
    return half_room(call, 3), 3 * area(call)


def plain_backward_call(call: Call, g: Tensor, outs: Outs, saved: Tensor) -> None:
    """Compute dq, dk, dv of a higher order without options in one launch; an empty `saved` has no factors."""
    q, k, v = call.q, call.k, call.v
    kept = saved.numel() > 0
    at, a = placed(q, k, v, g, *outs)
    room, length = room_of(call) if kept and call.w["F2"] > 0 else (g, 0)
    launch(
        plain_backward, call.bh,
        q, k, v, g, *outs, *(factors_of(call, saved) if kept else (g, g)), room, *at, call.n, call.h, call.scale,
        ALIGN=a, KR=length, KEPT=kept, **plain_widths(call),
        **call.tiles(plain_config, call.spec, call.w),
    )  # fmt: skip


def plain_two_step_call(call: Call, g: Tensor, outs: Outs, saved: Tensor) -> None:
    """Compute the weights with one program per head, then the gradients of tokens with several (two launches)."""
    assert saved.numel() > 0, "the factors that a forward of so few tokens does not keep"
    q, lay = call.q, call.lay
    at, a = placed(q, g)
    room, length = room_of(call) if call.w["F2"] > 0 else (g, 0)
    weights = call.buffer(call.bh, lay.kw, dtype=call.weights_dtype)
    matrix = call.buffer(call.bh, lay.fd, lay.dv, dtype=call.q.dtype)
    launch(
        plain_weights, call.bh,
        q, g, *factors_of(call, saved), room, matrix, weights, *at, call.n, call.h, call.scale, ALIGN=a, KR=length,
        WOFF=lay.woff, KW=lay.kw, **plain_widths(call), **call.tiles(plain_weights_config),
    )  # fmt: skip
    apply_grads_call(call, g, outs, Saved(room, matrix), None, weights, weights, True)
