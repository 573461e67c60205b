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
from .call import Call, Saved, placed, staged, unfused

Read = Callable[[Call, Tensor, Saved], None]
Write = Callable[[Call, Tensor, tuple[Tensor, Tensor, Tensor], Saved, None, Tensor, Tensor, bool], None]


def area(call: Call) -> int:
    """Numbers of a padded matrix."""
    return (call.w["F1"] + call.w["F2"]) ** 2


def square(call: Call) -> dict:
    """Constexpr of the kernels of `mixture`: ten float16 matrices of a head are kept."""
    return {"D": call.w["D"], "F1": call.w["F1"], "F2": call.w["F2"], "KF": 10 * area(call)}


def means(call: Call) -> dict:
    """Constexpr of the kernels that sum tokens beside moments. A ratio centres values too."""
    lay, flags = call.lay.vectors(), call.pick("CENTER", "MEAN")
    return {"OFF": lay.off, "K": lay.k, **flags, "MEAN": flags["MEAN"] or call.spec.normalize}


def room_of(call: Call, matrices: int) -> Tensor:
    """Room for float16 matrices of every head."""
    return call.buffer(call.bh, matrices * area(call), dtype=torch.float16)


def digits_of(call: Call, saved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Ten float16 matrices [B * H, 10, F, F], units [B * H, 8] and vectors [B * H, K] of a buffer of
    `plan.digits_floats`."""
    units, matrices = 8 * call.bh, 8 * call.bh + call.bh * 5 * area(call)
    return saved[units:matrices].view(torch.float16), saved[:units], saved[matrices:]


def operators(call: Call) -> Tensor:
    """Room for M of every head."""
    return call.buffer(call.bh, call.lay.fd, call.lay.dv, dtype=call.q.dtype)


def mixture_forward_call(call: Call, o: Tensor, saved: Tensor, read: Read) -> None:
    """o and the moments: one launch at 64 channels, otherwise three."""
    q, k, v = call.q, call.k, call.v
    kept, units, vectors = digits_of(call, saved)
    at, a = placed(q, k, v, o)
    if call.w["F2"] == 0:
        launch(
            mixture_forward, call.bh,
            q, k, v, o, kept, units, room_of(call, 1), vectors, call.coefficients, *at, call.n, call.h, call.scale,
            ALIGN=a, **means(call), **square(call), **call.tiles("mixture_forward", mixture_config, "forward", call.w),
        )  # fmt: skip
        return
    matrix = operators(call)
    launch(
        mixture_moments, 3 * call.bh,
        q, k, v, kept, units, vectors, *at[:3], call.n, call.h, call.scale, ALIGN=a, DIGITS=True, FMAP=0, **means(call),
        **square(call), **staged(call.tiles("mixture_moments", mixture_config, "moments", call.w)),
    )  # fmt: skip
    launch(
        mixture_operator, call.bh,
        kept, units, room_of(call, 1), matrix, call.coefficients, call.h, DIGITS=True, KR=area(call),
        **square(call), **call.tiles("mixture_operator", mixture_config, "operator", call.w),
    )  # fmt: skip
    call.lay = call.lay.vectors()
    read(call, o, Saved(vectors, matrix))


def mixture_backward_call(
    call: Call, g: Tensor, outs: tuple[Tensor, Tensor, Tensor], saved: Tensor, write: Write
) -> Tensor:
    """dq, dk, dv, and parts [B, H, ., 4] of d coefficients. An empty `saved`: all is summed again."""
    q, k, v, lay = call.q, call.k, call.v, call.lay
    weights, matrix = call.buffer(call.bh, lay.kw, dtype=q.dtype), operators(call)
    rows = call.buffer(call.bh, 3 * lay.fd if call.spec.sums else 0)
    if saved.numel() == 0:
        common = {**square(call), "KR": 4 * area(call), "WOFF": lay.woff, "KW": lay.kw}
        room = room_of(call, 4)
        dc, kept = call.buffer(call.b, call.h, 1, 4), room_of(call, 10)
        vectors = call.buffer(call.bh, lay.vectors().k)
        at, a = placed(q, k, v, g)
        launch(
            mixture_backward, call.bh,
            q, k, v, g, kept, room, vectors, matrix, weights, rows, call.coefficients, dc, *at, call.n, call.h,
            call.scale, ALIGN=a, **means(call), **common,
            **call.tiles("mixture_backward", mixture_config, "backward", call.w),
        )  # fmt: skip
        call.lay = lay.vectors()
        write(call, g, outs, Saved(vectors, matrix), None, weights, rows, False)
        return dc
    kept, units, vectors = digits_of(call, saved)
    dc = mixture_weights_call(call, g, kept, units, vectors, matrix, weights, rows, None)
    call.lay = lay.vectors()
    write(call, g, outs, Saved(vectors, matrix), None, weights, rows, False)
    return dc


def mixture_weights_call(
    call: Call, g: Tensor, kept: Tensor, units: Tensor, vectors: Tensor, matrix: Tensor, weights: Tensor, rows: Tensor,
    grads: Tensor | None,
) -> Tensor:
    """Fill weights, rows and, unless there are grads of `readout_grad`, the operators; parts of d coefficients."""
    q, lay = call.q, call.lay
    config = call.tiles("mixture_weights", mixture_config, "weights", call.w)
    common = {**square(call), "KR": 4 * area(call), "WOFF": lay.woff, "KW": lay.kw, "KG": lay.kg}
    room, more = room_of(call, 4), call.buffer(call.bh, 4)
    dc = call.buffer(call.b, call.h, 1 if config["WHOLE"] else 5, 4)
    at, a = placed(q, g)
    launch(
        mixture_weights, call.bh,
        q, g, kept, units, room, more, matrix, weights, rows, grads, vectors, call.coefficients, dc, *at, call.n,
        call.h, call.scale, ALIGN=a, **means(call), **common, **config, **unfused(call),
    )  # fmt: skip
    if not config["WHOLE"]:
        launch(
            mixture_products, 4 * call.bh,
            kept, units, room, more, matrix, weights, rows, grads, vectors, call.coefficients, dc, call.n, call.h,
            call.scale, OFF=lay.vectors().off, K=lay.vectors().k, **common,
            **call.tiles("mixture_products", mixture_config, "products", call.w), **unfused(call),
        )  # fmt: skip
    return dc
