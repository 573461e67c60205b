"""The launches of calls whose heads go two by two: `heads.pairs`."""

from __future__ import annotations

from torch import Tensor

from ....dispatch.recording import launch
from ..heads.pairs import backward_pairs, forward_pairs, grads_pairs, weights_pairs
from ..plan import paths, special
from .call import Call, Outs, placed


def near(x: Tensor) -> bool:
    """Whether the heads of a tensor lie one behind the other."""
    return x.stride(2) == x.shape[3]


def own(call: Call) -> bool:
    """Whether the tokens of every two heads of a call are neighbours in memory, all real and with keys of their own."""
    return all(near(x) for x in (call.q, call.k, call.v)) and call.h % 2 == 0 and call.own()


def paired(call: Call) -> bool:
    """Whether forward and backward of a call go by pairs."""
    return bool(paths.pairs(call.spec, call.w, call.planned, call.q.dtype, own(call)))


def pair_area(call: Call) -> int:
    """Numbers of a head's padded matrix (`heads.pairs`)."""
    return (2 * call.w.F.D - call.w.F.D1) ** 2


def sizes(call: Call) -> dict:
    """Return the constexpr arguments of every kernel of pairs."""
    return {"W": call.w.F, "AREA": pair_area(call)}


def tiles(call: Call, kernel: str) -> dict[str, int]:
    """Return the tiles of a kernel of `heads.pairs`."""
    return call.tiles(special.PAIRS.__getitem__, kernel)


def operators(call: Call, saved: Tensor) -> Tensor:
    """[B * H, AREA] in a buffer of `fused.saved_floats`."""
    return saved.view(call.q.dtype)[: call.bh * pair_area(call)]


def forward(call: Call, o: Tensor, saved: Tensor, save: bool) -> None:
    """Compute o, and store the operators for the backward."""
    q, k, v = call.q, call.k, call.v
    at, a = placed(q, k, v, o)
    launch(
        forward_pairs, call.bh // 2, q, k, v, o, operators(call, saved), *at, call.n, call.h, call.scale, ALIGN=a,
        SAVE=save, **sizes(call), **tiles(call, "forward_pairs"),
    )  # fmt: skip


def backward(call: Call, g: Tensor, outs: Outs, saved: Tensor) -> None:
    """Compute dq, dk, dv from what a forward saved, in one launch or two. g of another layout than the tokens' is
    copied."""
    assert all(near(x) for x in outs)
    g = g if near(g) else g.contiguous()
    q, k, v = call.q, call.k, call.v
    matrix = operators(call, saved)
    if special.pairs_at_once(call.most):
        at, a = placed(q, k, v, g, *outs)
        launch(
            backward_pairs, call.bh // 2, q, k, v, g, *outs, matrix, *at, call.n, call.h, call.scale, ALIGN=a,
            **sizes(call), **tiles(call, "backward_pairs"),
        )  # fmt: skip
        return
    weights = call.buffer(call.bh, pair_area(call), dtype=q.dtype)
    at, a = placed(q, g)
    launch(
        weights_pairs, call.bh // 2, q, g, weights, *at, call.n, call.h, call.scale, ALIGN=a, **sizes(call),
        **tiles(call, "weights_pairs"),
    )  # fmt: skip
    config = tiles(call, "grads_pairs")
    parts, chunk = special.pair_parts(call.planned // 2, call.most, config["BN"])
    at, a = placed(q, k, v, g, *outs)
    launch(
        grads_pairs, call.bh // 2 * parts * 3, q, k, v, g, *outs, matrix, weights, *at, call.n, call.h, parts, chunk,
        ALIGN=a, **sizes(call), **config,
    )  # fmt: skip
