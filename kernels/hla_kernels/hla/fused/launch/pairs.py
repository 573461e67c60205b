"""The launches of calls whose heads go two by two: `heads.pairs`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ....dispatch.recording import launch
from .. import plan
from ..heads.pairs import backward_pairs, forward_higher, forward_pairs, grads_pairs, weights_higher, weights_pairs
from ..plan import neighbours, paths
from .call import Call, Outs, Saved, placed


def near(x: Tensor) -> bool:
    """Whether the heads of a tensor lie one behind the other."""
    return x.stride(2) == x.shape[3]


def own(call: Call) -> bool:
    """Whether the tokens of every two heads of a call are neighbours in memory, all real and with keys of their own."""
    return all(near(x) for x in (call.q, call.k, call.v)) and call.h % 2 == 0 and call.own()


def paired(call: Call) -> bool:
    """Whether forward and backward of a call go by pairs."""
    return bool(paths.pairs(call.spec, call.w, call.planned, call.most, call.q.dtype, own(call)))


def paired_forward(call: Call) -> bool:
    """Whether the forward does."""
    return bool(paths.pairs_forward(call.spec, call.w, call.planned, call.q.dtype, own(call)))


def pair_area(call: Call) -> int:
    """Numbers of a head's padded matrix (`heads.duo`)."""
    return (2 * call.w["D"] - call.w["F1"]) ** 2


def sizes(call: Call) -> dict:
    """Return the constexpr arguments of every kernel of pairs."""
    return {"D": call.w["D"], "D1": call.w["F1"]}


def tiles(call: Call, kernel: str) -> dict[str, int]:
    """Return the tiles of a kernel of `heads.pairs`."""
    return call.tiles(neighbours.pair_config, kernel)


def operators(call: Call, saved: Tensor) -> Tensor:
    """[B * H, AREA] in a buffer of `fused.saved_floats`."""
    return saved.view(call.q.dtype)[: call.bh * pair_area(call)]


def forward(call: Call, o: Tensor, saved: Tensor, save: bool) -> None:
    """Compute o, and store the tensors for the backward."""
    if call.spec.op != "linear_attention":
        return forward_higher_call(call, o, saved, save)
    q, k, v = call.q, call.k, call.v
    at, a = placed(q, k, v, o)
    launch(
        forward_pairs, call.bh // 2, q, k, v, o, operators(call, saved), *at, call.n, call.h, call.scale, ALIGN=a,
        SAVE=save, AREA=pair_area(call), **sizes(call), **tiles(call, "forward_pairs"),
    )  # fmt: skip


def factors_of(call: Call, saved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """float16 factors [B * H, 2 or 3, D, D], units [B * H, 4] and operators [B * H, D, D], if there is room, in a
    buffer of `fused.saved_floats` or `plan.factor_floats`."""
    units, size = call.bh * 4, call.bh * plan.factors(call.spec) * call.w["D"] ** 2
    rest = saved[units:]
    return rest.view(torch.float16), saved[:units], rest[size // 2 :].view(call.q.dtype)


def higher(call: Call) -> dict:
    """Return the constexpr arguments of the kernels of higher orders."""
    return {"COUNT": plan.factors(call.spec), **call.pick("ORDER"), **sizes(call)}


def forward_higher_call(call: Call, o: Tensor, saved: Tensor, save: bool) -> None:
    """Compute o of higher order; factors and, with `save`, operators go to `saved`."""
    q, k, v, d = call.q, call.k, call.v, call.w["D"]
    at, a = placed(q, k, v, o)
    factors, units, matrix = factors_of(call, saved)
    room = call.buffer(call.bh, d, d, dtype=torch.float16) if call.spec.op == "hla3" else factors
    launch(
        forward_higher, call.bh // 2, q, k, v, o, matrix, factors, units, room, *at, call.n, call.h, call.scale,
        ALIGN=a, SAVE=save, **higher(call), **tiles(call, "forward_higher"),
    )  # fmt: skip


def weights_higher_call(call: Call, g: Tensor, saved: Tensor) -> tuple[Tensor, Tensor]:
    """Operators [B * H, D, D] and weights [B * H, 2 or 3, D, D]."""
    q, d, count = call.q, call.w["D"], plan.factors(call.spec)
    factors, units, matrix = factors_of(call, saved)
    weights = call.buffer(call.bh, count, d, d, dtype=q.dtype)
    room = call.buffer(call.bh, 3 if count == 3 else 1, d, d, dtype=torch.float16)
    at, a = placed(q, g)
    launch(
        weights_higher, call.bh // 2, q, g, factors, units, room, weights, *at, call.n, call.h, call.scale, ALIGN=a,
        **higher(call), **tiles(call, "weights_higher"),
    )  # fmt: skip
    return matrix, weights


def backward(call: Call, g: Tensor, outs: Outs, saved: Tensor, apply: Callable[..., None]) -> None:
    """Compute dq, dk, dv from what a forward saved, in one launch or two: of ahla and hla3 the second is
    `launch.apply_grads_call`. g of another layout than the tokens' is copied."""
    assert all(near(x) for x in outs)
    g = g if near(g) else g.contiguous()
    if call.spec.op != "linear_attention":
        matrix, weights = weights_higher_call(call, g, saved)
        if call.spec.op != "hla2":
            return apply(call, g, outs, Saved(g, matrix), None, weights, weights, True)
        return write(call, g, outs, matrix, weights)
    q, k, v = call.q, call.k, call.v
    matrix = operators(call, saved)
    if neighbours.at_once(call.most):
        at, a = placed(q, k, v, g, *outs)
        launch(
            backward_pairs, call.bh // 2, q, k, v, g, *outs, matrix, *at, call.n, call.h, call.scale, ALIGN=a,
            AREA=pair_area(call), **sizes(call), **tiles(call, "backward_pairs"),
        )  # fmt: skip
        return
    weights = call.buffer(call.bh, pair_area(call), dtype=q.dtype)
    at, a = placed(q, g)
    launch(
        weights_pairs, call.bh // 2, q, g, weights, *at, call.n, call.h, call.scale, ALIGN=a, AREA=pair_area(call),
        **sizes(call), **tiles(call, "weights_pairs"),
    )  # fmt: skip
    write(call, g, outs, matrix, weights)


def write(call: Call, g: Tensor, outs: Outs, matrix: Tensor, weights: Tensor) -> None:
    """Compute dq, dk, dv from operators and weights."""
    q, k, v = call.q, call.k, call.v
    config, roles = tiles(call, "grads_pairs"), neighbours.roles(call.spec)
    parts, chunk = neighbours.parts(call.planned // 2, call.most, config["BN"])
    at, a = placed(q, k, v, g, *outs)
    launch(
        grads_pairs, call.bh // 2 * parts * roles, q, k, v, g, *outs, matrix, weights, *at, call.n, call.h, parts,
        chunk, ALIGN=a, ROLES=roles, COUNT=max(1, plan.factors(call.spec)),
        AREA=pair_area(call), **call.pick("ORDER"), **sizes(call), **config,
    )  # fmt: skip
