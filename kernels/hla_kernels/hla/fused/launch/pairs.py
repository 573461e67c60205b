"""The launches of calls whose heads go two by two: `heads.pairs` and `heads.factors`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ....dispatch.recording import launch
from .. import plan
from ..heads.factors import factor_operator, factor_weights
from ..heads.pairs import apply_pairs, forward_pairs, grads_pairs, readout_pairs, reduce_pairs
from ..spec import alignment, strides
from .call import Call, Saved

Grads = Callable[[Call, Tensor, tuple[Tensor, Tensor, Tensor], Saved, None, Tensor, Tensor, bool], None]


def neighbours(x: Tensor) -> bool:
    """Whether the heads of a tensor lie one behind the other."""
    return x.stride(2) == x.shape[3]


def paired(call: Call) -> bool:
    """Whether the tokens of every two heads of a call are neighbours in memory, and its plan is one of pairs."""
    near = all(neighbours(x) for x in (call.q, call.k, call.v)) and call.h % 2 == 0
    own = call.g == 1 and call.seqs.mask is None and call.seqs.cu_seqlens is None
    return near and bool(plan.pairs(call.spec, call.w, call.planned, call.most, call.q.dtype, own))


class Factors(NamedTuple):
    """What a forward of pairs keeps: the operators and, of higher orders, their factors with the factors' units."""

    matrix: Tensor
    factors: Tensor
    units: Tensor

    @classmethod
    def of(cls, saved: Saved, call: Call) -> Factors:
        """The same memory as what the other forms keep: the states hold factors [B * H, 2, D, D] and units."""
        assert saved.state is not None and saved.matrix is not None
        units = saved.state.flatten()[-4 * call.bh :].view(call.bh, 4)
        return cls(saved.matrix, saved.state.view(torch.float16).flatten()[: 2 * saved.matrix.numel()], units)


def first(call: Call) -> bool:
    """Whether the moment of a call is its operator."""
    return call.spec.op == "linear_attention"


def sizes(call: Call) -> dict:
    """Constexpr of a pass over tokens of two heads."""
    return {"D": call.w["D"], "D1": call.w["F1"]}


def forward(call: Call, o: Tensor, saved: Saved, save: bool) -> None:
    """o, and what a backward reads."""
    q, k, v = call.q, call.k, call.v
    a = alignment(q, k, v, o)
    if first(call):
        launch(
            forward_pairs, call.bh // 2,
            q, k, v, o, saved.matrix, strides(q, a), strides(k, a), strides(v, a), strides(o, a), call.n, call.h,
            call.scale, ALIGN=a, SAVE=save, **sizes(call),
            **call.tiles("forward_pairs", plan.pair_config, "forward_pairs"),
        )  # fmt: skip
        return
    kept = Factors.of(saved, call)
    launch(
        reduce_pairs, call.bh // 2,
        q, k, v, kept.factors, kept.units, strides(q, a), strides(k, a), strides(v, a), call.n, call.h, call.scale,
        ALIGN=a, **call.pick("ORDER"), **sizes(call), **call.tiles("reduce_pairs", plan.pair_config, "reduce_pairs"),
    )  # fmt: skip
    launch(
        factor_operator, call.bh,
        kept.factors, kept.units, kept.matrix, D2=call.w["F2"], **sizes(call),
        **call.tiles("factor_operator", plan.factor_config),
    )  # fmt: skip
    config = call.tiles("apply_pairs", plan.pair_config, "apply_pairs")
    parts, chunk = plan.pair_parts(call.planned // 2, call.most, config["BN"])
    launch(
        apply_pairs, call.bh // 2 * parts,
        q, o, kept.matrix, strides(q, a), strides(o, a), call.n, call.h, parts, chunk, ALIGN=a, **sizes(call), **config
    )


def backward(call: Call, g: Tensor, outs: tuple[Tensor, Tensor, Tensor], saved: Saved, apply_grads: Grads) -> None:
    """dq, dk, dv from what a forward kept; those of higher orders by `apply_grads`, whose programs of one head have
    room for two weights. g of another layout than the tokens' is copied."""
    assert all(neighbours(x) for x in outs)
    g = g if neighbours(g) else g.contiguous()
    kept, lay = Factors.of(saved, call), call.lay
    q, k, v = call.q, call.k, call.v
    weights = call.buffer(call.bh, lay.kw, dtype=q.dtype)
    gradient = call.buffer(call.bh, lay.fd, lay.dv, dtype=torch.float16)
    a = alignment(q, k, v, g, *outs)
    launch(
        readout_pairs, call.bh // 2,
        q, g, weights, gradient, kept.units, strides(q, a), strides(g, a), call.n, call.h, call.scale, ALIGN=a,
        KW=lay.kw, **call.pick("ORDER"), **sizes(call),
        **call.tiles("readout_pairs", plan.pair_config, "readout_pairs"),
    )  # fmt: skip
    if not first(call):
        launch(
            factor_weights, call.bh,
            kept.factors, gradient, kept.units, weights, call.n, call.scale, D2=call.w["F2"], WOFF=lay.woff, KW=lay.kw,
            **call.pick("ORDER"), **sizes(call), **call.tiles("factor_weights", plan.factor_config),
        )  # fmt: skip
        return apply_grads(call, g, outs, saved, None, weights, weights, False)
    config = call.tiles("grads_pairs", plan.pair_config, "grads_pairs")
    parts, chunk = plan.pair_parts(call.planned // 2, call.most, config["BN"])
    launch(
        grads_pairs, call.bh // 2 * parts * 3,
        k, v, g, *outs, kept.matrix, weights, strides(k, a), strides(v, a), strides(g, a),
        *(strides(x, a) for x in outs), call.n, call.h, parts, chunk, ALIGN=a, KW=lay.kw, **sizes(call), **config,
    )  # fmt: skip
