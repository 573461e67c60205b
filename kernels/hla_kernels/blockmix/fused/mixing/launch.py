"""Launches of the mixing of moments: forward, and backward with the gradient of the matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ....dispatch.recording import launch
from .. import plan
from ..spec import Moments
from .kernels import mix, mix_back, mix_long, mixing_grads, pad_mixing, sum_parts

if TYPE_CHECKING:
    from ..launch import Call

BLOCK = 1024


def add(parts: Tensor, out: Tensor, groups: int, count: int, step: int, rows: int) -> None:
    """Compute out [groups, step], the sum over `count` parts [groups, count, step], `rows` at a time; `rows` is
    constant per caller, so that another number of tokens does not recompile."""
    columns = max(32, 4096 // rows)
    launch(sum_parts, (-(-step // columns), groups), parts, out, count, step, BP=rows, BE=columns, num_warps=8)


def mixed(call: Call, x: Moments, out: Moments) -> None:
    """Compute X~ = m X."""
    for (part, columns), (to, _) in zip(x.columns(call.d, call.dv), out.columns(call.d, call.dv), strict=True):
        mixed_part(call, part, to, columns, False)


def mixed_part(call: Call, part: Tensor, to: Tensor, columns: int, turned: bool) -> None:
    """Compute m X, or m' X if transposed, for the matrices or the vectors."""
    config = plan.mix_config(call.m, part.dtype)
    padded, common = padded_mixing(call, part.dtype, turned, config)
    tiles = common["TILES"]
    args = (padded, part, to, call.bh, call.h, call.m)
    if "BK" in config:
        programs = tiles * call.bh * -(-columns // config["BC"])
        launch(mix_long, programs, *args, C=columns, PREC=call.mix, **common, **config)
    else:
        parts, chunk = plan.mix_parts(call.bh, tiles, columns, config)
        launch(mix, tiles * call.bh * parts, *args, chunk, C=columns, STAGES=config["num_stages"], **common, **config)


def padded_mixing(call: Call, dtype: torch.dtype, turned: bool, config: dict[str, int]) -> tuple[Tensor, dict]:
    """Return m or m' padded to full tiles, and the arguments of the passes that multiply by it."""
    mixing, per_head, mp = call.mixing, call.mixing.dim() == 3, plan.padded(call.m)
    heads = call.h if per_head else 1
    ms = (mixing.stride(0) if per_head else 0, *mixing.stride()[-2:])
    out = call.buffer(heads, 2, mp, mp, dtype=dtype)
    sizes = {"MP": mp, "TURNED": turned, "BLOCK": min(BLOCK, mp * mp)}
    launch(pad_mixing, (heads, -(-mp * mp // BLOCK)), mixing, out, ms, call.m, **sizes)
    return out, {"TILES": -(-call.m // config["BM"]), "PER_HEAD": per_head, "MP": mp}


def mixed_back(call: Call, dy: Moments, x: Moments, dx: Moments) -> Tensor:
    """Compute dX = m' dX~ and return d mixing_ib = <dX~_i, X_b> summed over the moments; in one pass over dX~ if it has
    the dtype of the tokens."""
    works = []
    for (one, columns), (other, _), (to, _) in zip(*(y.columns(call.d, call.dv) for y in (dy, x, dx)), strict=True):
        config = plan.mix_config(call.m, one.dtype, True)
        if "BK" in config:
            mixed_part(call, one, to, columns, True)
            config = plan.grads_config(call.m, one.dtype)
            tiles = -(-call.m // config["BM"])
            cut = plan.column_parts(call.bh, tiles**2, columns, config["BC"])
        else:
            cut = plan.mix_parts(call.bh, -(-call.m // config["BM"]), columns, config, True)
        works.append((one, other, to, columns, config, *cut))
    step, first = sum(work[5] for work in works), 0
    partial = call.buffer(call.bh * step, call.m, call.m)
    for one, other, to, columns, config, parts, chunk in works:
        where = (call.bh, call.b, call.h, call.m, parts, chunk, step, first)
        if "K1" in config:
            padded, common = padded_mixing(call, one.dtype, True, config)
            launch(
                mix_back, common["TILES"] * parts * call.bh,
                padded, one, other, to, partial, *where, C=columns, STAGES=config["num_stages"], **common, **config
            )
        else:
            tiles = -(-call.m // config["BM"])
            launch(
                mixing_grads, tiles * tiles * parts * call.bh,
                one, other, partial, *where, C=columns, TILES=tiles, PREC=call.mix, **config
            )
        first += parts
    out = torch.empty_like(call.mixing, memory_format=torch.contiguous_format)
    groups = call.h if call.mixing.dim() == 3 else 1
    add(partial, out, groups, call.bh * step // groups, call.m * call.m, 512)
    return out
