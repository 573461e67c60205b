"""Kernel launches of the form by pairs."""

from __future__ import annotations

import torch
from torch import Tensor

from ....dispatch.recording import launch
from ....hla.fused.launch import group_sum
from ....hla.fused.spec import alignment, strides
from .. import plan
from ..launch import Call, add, head_grads
from .kernels import number_blocks, pair_key_grads, pair_outputs, pair_query_grads


def blocks_of(call: Call) -> Tensor:
    """Return the block of each token, [N]."""
    ids = call.buffer(call.n, dtype=torch.int32)
    launch(number_blocks, -(-call.n // 128), ids, call.geo, call.n, BN=128, num_warps=4)
    return ids


def mixing_strides(call: Call) -> tuple[int, int, int]:
    """Return the (head, row, column) strides of m."""
    first = call.mixing.stride(0) if call.mixing.dim() == 3 else 0
    return first, call.mixing.stride(-2), call.mixing.stride(-1)


def flags(call: Call) -> dict:
    """Return the constexpr arguments of all three kernels."""
    names = ("NORM", "FMAP")
    return {**{name: call.flags[name] for name in names}, **call.w, "DIGITS": call.digits, "PREC": call.prec}


def forward_call(call: Call, out: Tensor) -> None:
    """Compute o."""
    config = plan.pair_config(call.w, call.digits)
    count, a = -(-call.n // config["BM"]), alignment(call.q, call.k, call.v, out)
    launch(
        pair_outputs, count * call.bh,
        call.q, call.k, call.v, out, call.mixing, blocks_of(call), call.keep, call.scales,
        *(strides(x, a) for x in (call.q, call.k, call.v, out)), mixing_strides(call), call.n, call.h, call.group,
        count, call.scale, call.o.eps, ALIGN=a, **flags(call), **config,
    )  # fmt: skip


def backward_call(call: Call, g: Tensor, outs: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Write dq, dk, dv into `outs` and return d mixing."""
    room = outs if call.group == 1 else (outs[0], *head_grads(call))
    config, ids = plan.pair_config(call.w, call.digits), blocks_of(call)
    ratios = call.buffer(2, call.bh, call.n) if call.o.normalize else None
    count = -(-call.n // config["BM"])
    parts = call.buffer(call.bh * count, call.m, call.m)
    a = alignment(call.q, call.k, call.v, g, room[0])
    launch(
        pair_query_grads, count * call.bh,
        call.q, call.k, call.v, g, room[0], call.mixing, ids, call.keep, call.scales, ratios, parts,
        *(strides(x, a) for x in (call.q, call.k, call.v, g, room[0])), mixing_strides(call), call.n, call.h, call.bh,
        call.m, call.group, count, call.scale, call.o.eps, ALIGN=a, MP=max(16, 1 << (call.m - 1).bit_length()),
        **flags(call), **config,
    )  # fmt: skip
    config = plan.pair_config(call.w, call.digits, True)
    key_tiles = -(-call.n // config["BN"])
    a = alignment(call.q, call.k, call.v, g, *room[1:])
    launch(
        pair_key_grads, key_tiles * call.bh,
        call.q, call.k, call.v, g, *room[1:], call.mixing, ids, call.keep, call.scales, ratios,
        *(strides(x, a) for x in (call.q, call.k, call.v, g, *room[1:])), mixing_strides(call), call.n, call.h,
        call.bh, call.group, key_tiles, call.scale, ALIGN=a, **flags(call), **config,
    )  # fmt: skip
    if call.group > 1:
        for part, out in zip(room[1:], outs[1:], strict=True):
            group_sum(part, out, call.group)
    out = torch.empty_like(call.mixing, memory_format=torch.contiguous_format)
    groups = call.h if call.mixing.dim() == 3 else 1
    add(parts, out, groups, call.bh * count // groups, call.m * call.m, 512)
    return out
