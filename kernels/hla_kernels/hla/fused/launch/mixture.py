"""Launches of `heads.mixture`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ....dispatch.recording import launch
from ..heads.mixture import (
    mixture_backward,
    mixture_forward,
    mixture_moments,
    mixture_operator,
    mixture_products,
    mixture_weights,
)
from ..plan.mixture import mixture_config
from .call import Call, Saved, placed

Read = Callable[[Call, Tensor, Saved], None]
Write = Callable[[Call, Tensor, tuple[Tensor, Tensor, Tensor], Saved, None, Tensor, Tensor, bool], None]


def area(call: Call) -> int:
    """Numbers of a padded matrix."""
    return (call.w["F1"] + call.w["F2"]) ** 2


def square(call: Call) -> dict:
    """Constexpr of the kernels of `mixture`: ten float16 matrices of a head are kept."""
    return {"D": call.w["D"], "F1": call.w["F1"], "F2": call.w["F2"], "KF": 10 * area(call)}


def room_of(call: Call, matrices: int) -> Tensor:
    """Room for float16 matrices of every head."""
    return call.buffer(call.bh, matrices * area(call), dtype=torch.float16)


def digits_of(call: Call, saved: Tensor) -> tuple[Tensor, Tensor]:
    """Ten float16 matrices [B * H, 10, F, F] and units [B * H, 8] of a buffer of `plan.digits_floats`."""
    return saved[8 * call.bh :].view(torch.float16), saved[: 8 * call.bh]


def operators(call: Call) -> Tensor:
    """Room for M of every head."""
    return call.buffer(call.bh, call.lay.fd, call.lay.dv, dtype=call.q.dtype)


def mixture_forward_call(call: Call, o: Tensor, saved: Tensor, read: Read) -> None:
    """o and the moments: one launch at 64 channels, otherwise three."""
    q, k, v = call.q, call.k, call.v
    kept, units = digits_of(call, saved)
    at, a = placed(q, k, v, o)
    if call.w["F2"] == 0:
        launch(
            mixture_forward, call.bh,
            q, k, v, o, kept, units, room_of(call, 1), call.coefficients, *at, call.n, call.h, call.scale, ALIGN=a,
            **square(call), **call.tiles("mixture_forward", mixture_config, "forward", call.w),
        )  # fmt: skip
        return
    matrix = operators(call)
    launch(
        mixture_moments, 3 * call.bh,
        q, k, v, kept, units, *at[:3], call.n, call.h, call.scale, ALIGN=a, DIGITS=True, **square(call),
        **call.tiles("mixture_moments", mixture_config, "moments", call.w),
    )  # fmt: skip
    launch(
        mixture_operator, call.bh,
        kept, units, room_of(call, 1), matrix, call.coefficients, call.h, DIGITS=True, KR=area(call),
        **square(call), **call.tiles("mixture_operator", mixture_config, "operator", call.w),
    )  # fmt: skip
    read(call, o, Saved(matrix, matrix))


def mixture_backward_call(
    call: Call, g: Tensor, outs: tuple[Tensor, Tensor, Tensor], saved: Tensor, write: Write
) -> Tensor:
    """dq, dk, dv, and parts [B, H, ., 4] of d coefficients. An empty `saved`: all is summed again."""
    q, k, v, lay = call.q, call.k, call.v, call.lay
    weights, matrix = call.buffer(call.bh, lay.kw, dtype=q.dtype), operators(call)
    common = {**square(call), "KR": 4 * area(call), "WOFF": lay.woff, "KW": lay.kw}
    room = room_of(call, 4)
    if saved.numel() == 0:
        dc, kept = call.buffer(call.b, call.h, 1, 4), room_of(call, 10)
        at, a = placed(q, k, v, g)
        launch(
            mixture_backward, call.bh,
            q, k, v, g, kept, room, matrix, weights, call.coefficients, dc, *at, call.n, call.h, call.scale, ALIGN=a,
            **common, **call.tiles("mixture_backward", mixture_config, "backward", call.w),
        )  # fmt: skip
        write(call, g, outs, Saved(room, matrix), None, weights, weights, False)
        return dc
    kept, units = digits_of(call, saved)
    config = call.tiles("mixture_weights", mixture_config, "weights", call.w)
    dc, more = call.buffer(call.b, call.h, 1 if config["WHOLE"] else 5, 4), call.buffer(call.bh, 4)
    at, a = placed(q, g)
    launch(
        mixture_weights, call.bh,
        q, g, kept, units, room, more, matrix, weights, call.coefficients, dc, *at, call.n, call.h, call.scale, ALIGN=a,
        **common, **config,
    )  # fmt: skip
    if not config["WHOLE"]:
        launch(
            mixture_products, 4 * call.bh,
            kept, units, room, more, matrix, weights, call.coefficients, dc, call.n, call.h, call.scale, **common,
            **call.tiles("mixture_products", mixture_config, "products", call.w),
        )  # fmt: skip
    write(call, g, outs, Saved(room, matrix), None, weights, weights, False)
    return dc
