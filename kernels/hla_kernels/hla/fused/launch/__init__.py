"""Kernel launches of a call, and the functions of each path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....dispatch.recording import launch
from .. import plan
from ..heads import hla_head_backward, hla_head_forward
from ..heads.summed import hla_summed_forward, hla_summed_middle
from ..loops.first import hla_divide_grads, hla_key_grads, hla_query_grads
from ..loops.parts import hla_add_parts, hla_combine
from ..middle import hla_middle, hla_middle_grads_value
from ..middle.key import hla_middle_grads_key, hla_middle_grads_pair, hla_sum_coefficients, hla_sum_groups
from ..plan import paths
from ..spec import MOMENTS, operator_dtype, padded, placed
from ..split import hla_apply, hla_apply_grads, hla_reduce_moments, hla_reduce_readout
from .call import BLOCK, Call, Kept, Outs, Pair, Saved, unfused


def head_forward_call(call: Call, o: Tensor, saved: Tensor) -> None:
    """Compute o of first order from q, k, v in one launch; fill `saved` with operators and vectors (normalised, unless
    it is empty)."""
    spec = call.spec
    save = saved.numel() > 0 and spec.normalize
    to = Saved.of(saved, call) if save else Saved(None, None)
    config = plan.head_config("forward", spec, call.w, call.q.dtype)
    numbers = (call.g, call.scale, spec.eps)
    call.over_tokens(hla_head_forward, 1, (*call.tokens, o), to, numbers, SAVE=save, **call.pick("NORM"), **config)


def head_backward_call(call: Call, g: Tensor, outs: Outs, saved: Tensor) -> None:
    """Compute dq, dk, dv (per query head) of first order in one launch."""
    at, a = placed(*call.tokens, g, *outs)
    launch(
        hla_head_backward, call.bh,
        *call.tokens, g, *outs, *at, call.n, call.h, call.g, call.scale, ALIGN=a, **call.w._asdict(),
        PREC=call.prec["PREC"], **plan.head_config("backward", call.spec, call.w, g.dtype),
    )  # fmt: skip


def split_forward_call(call: Call, o: Tensor, buffer: Tensor) -> None:
    """Launch reduce -> combine (for several parts) -> middle -> apply; store the moments unless `buffer` is empty."""
    saved = Saved.of(buffer if buffer.numel() > 0 else room_of(call), call)
    partial, parts = reduce_call(call, saved.state, True)
    if parts > 1:
        combine_call(call, partial, parts, saved.state)
    middle_call(call, saved, parts == 1 and plan.reduce_roles(call.spec, call.w, call.q.dtype) == 1)
    apply_call(call, o, saved)


def reduce_call(call: Call, out: Tensor | None, final: bool) -> tuple[Tensor | None, int]:
    """Compute the sums of parts of heads. Return the parts and their number; a single part is `out`, scaled and centred
    if `final`."""
    spec, dtype = call.spec, call.q.dtype
    config, roles = plan.reduce_config(spec, call.w, dtype), plan.reduce_roles(spec, call.w, dtype)
    parts, chunk = plan.reduce_parts(call.planned, call.most, config["BN"])
    partial = out if parts == 1 else call.buffer(parts, call.bh, call.lay.K)
    call.over_tokens(
        hla_reduce_moments, parts * roles, call.tokens, (partial,), (call.g, parts, chunk, call.bh, call.scale,
        spec.ridge), FINAL=final and parts == 1, ROLES=roles, **call.flags, **config, **unfused(call),
    )  # fmt: skip
    return partial, parts


def combine_call(call: Call, partial: Tensor | None, parts: int, state: Tensor | None) -> None:
    """Add the parts of the moments; scale and centre them."""
    lay, spec = call.lay, call.spec
    blocks = -(-max(lay.fd * max(lay.fd, lay.dv), 2 * lay.fd + lay.dv) // BLOCK)
    launch(
        hla_combine, call.bh * blocks,
        partial, state, parts, call.bh, call.scale, call.n, spec.ridge, SUMS=spec.sums, L=lay,
        BLOCKS=blocks, BLOCK=BLOCK, ONES=spec.normalize or spec.mean_path,
        **call.pick("ORDER", "CENTER", "RIDGE"),
    )  # fmt: skip


def middle_call(call: Call, saved: Saved, anchored: bool) -> None:
    """Compute the operator from the moments; anchored: `reduce_call` computed the anchor."""
    sizes = call.middle_sizes("middle")
    launch(
        hla_middle, call.bh * -(-call.lay.fd // sizes["BR"]),
        saved.state, saved.matrix, call.coefficients, call.n, call.h, call.scale, **call.pick("ORDER", "NORM"),
        ANCHORED=anchored, **unfused(call), **sizes,
    )  # fmt: skip


def add_parts_call(call: Call, partial: Tensor | None, parts: int, out: Tensor) -> None:
    """Compute out [B * H, length], the sum of the parts; one part is there already."""
    if parts > 1:
        length = out.shape[1]
        blocks = -(-length // BLOCK)
        sizes = {"LEN": length, "K": length, "BLOCKS": blocks, "BLOCK": BLOCK}
        launch(hla_add_parts, call.bh * blocks, partial, out, parts, call.bh, **sizes)


def room_of(call: Call) -> Tensor:
    """Allocate operators and states of every head."""
    return call.buffer(call.bh * call.lay.floats(operator_dtype(call.q.dtype).itemsize))


def apply_call(call: Call, o: Tensor, saved: Saved) -> None:
    """Compute o from the operators in one launch."""
    config, flags = plan.apply_config("forward", call.spec, call.w, call.q.dtype), call.pick("NORM", "CENTER", "MEAN")
    call.write_tokens(hla_apply, config, (call.q, o), saved, behind=(call.spec.eps,), **flags)


def readout_grad(call: Call, g: Tensor, saved: Saved, ratio: Tensor | None) -> Tensor:
    """Return dM, dm1 and sum g of every head [B * H, KG]; fill `ratio`."""
    spec, twice = call.spec, plan.divides(call.spec, call.w, call.q.dtype)
    if ratio is not None and twice:
        divide(call, g, saved, ratio, None)
    config = plan.readout_config(spec, call.w, call.q.dtype)
    parts = plan.reduce_parts(call.planned, call.most, config["BN"])
    return sum_queries(
        call, hla_reduce_readout, (call.q, g), (*saved, ratio), call.lay.KG, parts, TURNED=call.turned, DIVIDED=twice,
        SUMS=spec.mean_path or spec.center == "qk", **call.pick("ORDER", "NORM"), **config,
    )  # fmt: skip


def sum_queries(
    call: Call, kernel: Any, tokens: tuple[Tensor, ...], pointers: tuple, length: int, cut: tuple[int, int],
    **options: Any,
) -> Tensor:  # fmt: skip
    """Return sums over the queries of every head [B * H, length] from a pass in `cut` = (parts, tokens per part)."""
    grads, parts = call.buffer(call.bh, length), cut[0]
    partial = grads if parts == 1 else call.buffer(parts, call.bh, length)
    call.over_tokens(kernel, parts, tokens, (*pointers, partial), (*cut, call.bh, call.spec.eps), **options)
    add_parts_call(call, partial, parts, grads)
    return grads


def middle_grads(call: Call, grads: Tensor, saved: Saved) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return weights [B * H, KW], rows [B * H, 2 F + V] and parts [B, H, blocks, 4] of d coefficients."""
    lay, sizes = call.lay, call.middle_sizes("middle_grads")
    learned = call.spec.op == "polynomial" and not call.spec.fixed
    weights = call.buffer(call.bh, lay.KW, dtype=operator_dtype(call.q.dtype))
    rows = call.buffer(call.bh, 2 * lay.fd + lay.dv)
    common = {**sizes, "TURNED": call.turned}
    scalars = (call.n, call.h, call.scale)
    blocks = -(-lay.dv // sizes["BR"])
    launch(
        hla_middle_grads_value, call.bh * blocks,
        saved.state, grads, weights, rows, call.coefficients, *scalars,
        **call.pick("ORDER", "NORM", "CENTER", "MEAN"), **common,
    )  # fmt: skip
    blocks = -(-lay.fd // sizes["BR"])
    dc = call.buffer(call.b, call.h, blocks, 4) if learned else None
    common |= call.pick("ORDER", "NORM", "CENTER")
    cross = call.buffer(call.bh, lay.fd, lay.fd) if "W" in MOMENTS[call.spec.op] else None
    if call.spec.op != "linear_attention" or call.spec.sums:
        # fused multiply-adds would round differently in the threads that share a sum and all write it
        launch(
            hla_middle_grads_key, call.bh * blocks,
            saved.state, grads, weights, rows, call.coefficients, dc, saved.matrix, cross, *scalars,
            **common | plan.middle_widths(call.spec, call.w, sizes["MID"])._asdict(),
            HALF=call.q.dtype == torch.float16,
            enable_fp_fusion=call.coefficients is not None,
        )  # fmt: skip
    if cross is not None:
        launch(
            hla_middle_grads_pair, call.bh * blocks * 2,
            saved.state, grads, weights, call.coefficients, dc, cross, *scalars, **common,
        )  # fmt: skip
    return weights, rows, dc


def split_backward_call(call: Call, g: Tensor, outs: Outs, buffer: Tensor) -> Tensor | None:
    """Launch reduce dM -> middle -> apply; return parts of d coefficients."""
    saved, ratio = Saved.of(buffer, call), call.ratio()
    weights, rows, dc = middle_grads(call, readout_grad(call, g, saved, ratio), saved)
    apply_grads_call(call, g, outs, saved, ratio, weights, rows)
    return dc


def apply_grads_call(call: Call, g: Tensor, outs: Outs, saved: Saved, *weights: Tensor | None) -> None:
    """Compute dq, dk, dv from the ratio, the weights and the rows of every head in one launch."""
    config = plan.apply_config("backward", call.spec, call.w, call.q.dtype, call.g > 1)
    call.write_tokens(
        hla_apply_grads, config, (*call.tokens, g, *outs), (*saved, *weights), (call.g,),
        long=paths.cut(call.w) and call.spec.op == "polynomial", ROWS_DONE=call.summed,
        **call.pick("ORDER", "NORM", "CENTER", "MEAN"),
    )  # fmt: skip


def divide(call: Call, g: Tensor, saved: Saved, ratio: Tensor, dq: Tensor | None) -> None:
    """Fill `ratio`, and dq of first order, in a separate launch."""
    rows, given, halves = (call.q, g, dq), (*saved, ratio), plan.in_halves(call.w.F)
    call.write_tokens(hla_divide_grads, plan.DIVIDE, rows, given, behind=(call.spec.eps,), F=halves)


def first_backward_call(call: Call, g: Tensor, outs: Outs, buffer: Tensor) -> None:
    """Run `loops.first` in two launches and a sum over parts of heads."""
    saved = Saved.of(buffer, call)
    first_key_call(call, outs, saved, first_query_call(call, g, outs[0], saved))


def first_query_call(call: Call, g: Tensor, dq: Tensor, saved: Saved) -> Tensor:
    """Compute dq of a ratio of first order; return dM' and dm1 of every head [B * H, V * F + F]."""
    ratio = call.ratio() if plan.divides(call.spec, call.w, call.q.dtype) else None
    if ratio is not None:
        divide(call, g, saved, ratio, dq)
    config, length = plan.query_config(call.w), call.lay.fd * call.lay.dv + call.lay.fd
    parts = plan.query_parts(call.planned, call.most, config["BN"])
    return sum_queries(call, hla_query_grads, (call.q, g, dq), (*saved, ratio), length, parts, **config)


def first_key_call(call: Call, outs: Outs, saved: Saved, grads: Tensor) -> None:
    """Compute dk and dv of a ratio of first order."""
    rows, given = (*call.tokens[1:], *outs[1:]), (saved.state, grads)
    call.write_tokens(hla_key_grads, plan.key_config(call.w), rows, given, (call.g,), (call.scale,))


def coefficients_grad(call: Call, parts: Tensor) -> Tensor:
    """Return d coefficients [H, 4], the sum of parts [B, H, blocks, 4]."""
    assert call.coefficients is not None
    out = torch.empty_like(call.coefficients, memory_format=torch.contiguous_format)
    launch(hla_sum_coefficients, call.h, parts, out, call.b, call.h, parts.numel() // (call.bh * 4), WIDTH=128)
    return out


def head_grads(q: Tensor, keys: Pair, mask: Tensor | None) -> Pair:
    """Return dk and dv [B, N, Hk, W], or where query heads share keys, float32 buffers for them per query head; padded
    tokens are not written."""
    if q.shape[2] == keys[0].shape[2]:
        return keys
    new = torch.empty if mask is None else torch.zeros
    dk, dv = (new((*q.shape[:3], x.shape[3]), dtype=torch.float32, device=q.device) for x in keys)
    return dk, dv


def sum_heads(grads: Pair, keys: Pair) -> None:
    """Add buffers of `head_grads` over each group of query heads; all are contiguous."""
    for x, out in zip(grads, keys, strict=True):
        if x is not out:
            width, block, rows = out.shape[3], 32, out.numel() // out.shape[3]
            group = x.shape[2] // out.shape[2]
            launch(hla_sum_groups, -(-rows // block), x, out, rows, group, W=width, WP=padded(width), BLOCK=block)


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
        hla_summed_forward, call.bh, *call.tokens, o, *kept, *at, call.n, call.h, call.scale, call.spec.eps, ALIGN=a,
        SAVE=save, PREC=call.prec["PREC"], **summed_widths(call), **plan.summed_config(call.spec, call.w),
    )  # fmt: skip


def summed_backward_call(call: Call, g: Tensor, outs: Outs, saved: Tensor) -> None:
    """Compute the sums over queries, the weights by one program per head, then the gradients of tokens."""
    kept = Kept.of(saved, call)
    of, ratio = Saved(kept.vectors, kept.matrix), call.ratio()
    grads = readout_grad(call, g, of, ratio)
    weights = call.buffer(call.bh, call.lay.KW, dtype=operator_dtype(call.q.dtype))
    rows = call.buffer(call.bh, 3 * call.lay.fd)
    room = call.buffer(call.bh, 3, call.w.F.padded**2, dtype=torch.float16)
    launch(
        hla_summed_middle, call.bh, kept.vectors, kept.factors, kept.units, grads, room, weights, rows, call.n,
        call.scale, **summed_widths(call), **plan.SUMMED_MIDDLE,
    )  # fmt: skip
    apply_grads_call(call, g, outs, of, ratio, weights, rows)


class Path(NamedTuple):
    """Functions of a path. forward(call, o, saved) writes o and fills `saved` unless it is empty. backward(call, g,
    outs, saved) writes dq, dk, dv (per query head) and returns parts [B, H, ., 4] of d coefficients if learned."""

    forward: Callable[[Call, Tensor, Tensor], None]
    backward: Callable[[Call, Tensor, Outs, Tensor], Tensor | None]


# for each path of `plan.paths.path`
PATHS = {
    "heads": Path(head_forward_call, head_backward_call),
    "first": Path(head_forward_call, first_backward_call),
    "summed": Path(summed_forward_call, summed_backward_call),
    "split": Path(split_forward_call, split_backward_call),
    "first_split": Path(split_forward_call, first_backward_call),
}
