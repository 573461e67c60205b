"""Launches of `heads.mixture.fixed`."""

from __future__ import annotations

import torch
from torch import Tensor

from ....dispatch.recording import launch
from ..heads.mixture import mixture_moments, mixture_operator
from ..heads.mixture.fixed import fixed_forward, fixed_products, fixed_weights
from ..plan.mixture import fixed_config
from .call import Call, Saved, placed, staged, unfused
from .mixture import Read, Write, area, means, operators


def fixed_square(call: Call) -> dict:
    """Constexpr of the kernels of `fixed`: five float16 matrices of a head are kept."""
    return {"D": call.w["D"], "F1": call.w["F1"], "F2": call.w["F2"], "KF": 5 * area(call)}


def kept_of(call: Call, saved: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Five float16 matrices [B * H, 5, F, F], units [B * H, 8], vectors [B * H, K] and operators of a buffer of
    `plan.fixed_floats`; room for those that a forward needs of an empty one."""
    length = call.bh * call.lay.vectors().k
    if saved.numel() == 0:
        kept = call.buffer(call.bh, 5 * area(call), dtype=torch.float16)
        return kept, call.buffer(call.bh, 8), call.buffer(length), operators(call)
    lengths = [8 * call.bh, call.bh * 5 * area(call) // 2, length]
    units, kept, vectors, matrix = saved.split([*lengths, saved.numel() - sum(lengths)])
    return kept.view(torch.float16), units, vectors, matrix.view(call.q.dtype)


def fixed_forward_call(call: Call, o: Tensor, saved: Tensor, read: Read) -> None:
    """o, and what a backward needs unless `saved` is empty: one launch at 64 channels, otherwise three."""
    q, k, v = call.q, call.k, call.v
    at, a = placed(q, k, v, o)
    kept, units, vectors, matrix = kept_of(call, saved)
    if call.w["F2"] == 0:
        launch(
            fixed_forward, call.bh,
            q, k, v, o, kept, units, vectors, matrix, call.coefficients, *at, call.n, call.h, call.scale, ALIGN=a,
            SAVE=saved.numel() > 0, **means(call), **fixed_square(call),
            **call.tiles("fixed_forward", fixed_config, "forward", call.w),
        )  # fmt: skip
        return
    launch(
        mixture_moments, 3 * call.bh,
        q, k, v, kept, units, vectors, *at[:3], call.n, call.h, call.scale, ALIGN=a, DIGITS=False, FMAP=0,
        **means(call), **fixed_square(call),
        **staged(call.tiles("fixed_moments", fixed_config, "moments", call.w)),
    )  # fmt: skip
    launch(
        mixture_operator, call.bh,
        kept, units, kept.view(-1)[3 * area(call) :], matrix, call.coefficients, call.h, DIGITS=False,
        KR=5 * area(call), **fixed_square(call), **call.tiles("fixed_operator", fixed_config, "operator", call.w),
    )  # fmt: skip
    call.lay = call.lay.vectors()
    read(call, o, Saved(vectors, matrix))


def fixed_backward_call(
    call: Call, g: Tensor, outs: tuple[Tensor, Tensor, Tensor], saved: Tensor, write: Write
) -> None:
    """Two launches, three at 72 channels: weights of each head, then its tokens by several programs."""
    q, lay = call.q, call.lay
    weights = call.buffer(call.bh, lay.kw, dtype=q.dtype)
    kept, units, vectors, matrix = kept_of(call, saved)
    rows = call.buffer(call.bh, 3 * lay.fd if call.spec.sums else 0)
    fixed_weights_call(call, g, kept, units, vectors, weights, rows, None)
    call.lay = lay.vectors()
    write(call, g, outs, Saved(vectors, matrix), None, weights, rows, False)


def fixed_weights_call(
    call: Call, g: Tensor, kept: Tensor, units: Tensor, vectors: Tensor, weights: Tensor, rows: Tensor,
    grads: Tensor | None,
) -> None:  # fmt: skip
    """Fill weights and rows from what was kept and g, or from grads of `readout_grad`."""
    q, lay = call.q, call.lay
    room = call.buffer(call.bh, 2 * area(call), dtype=torch.float16) if call.w["F2"] > 0 else kept
    common = {**fixed_square(call), "KR": 2 * area(call), "WOFF": lay.woff, "KW": lay.kw, "KG": lay.kg}
    at, a = placed(q, g)
    launch(
        fixed_weights, call.bh,
        q, g, kept, units, room, weights, rows, grads, vectors, call.coefficients, *at, call.n, call.h, call.scale,
        ALIGN=a, **means(call), **common, **unfused(call),
        **call.tiles("fixed_weights", fixed_config, "weights", call.w),
    )  # fmt: skip
    if call.w["F2"] > 0:
        launch(
            fixed_products, 4 * call.bh,
            kept, units, room, weights, rows, grads, vectors, call.coefficients, call.n, call.h, call.scale,
            OFF=lay.vectors().off, K=lay.vectors().k, **common,
            **call.tiles("fixed_products", fixed_config, "products", call.w), **unfused(call),
        )  # fmt: skip
