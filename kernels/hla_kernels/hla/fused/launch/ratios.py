"""Launches of `polynomial` as a ratio of features.

Moments, operator and algebra of the backward by `heads.mixture`, sums of the backward by `split.reduce_readout`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ....dispatch.recording import launch
from ..heads.mixture import mixture_moments
from ..heads.mixture.ratios import ratio_operator
from . import apply_call, apply_grads_call, readout_grad
from .call import Call, Outs, Saved, area, half_room, placed, staged, unfused
from .mixture import FIXED, LEARNED, Form, fixed_weights_call, means, mixture_weights_call


def ratio_kept(call: Call, saved: Tensor, form: Form) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Float16 matrices [B * H, 10 or of FIXED 5, F, F], units [B * H, 8], vectors [B * H, K] and operators of a buffer
    of `plan.mixture.mixture_floats`, or room for them."""
    lay, size = call.lay.vectors(), form.matrices * area(call) // 2
    room = lay.matrix_floats(call.matrix_dtype.itemsize)
    buffer = saved if saved.numel() > 0 else call.buffer(call.bh * (8 + size + lay.k + room))
    units, kept, vectors, matrix = buffer.split([call.bh * x for x in (8, size, lay.k, room)])
    matrix = matrix.view(call.matrix_dtype).view(call.bh, -1)
    return kept.view(torch.float16), units, vectors.view(call.bh, lay.k), matrix


def ratio_forward_call(call: Call, o: Tensor, saved: Tensor) -> None:
    """Three launches: o, and what a backward needs unless `saved` is empty, for which FIXED has enough digits."""
    q, k, v = call.q, call.k, call.v
    fixed = call.spec.fixed or saved.numel() == 0
    form = FIXED if fixed else LEARNED
    kept, units, vectors, matrix = ratio_kept(call, saved, form)
    at, a = placed(q, k, v)
    launch(
        mixture_moments, 3 * call.bh,
        q, k, v, kept, units, vectors, *at, call.n, call.h, call.scale, ALIGN=a, DIGITS=not fixed, **means(call),
        **form.square(call), **call.pick("FMAP"), **staged(form.tiles(call, "features")),
    )  # fmt: skip
    room, length = (kept.view(-1)[3 * area(call) :], 5) if fixed else (half_room(call, 3), 3)
    lay = call.lay = call.lay.vectors()
    launch(
        ratio_operator, call.bh,
        kept, units, room, vectors, matrix, call.coefficients, call.n, call.h, call.scale, OFF=lay.off, K=lay.k,
        KR=length * area(call), DIGITS=not fixed, **form.square(call), **form.tiles(call, "ratio"), **unfused(call),
    )  # fmt: skip
    apply_call(call, o, Saved(vectors, matrix))


def ratio_backward_call(call: Call, g: Tensor, outs: Outs, saved: Tensor) -> Tensor | None:
    """Compute dq, dk, dv; return parts of d coefficients if they are learned."""
    spec, lay = call.spec, call.lay.vectors()
    kept, units, vectors, matrix = ratio_kept(call, saved, FIXED if spec.fixed else LEARNED)
    call.lay, ratio, dc = lay, call.ratio(), None
    of = Saved(vectors, matrix)
    grads = readout_grad(call, g, of, ratio)
    weights, rows = call.buffer(call.bh, lay.kw, dtype=call.q.dtype), call.buffer(call.bh, 3 * lay.fd)
    if spec.fixed:
        fixed_weights_call(call, g, kept, units, vectors, weights, rows, grads)
    else:
        dc = mixture_weights_call(call, g, kept, units, vectors, matrix, weights, rows, grads)
    apply_grads_call(call, g, outs, of, ratio, weights, rows, True)
    return dc
