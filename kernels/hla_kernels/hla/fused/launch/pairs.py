"""The launches of calls whose heads go two by two: `heads.pairs`."""

from __future__ import annotations

import torch
from torch import Tensor

from ....dispatch.recording import launch
from .. import plan
from ..heads.pairs import backward_pairs, forward_pairs, grads_pairs, weights_pairs
from .call import Call, placed


def neighbours(x: Tensor) -> bool:
    """Whether the heads of a tensor lie one behind the other."""
    return x.stride(2) == x.shape[3]


def paired(call: Call) -> bool:
    """Whether the tokens of every two heads of a call are neighbours in memory, and its plan is one of pairs."""
    near = all(neighbours(x) for x in (call.q, call.k, call.v)) and call.h % 2 == 0
    own = call.g == 1 and call.seqs.mask is None and call.seqs.cu_seqlens is None
    return near and bool(plan.pairs(call.spec, call.w, call.planned, call.most, call.q.dtype, own))


def area(call: Call) -> int:
    """Numbers of a head's matrix (`heads.duo`)."""
    return (2 * call.w["D"] - call.w["F1"]) ** 2


def kept(call: Call, saved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Operators [B * H, AREA], factors [B * H, 2, AREA] and units [B * H, 4] in a buffer of `fused.saved_floats`."""
    units, operators = call.bh * 4, call.bh * area(call)
    rest = saved[units:]
    return rest.view(call.q.dtype)[:operators], rest.view(torch.float16)[operators:], saved[:units]


def sizes(call: Call) -> dict:
    """Constexpr of every kernel here."""
    return {"D": call.w["D"], "D1": call.w["F1"], "AREA": area(call)}


def tiles(call: Call, kernel: str) -> dict[str, int]:
    """Tiles of a kernel of `heads.pairs`."""
    return call.tiles(kernel, plan.pair_config, kernel)


def forward(call: Call, o: Tensor, saved: Tensor, save: bool) -> None:
    """o, and what a backward reads."""
    q, k, v = call.q, call.k, call.v
    at, a = placed(q, k, v, o)
    launch(
        forward_pairs, call.bh // 2, q, k, v, o, *kept(call, saved), *at, call.n, call.h, call.scale, ALIGN=a,
        SAVE=save, **call.pick("ORDER"), **sizes(call), **tiles(call, "forward_pairs"),
    )  # fmt: skip


def backward(call: Call, g: Tensor, outs: tuple[Tensor, Tensor, Tensor], saved: Tensor) -> None:
    """dq, dk, dv from what a forward kept, in one launch or two. g of another layout than the tokens' is copied."""
    assert all(neighbours(x) for x in outs)
    g = g if neighbours(g) else g.contiguous()
    q, k, v = call.q, call.k, call.v
    matrix, factors, units = kept(call, saved)
    at, a = placed(q, k, v, g, *outs)
    tokens = (*at, call.n, call.h)
    if plan.pairs_at_once(call.spec, call.most):
        launch(
            backward_pairs, call.bh // 2, q, k, v, g, *outs, matrix, *tokens, call.scale, ALIGN=a, **sizes(call),
            **tiles(call, "backward_pairs"),
        )  # fmt: skip
        return
    count = 1 if call.spec.op == "linear_attention" else 2
    weights = call.buffer(call.bh, count, area(call), dtype=q.dtype)
    room = call.buffer(call.bh, area(call), dtype=torch.float16)
    own = {"COUNT": count, **call.pick("ORDER"), **sizes(call)}
    launch(
        weights_pairs, call.bh // 2, q, g, factors, units, room, weights, at[0], at[3], call.n, call.h, call.scale,
        ALIGN=a, **own, **tiles(call, "weights_pairs"),
    )  # fmt: skip
    config = tiles(call, "grads_pairs")
    parts, chunk = plan.pair_parts(call.planned // 2, call.most, config["BN"])
    roles = plan.pair_roles(call.spec)
    launch(
        grads_pairs, call.bh // 2 * parts * roles, q, k, v, g, *outs, matrix, weights, *tokens, parts, chunk, ALIGN=a,
        ROLES=roles, **own, **config,
    )  # fmt: skip
