"""Launches of `heads.mixture` and, of coefficients that need no gradient, of `heads.mixture.fixed`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ....dispatch.recording import launch
from ..heads.mixture import (
    mixture_backward,
    mixture_moments,
    mixture_operator,
    mixture_products,
    mixture_weights,
)
from ..heads.mixture.fixed import fixed_forward, fixed_products, fixed_weights
from ..plan.mixture import fixed_config, mixture_config
from . import apply_call, apply_grads_call
from .call import Call, Outs, Saved, area, half_room, placed, staged, unfused


class Form(NamedTuple):
    """Kernels that keep so many float16 matrices of a head, and the table of their tiles."""

    name: str
    matrices: int
    config: Callable[[str, dict[str, int]], dict[str, int]]

    def tiles(self, call: Call, kernel: str) -> dict[str, int]:
        """Return the tiles of a kernel."""
        return call.tiles(self.config, kernel, call.w)

    def square(self, call: Call) -> dict:
        """Return the constexpr arguments of all kernels."""
        return {"D": call.w["D"], "F1": call.w["F1"], "F2": call.w["F2"], "KF": self.matrices * area(call)}

    def weights(self, call: Call) -> dict:
        """Return the constexpr arguments of the kernels that write weights."""
        return {**self.square(call), "WOFF": call.lay.woff, "KW": call.lay.kw}


LEARNED, FIXED = Form("mixture", 10, mixture_config), Form("fixed", 5, fixed_config)


def means(call: Call) -> dict:
    """Return the constexpr arguments of kernels that sum tokens in addition to moments. A ratio centres values too."""
    lay, flags = call.lay.vectors(), call.pick("CENTER", "MEAN")
    return {"OFF": lay.off, "K": lay.k, **flags, "MEAN": flags["MEAN"] or call.spec.normalize}


def operators(call: Call) -> Tensor:
    """Room for M of every head."""
    return call.buffer(call.bh, call.lay.fd, call.lay.dv, dtype=call.q.dtype)


def digits_of(call: Call, saved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Ten float16 matrices [B * H, 10, F, F], units [B * H, 8] and vectors [B * H, K] of a buffer of
    `plan.mixture.digits_floats`."""
    units, matrices = 8 * call.bh, 8 * call.bh + call.bh * 5 * area(call)
    return saved[units:matrices].view(torch.float16), saved[:units], saved[matrices:]


