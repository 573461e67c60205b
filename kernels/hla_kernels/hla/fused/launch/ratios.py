"""Launches of `polynomial` as a ratio.

Moments, operator and algebra of the backward by `heads.mixture`, sums of the backward by `split.reduce_readout`.
"""

from __future__ import annotations

from torch import Tensor

from ....dispatch.recording import launch
from ..heads.mixture.ratios import ratio_operator
from . import apply_call, apply_grads_call, readout_grad
from .call import Call, Outs, Saved, unfused
from .mixture import kept_of, moments_call, square, tiles, weights_call


def ratio_forward_call(call: Call, o: Tensor, saved: Tensor) -> None:
    """Three launches: o, and what a backward needs unless `saved` is empty."""
    kept, units, vectors, matrix = kept_of(call, saved)
    moments_call(call, kept, units, vectors)
    lay = call.lay = call.lay.vectors()
    launch(
        ratio_operator, call.bh,
        kept, units, vectors, matrix, call.coefficients, call.n, call.h, call.scale, L=lay,
        **square(call), **tiles(call, "ratio"), **unfused(call),
    )  # fmt: skip
    apply_call(call, o, Saved(vectors, matrix))


def ratio_backward_call(call: Call, g: Tensor, outs: Outs, saved: Tensor) -> Tensor | None:
    """Compute dq, dk, dv; return parts of d coefficients if they are learned."""
    kept, units, vectors, matrix = kept_of(call, saved)
    call.lay, ratio, of = call.lay.vectors(), call.ratio(), Saved(vectors, matrix)
    grads = readout_grad(call, g, of, ratio)
    weights, rows, dc = weights_call(call, g, kept, units, vectors, grads)
    apply_grads_call(call, g, outs, of, ratio, weights, rows, True)
    return dc
