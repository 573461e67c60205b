"""The launches of a ratio of first order whose heads go two by two: `heads.divided`."""

from __future__ import annotations

from torch import Tensor

from ....dispatch.recording import launch
from ..heads.divided import divided_forward, divided_keys
from ..plan import neighbours
from .call import Call, Outs, Saved, placed
from .pairs import near, own, sizes


def paired(call: Call) -> bool:
    """Whether a call goes by pairs."""
    return bool(neighbours.pairs_ratio(call.spec, call.w, call.planned, call.q.dtype, own(call)))


def forward(call: Call, o: Tensor, saved: Saved, save: bool) -> None:
    """One launch: o, and what a backward reads with `save`."""
    q, k, v = call.q, call.k, call.v
    lay = call.lay
    if not save:
        saved = Saved(call.buffer(call.bh, lay.k), call.buffer(call.bh, lay.fd, lay.dv, dtype=call.q.dtype))
    at, a = placed(q, k, v, o)
    launch(
        divided_forward, call.bh // 2, q, k, v, o, *saved, *at, call.n, call.h, call.scale, call.spec.eps, ALIGN=a,
        OFF=lay.off, K=lay.k, **call.pick("FMAP"), **sizes(call),
        **call.tiles(neighbours.pair_config, "divided_forward"),
    )  # fmt: skip


def keys(call: Call, outs: Outs, weights: Tensor, rows: Tensor) -> None:
    """One launch: dk and dv."""
    assert all(near(x) for x in outs)
    k, v = call.k, call.v
    config = call.tiles(neighbours.pair_config, "divided_keys")
    parts, chunk = neighbours.parts(call.planned // 2, call.most, config["BN"])
    at, a = placed(k, v, *outs[1:])
    launch(
        divided_keys, call.bh // 2 * parts, k, v, *outs[1:], weights, rows, *at, call.n, call.h, parts, chunk, ALIGN=a,
        **call.pick("FMAP"), **sizes(call), **config,
    )  # fmt: skip
