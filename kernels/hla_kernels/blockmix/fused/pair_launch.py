"""Launches of the form by pairs of tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from ...dispatch.recording import launch
from ...hla.fused.launch import group_sum
from ...hla.fused.spec import alignment, strides
from .launch import Call, head_grads
from .mixing import add
from .pairs import pair_key_grads, pair_outputs, pair_query_grads, spread
from .spec import padded


def tables(call: Call) -> tuple[Tensor, Tensor, int]:
    """Return E, COLUMNS and step of `pairs`."""
    m, width = call.mixing, padded(call.m)
    heads = m.shape[0] if m.dim() == 3 else 1
    e = call.buffer(call.n, width, dtype=call.q.dtype)
    columns = call.buffer(heads, call.n, width, dtype=call.q.dtype)
    steps = m.stride(0) if heads > 1 else 0, m.stride(-2), m.stride(-1)
    launch(
        spread, (-(-call.n // 32), heads), m, e, columns, steps, call.geo, call.n, call.m, MP=width, BN=32, num_warps=4
    )  # fmt: skip
    return e, columns, call.n * width if heads > 1 else 0


def options(call: Call, keys: bool = False) -> dict:
    """Return the constexpr arguments and launch options; keys: of `pair_key_grads`."""
    wide = {"DP": padded(call.d), "VP": padded(call.dv), "MP": padded(call.m)}
    small = 64 if max(wide.values()) == 64 and call.q.dtype != torch.float32 else 32
    # 8 warps compute products of 64 rows twice, but have the registers for a gradient of 128 x 128 mixing weights
    tiles = {"BQ": 64, "BK": small, "num_warps": 8 if keys and wide["MP"] > 64 else 4, "num_stages": 2}
    return {"D": call.d, "DV": call.dv, "PREC": call.prec, **wide, **tiles}


def saved_of(call: Call, saved: Tensor) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """View the buffer of the forward as o [B H, N, Dv] and f [B H, N]."""
    if not saved.numel():
        return None, None
    sizes = [call.bh * call.n * call.dv, call.bh * call.n]
    out, f = saved[: sum(sizes)].split(sizes)
    return out, f


def forward_call(call: Call, out: Tensor, saved: Tensor) -> None:
    """Compute o, and fill the buffer unless it is empty."""
    e, columns, step = tables(call)
    more, a = options(call), alignment(call.q, call.k, call.v, out)
    launch(
        pair_outputs, (-(-call.n // more["BQ"]), call.bh),
        call.q, call.k, call.v, e, columns, call.keep, call.scales, out, *saved_of(call, saved),
        *(strides(x, a) for x in (call.q, call.k, call.v, out)), call.n, call.h, call.group, step, call.scale,
        call.o.eps, NORM=call.o.normalize, ALIGN=a, **more,
    )  # fmt: skip


def backward_call(call: Call, g: Tensor, outs: tuple[Tensor, Tensor, Tensor], saved: Tensor) -> Tensor:
    """Write dq, dk, dv into `outs` and return d mixing."""
    dq, dk, dv = outs if call.group == 1 else (outs[0], *head_grads(call))
    (e, columns, step), (out, f) = tables(call), saved_of(call, saved)
    delta = None if f is None else call.buffer(call.bh, call.n)
    more, a = options(call), alignment(call.q, call.k, call.v, g, dq)
    launch(
        pair_query_grads, (-(-call.n // more["BQ"]), call.bh),
        call.q, call.k, call.v, g, e, columns, call.keep, call.scales, out, f, delta, dq,
        *(strides(x, a) for x in (call.q, call.k, call.v, g, dq)), call.n, call.h, call.group, step, call.scale,
        ALIGN=a, **more,
    )  # fmt: skip
    more, a = options(call, True), alignment(call.q, call.k, call.v, g, dk, dv)
    tiles = -(-call.n // more["BK"])
    parts = call.buffer(call.bh * tiles, call.m, call.m)
    launch(
        pair_key_grads, (tiles, call.bh),
        call.q, call.k, call.v, g, e, columns, call.keep, call.scales, f, delta, dk, dv, parts,
        *(strides(x, a) for x in (call.q, call.k, call.v, g, dk, dv)), call.n, call.h, call.bh, call.m, call.group,
        step, call.scale, ALIGN=a, **more,
    )  # fmt: skip
    if call.group > 1:
        for part, to in zip((dk, dv), outs[1:], strict=True):
            group_sum(part, to, call.group)
    found = torch.empty_like(call.mixing, memory_format=torch.contiguous_format)
    groups = call.h if call.mixing.dim() == 3 else 1
    add(parts, found, groups, call.bh * tiles // groups, call.m * call.m, 512)
    return found