def kept_of(call: Call, saved: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Five float16 matrices [B * H, 5, F, F], units [B * H, 8], vectors [B * H, K] and operators of a buffer of
    `plan.mixture.fixed_floats`; room for those that a forward needs of an empty one."""
    length = call.bh * call.lay.vectors().k
    if saved.numel() == 0:
        return half_room(call, 5), call.buffer(call.bh, 8), call.buffer(length), operators(call)
    lengths = [8 * call.bh, call.bh * 5 * area(call) // 2, length]
    units, kept, vectors, matrix = saved.split([*lengths, saved.numel() - sum(lengths)])
    return kept.view(torch.float16), units, vectors, matrix.view(call.q.dtype)


def mixture_forward_call(call: Call, o: Tensor, saved: Tensor) -> None:
    """o and the moments, by three launches. Where nothing is kept fixed ones have the digits that o needs."""
    if saved.numel() == 0:
        return fixed_forward_call(call, o, saved)
    kept, units, vectors = digits_of(call, saved)
    parts_forward_call(call, o, LEARNED, kept, units, vectors, operators(call))


def fixed_forward_call(call: Call, o: Tensor, saved: Tensor) -> None:
    """Compute o; store tensors for the backward unless `saved` is empty. One launch at 64 channels, otherwise three."""
    q, k, v = call.q, call.k, call.v
    kept, units, vectors, matrix = kept_of(call, saved)
    if call.w["F2"] > 0:
        return parts_forward_call(call, o, FIXED, kept, units, vectors, matrix)
    at, a = placed(q, k, v, o)
    launch(
        fixed_forward, call.bh,
        q, k, v, o, kept, units, vectors, matrix, call.coefficients, *at, call.n, call.h, call.scale, ALIGN=a,
        SAVE=saved.numel() > 0, **means(call), **FIXED.square(call), **FIXED.tiles(call, "forward"),
    )  # fmt: skip


def parts_forward_call(
    call: Call, o: Tensor, form: Form, kept: Tensor, units: Tensor, vectors: Tensor, matrix: Tensor
) -> None:
    """Moments, operator, o. Of LEARNED to the digits of float32."""
    q, k, v, digits = call.q, call.k, call.v, form is LEARNED
    at, a = placed(q, k, v, o)
    launch(
        mixture_moments, 3 * call.bh,
        q, k, v, kept, units, vectors, *at[:3], call.n, call.h, call.scale, ALIGN=a, DIGITS=digits, FMAP=0,
        **means(call), **form.square(call), **staged(form.tiles(call, "moments")),
    )  # fmt: skip
    room, length = (half_room(call, 1), 1) if digits else (kept.view(-1)[3 * area(call) :], 5)
    launch(
        mixture_operator, call.bh,
        kept, units, room, matrix, call.coefficients, call.h, DIGITS=digits, KR=length * area(call),
        **form.square(call), **form.tiles(call, "operator"),
    )  # fmt: skip
    call.lay = call.lay.vectors()
    apply_call(call, o, Saved(vectors, matrix))


def mixture_backward_call(call: Call, g: Tensor, outs: Outs, saved: Tensor) -> Tensor:
    """Compute dq, dk, dv; return parts [B, H, ., 4] of d coefficients. Empty `saved`: sums are recomputed."""
    lay = call.lay
    weights, matrix = call.buffer(call.bh, lay.kw, dtype=call.q.dtype), operators(call)
    rows = call.buffer(call.bh, 3 * lay.fd if call.spec.sums else 0)
    if saved.numel() == 0:
        vectors = call.buffer(call.bh, lay.vectors().k)
        dc = mixture_again_call(call, g, vectors, matrix, weights, rows)
    else:
        kept, units, vectors = digits_of(call, saved)
        dc = mixture_weights_call(call, g, kept, units, vectors, matrix, weights, rows, None)
    call.lay = lay.vectors()
    apply_grads_call(call, g, outs, Saved(vectors, matrix), None, weights, rows, False)
    return dc


def mixture_again_call(
    call: Call, g: Tensor, vectors: Tensor, matrix: Tensor, weights: Tensor, rows: Tensor
) -> Tensor:
    """Fill vectors, the operators, weights and rows from the tokens; parts [B, H, 1, 4] of d coefficients."""
    q, k, v = call.q, call.k, call.v
    room, kept, dc = half_room(call, 4), half_room(call, 10), call.buffer(call.b, call.h, 1, 4)
    at, a = placed(q, k, v, g)
    launch(
        mixture_backward, call.bh,
        q, k, v, g, kept, room, vectors, matrix, weights, rows, call.coefficients, dc, *at, call.n, call.h,
        call.scale, ALIGN=a, KR=4 * area(call), **means(call), **LEARNED.weights(call),
        **LEARNED.tiles(call, "backward_centred" if call.spec.sums else "backward"),
    )  # fmt: skip
    return dc


def mixture_weights_call(
    call: Call, g: Tensor, kept: Tensor, units: Tensor, vectors: Tensor, matrix: Tensor, weights: Tensor, rows: Tensor,
    grads: Tensor | None,
) -> Tensor:  # fmt: skip
    """Fill weights, rows and, unless there are grads of `readout_grad`, the operators; parts of d coefficients."""
    q, lay, config = call.q, call.lay, LEARNED.tiles(call, "weights")
    common = {**LEARNED.weights(call), "KR": 4 * area(call), "KG": lay.kg}
    room, more = half_room(call, 4), call.buffer(call.bh, 4)
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
            call.scale, OFF=lay.vectors().off, K=lay.vectors().k, **common, **LEARNED.tiles(call, "products"),
            **unfused(call),
        )  # fmt: skip
    return dc


def fixed_backward_call(call: Call, g: Tensor, outs: Outs, saved: Tensor) -> None:
    """Two launches, three at 72 channels: weights of each head, then its tokens by several programs."""
    lay = call.lay
    weights = call.buffer(call.bh, lay.kw, dtype=call.q.dtype)
    kept, units, vectors, matrix = kept_of(call, saved)
    rows = call.buffer(call.bh, 3 * lay.fd if call.spec.sums else 0)
    fixed_weights_call(call, g, kept, units, vectors, weights, rows, None)
    call.lay = lay.vectors()
    apply_grads_call(call, g, outs, Saved(vectors, matrix), None, weights, rows, False)


def fixed_weights_call(
    call: Call, g: Tensor, kept: Tensor, units: Tensor, vectors: Tensor, weights: Tensor, rows: Tensor,
    grads: Tensor | None,
) -> None:  # fmt: skip
    """Fill weights and rows from what was kept and g, or from grads of `readout_grad`."""
    q, lay = call.q, call.lay
    room = half_room(call, 2) if call.w["F2"] > 0 else kept
    common = {**FIXED.weights(call), "KR": 2 * area(call), "KG": lay.kg}
    at, a = placed(q, g)
    launch(
        fixed_weights, call.bh,
        q, g, kept, units, room, weights, rows, grads, vectors, call.coefficients, *at, call.n, call.h, call.scale,
        ALIGN=a, **means(call), **common, **unfused(call), **FIXED.tiles(call, "weights"),
    )  # fmt: skip
    if call.w["F2"] > 0:
        launch(
            fixed_products, 4 * call.bh,
            kept, units, room, weights, rows, grads, vectors, call.coefficients, call.n, call.h, call.scale,
            OFF=lay.vectors().off, K=lay.vectors().k, **common, **FIXED.tiles(call, "products"), **unfused(call),
        )  # fmt: skip
