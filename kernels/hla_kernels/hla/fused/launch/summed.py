"""Launches of `heads.summed`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ....dispatch.recording import launch
from .. import plan
from ..heads.summed import summed_forward, summed_middle
from ..spec import operator_dtype, placed, summed_factors, summed_floats
from . import apply_grads_call, readout_grad
from .call import Call, Outs, Saved


class Kept(NamedTuple):
    """Saved tensors per head: vectors [B * H, K] in float32, the operator [B * H, D, D], float16 factors and units."""

    vectors: Tensor
    matrix: Tensor
    factors: Tensor
    units: Tensor

    @classmethod
    def of(cls, buffer: Tensor, call: Call) -> Kept:
        """Split a buffer of `spec.summed_floats`."""
        lay, dtype = call.lay, call.q.dtype
        lengths = [call.bh * x for x in summed_floats(call.spec, call.w, dtype)]
        units, vectors, matrix, factors = buffer[: sum(lengths)].split(lengths)
        matrix = matrix.view(dtype)[: call.bh * lay.fd * lay.dv].view(call.bh, lay.fd, lay.dv)
        return cls(vectors, matrix, factors.view(torch.float16), units)

    @classmethod
    def none(cls, call: Call, o: Tensor) -> Kept:
        """Return tensors for a forward that saves nothing: memory for factors of a ratio that go through memory,
        otherwise o as a placeholder."""
        if call.w.F.D2 == 0 or not call.spec.normalize:
            return cls(o, o, o, o)
        factors = call.buffer(call.bh, summed_factors(call.spec), call.w.F.padded**2, dtype=torch.float16)
        return cls(o, o, factors, call.buffer(call.bh, 4))


def summed_widths(call: Call) -> dict:
    """Return the constexpr widths of the kernels of `heads.summed`; P: the padded width of its matrices."""
    padded = call.w.F._replace(D=call.w.F.padded)
    return {"F": call.w.F, "P": padded, "L": call.lay, **call.pick("ORDER", "NORM", "CENTER", "MEAN")}


def summed_forward_call(call: Call, o: Tensor, saved: Tensor) -> None:
    """Compute o from q, k, v in one launch; store tensors for the backward unless `saved` is empty."""
    save = saved.numel() > 0
    kept = Kept.of(saved, call) if save else Kept.none(call, o)
    at, a = placed(*call.tokens, o)
    launch(
        summed_forward, call.bh, *call.tokens, o, *kept, *at, call.n, call.h, call.scale, call.spec.eps, ALIGN=a,
        SAVE=save, PREC=call.prec["PREC"], **summed_widths(call), **plan.summed_config(call.spec, call.w),
    )  # fmt: skip


def summed_backward_call(call: Call, g: Tensor, outs: Outs, saved: Tensor) -> None:
    """Compute the sums over queries, the weights by one program per head, then the gradients of tokens."""
    kept = Kept.of(saved, call)
    call.turned = False
    of, ratio = Saved(kept.vectors, kept.matrix), call.ratio()
    grads = readout_grad(call, g, of, ratio)
    weights = call.buffer(call.bh, call.lay.KW, dtype=operator_dtype(call.q.dtype))
    rows = call.buffer(call.bh, 3 * call.lay.fd)
    room = call.buffer(call.bh, 3, call.w.F.padded**2, dtype=torch.float16)
    launch(
        summed_middle, call.bh, kept.vectors, kept.factors, kept.units, grads, room, weights, rows, call.n,
        call.scale, **summed_widths(call), **plan.SUMMED_MIDDLE,
    )  # fmt: skip
    apply_grads_call(call, g, outs, of, ratio, weights, rows, True)
