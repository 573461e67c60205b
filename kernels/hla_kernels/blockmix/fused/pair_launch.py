"""Launches of the form by pairs of tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from ...dispatch.recording import launch
from ...hla.fused.launch import head_grads, sum_heads
from ...hla.fused.spec import Width, padded, placed
from .launch import Call, Grads
from .mixing import sum_of_mixing
from .pairs import blockmix_pair_keys, blockmix_pair_queries, blockmix_spread


class Pairs:
    """Tables E, COLUMNS and step of `pairs`, and constexpr arguments of a call."""

    def __init__(self, call: Call) -> None:
        m, width = call.mixing, padded(call.m)
        heads = m.shape[0] if m.dim() == 3 else 1
        self.call, self.step = call, call.n * width if heads > 1 else 0
        self.e = call.buffer(call.n, width, dtype=call.q.dtype)
        self.columns = call.buffer(heads, call.n, width, dtype=call.q.dtype)
        steps, grid = (m.stride(0) if heads > 1 else 0, *m.stride()[-2:]), (-(-call.n // 32), heads)
        sizes = (steps, call.geo, call.n, call.m)
        launch(blockmix_spread, grid, m, self.e, self.columns, *sizes, MP=width, BN=32, num_warps=4)
        self.d, self.v, self.b = (Width(x, padded(x), 0) for x in (call.d, call.dv, width))

    def options(self, keys: bool = False) -> dict:
        """Return the constexpr arguments and launch options; keys: of `blockmix_pair_keys`."""
        whole = max(self.d.D1, self.v.D1, self.b.D1) == 64 and self.call.q.dtype != torch.float32
        # 8 warps compute products of 64 rows twice, but have the registers for a gradient of 128 x 128 mixing weights
        warps = 8 if keys and self.b.D > 64 else 4
        tiles = {"BQ": 64, "BK": 64 if whole else 32, "num_warps": warps, "num_stages": 2}
        return {"B": self.b, "PREC": self.call.prec, **tiles}

    def queries(self, tokens: tuple[Tensor, Tensor, Tensor], out: Tensor, saved: tuple, back: bool) -> None:
        """Launch `blockmix_pair_queries`; saved: O32, F, DELTA."""
        call, (at, a) = self.call, placed(*tokens, out)
        d, v = (self.v, self.d) if back else (self.d, self.v)
        launch(
            blockmix_pair_queries, (-(-call.n // 64), call.bh),
            *tokens, self.e, self.columns, call.keep, call.scales, out, *saved,
            *at, call.n, call.h, call.group, self.step, call.scale, call.o.eps, NORM=call.o.normalize, BACK=back,
            ALIGN=a, X=d, Z=v, **self.options(),
        )  # fmt: skip


def saved_of(call: Call, saved: Tensor) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """View the buffer of the forward as o [B H, N, Dv] and f [B H, N]."""
    if not saved.numel():
        return None, None
    sizes = [call.bh * call.n * call.dv, call.bh * call.n]
    out, f = saved[: sum(sizes)].split(sizes)
    return out, f


def forward_call(call: Call, out: Tensor, saved: Tensor) -> None:
    """Compute o, and fill the buffer unless it is empty."""
    Pairs(call).queries((call.q, call.k, call.v), out, (*saved_of(call, saved), None), False)


def backward_call(call: Call, g: Tensor, outs: Grads, saved: Tensor) -> Tensor:
    """Write dq, dk, dv into `outs` and return d mixing."""
    pairs, (out, f), (dk, dv) = Pairs(call), saved_of(call, saved), head_grads(call.q, outs[1:], call.keep)
    delta = None if f is None else call.buffer(call.bh, call.n)
    pairs.queries((g, call.v, call.k), outs[0], (out, f, delta), True)
    rows, more = (call.q, call.k, call.v, g, dk, dv), pairs.options(True)
    tiles, (at, a) = -(-call.n // more["BK"]), placed(*rows)
    parts = call.buffer(call.bh * tiles, call.m, call.m)
    launch(
        blockmix_pair_keys, (tiles, call.bh),
        *rows[:4], pairs.e, pairs.columns, call.keep, call.scales, f, delta, dk, dv, parts,
        *at, call.n, call.h, call.bh, call.m, call.group, pairs.step, call.scale, ALIGN=a, D=pairs.d, V=pairs.v,
        **more,
    )  # fmt: skip
    sum_heads((dk, dv), outs[1:])
    return sum_of_mixing(call, parts, tiles)
