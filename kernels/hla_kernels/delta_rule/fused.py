"""Triton form of the delta rule for ranks 0 to 2 and one write per token, forward and backward.

The adjoint of the recurrence is a recurrence in reversed time: with P_t the gradient of S_t by later tokens,

    G_t = P_t + q_t do_t'     dv_t = G_t' k_t     y_t = G_t' A_t     P_{t-1} = D_t G_t - B_t y_t'

so that the same kernels (`delta_rule_walk`) serve both. What remains is one kernel of the gradients of q, k, a, b and
log_f.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..dispatch.operator import like, saved_op
from ..dispatch.recording import launch
from .call import DeltaCall

CHUNK = 16  # tokens
SEGMENT = 512 * CHUNK  # tokens whose states of chunks are in memory at a time, if no backward needs them
LEAST = -10.0  # smallest log_f: stronger decays leave less than the rounding error of 16 bits
WIDEST = 128
# by rank: warps, channels and channels of values per tile, stages of the loop over chunks; the fastest on an H200
SOLVE = {1: (1, 16, 16), 2: (2, 32, 32)}
WALK = {0: (1, 32, 32, 2), 1: (2, 32, 32, 2), 2: (2, 32, 32, 2)}
READ = {0: (1, 16, 64), 1: (1, 16, 64), 2: (2, 16, 64)}
GRADIENTS = {0: (1, 32, 32), 1: (1, 16, 32), 2: (2, 16, 32)}


def why_not(x: DeltaCall) -> str | None:
    """Return the reason why there is no Triton form of a call on an NVIDIA GPU, or None."""
    form, (d, dv) = "the Triton form of delta", (x.q.shape[3], x.v.shape[4])
    if x.frame:
        return f"{form} has no frames"
    if x.q.dtype not in (torch.bfloat16, torch.float16):
        return f"{form} is for bfloat16 and float16, not {x.q.dtype}"
    if x.a.shape[3] > 2 or x.k.shape[3] > 1:
        return f"{form} has ranks up to 2 and one write per token, got {x.a.shape[3]} and {x.k.shape[3]}"
    return f"{form} is for heads of at most {WIDEST} channels, got {d} and {dv}" if max(d, dv) > WIDEST else None


def _run(tokens: tuple[Tensor, ...], state: Tensor, reverse: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return o [B, N, H, Dv], the last state, what tokens read [B, N, H, r, Dv] and the states of chunks
    [B, H, chunks, D, Dv], of contiguous tensors: q, k, v, log_f, a and b, of which k and v have no axis of writes."""
    from .walk import delta_rule_read, delta_rule_solve, delta_rule_walk

    q, k, v, log_f, a, b = tokens
    o, last, z, states = _empty(q, v, a)
    if not q.shape[0]:
        return o, last, z, states
    (n_batch, n, h, d), dv, r = q.shape, v.shape[3], a.shape[3]
    with torch.cuda.device_of(q):
        w, u = (q.new_empty((n_batch, n, h, r, x), dtype=torch.float32) for x in (d, dv))
        grid = (n_batch * h, states.shape[2])
        if r:
            sizes = _sizes(d, dv, r, log_f, *SOLVE[r])
            launch(delta_rule_solve, grid, k, v, log_f, a, b, w, u, n, h, **sizes, REVERSE=reverse)
        sizes = _sizes(d, dv, r, log_f, *WALK[r])
        given = (k, v, log_f, a, w, u, state, states, z, last)
        launch(delta_rule_walk, (grid[0], -(-dv // sizes["BV"])), *given, n, h, **sizes, REVERSE=reverse)
        sizes = _sizes(d, dv, r, log_f, *READ[r])
        blocks = -(-dv // sizes["BV"])
        launch(delta_rule_read, (*grid, blocks), q, k, v, log_f, a, z, states, o, n, h, **sizes, REVERSE=reverse)
    return o, last, z, states


def _sizes(d: int, dv: int, r: int, log_f: Tensor, warps: int, bd: int, bv: int, stages: int = 1) -> dict[str, Any]:
    """Return what kernels are compiled for; tiles are no wider than heads."""
    from triton import next_power_of_2

    bd, bv = (min(tile, max(16, next_power_of_2(x))) for tile, x in ((bd, d), (bv, dv)))
    return {
        "D": d, "DV": dv, "BD": bd, "BV": bv, "FD": log_f.shape[3], "R": r, "RP": max(1, r), "C": CHUNK, "LEAST": LEAST,
        "num_warps": warps, "num_stages": stages,
    }  # fmt: skip


def _empty(q: Tensor, v: Tensor, a: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (n_batch, n, h, d), dv = q.shape, v.shape[-1]
    shapes = ((n_batch, h, d, dv), (n_batch, n, h, a.shape[3], dv), (n_batch, h, -(-n // CHUNK), d, dv))
    last, z, states = (q.new_empty(x, dtype=torch.float32) for x in shapes)
    return q.new_empty((n_batch, n, h, dv)), last, z, states


def _nothing(q: Tensor) -> tuple[Tensor, Tensor]:
    """Return two tensors without elements; outputs of an operator must not share memory."""
    return q.new_empty(0, dtype=torch.float32), q.new_empty(0, dtype=torch.float32)


def _contiguous(q: Tensor, k: Tensor, v: Tensor, log_f: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.contiguous() for x in (q, k[:, :, :, 0], v[:, :, :, 0], log_f.float(), a, b))


def _forward(
    q: Tensor, k: Tensor, v: Tensor, log_f: Tensor, a: Tensor, b: Tensor, state: Tensor, save: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return o [B, N, H, Dv], the last state [B, H, D, Dv], and with `save` what the backward needs. Arguments as in
    `delta_op`, checked."""
    last, tokens = state.float().contiguous(), (q, k, v, log_f, a, b)
    if save:
        return _run(_contiguous(*tokens), last, False)
    outs = []
    for start in range(0, max(1, q.shape[1]), SEGMENT):
        part = _contiguous(*(x[:, start : start + SEGMENT] for x in tokens))
        o, last, *_ = _run(part, last, False)
        outs.append(o)
    return outs[0] if len(outs) == 1 else torch.cat(outs, 1), last, *_nothing(q)


def _outputs(q: Tensor, k: Tensor, v: Tensor, log_f: Tensor, a: Tensor, b: Tensor, state: Tensor, save: bool) -> tuple:
    found = _empty(q, v, a)
    return found if save else (*found[:2], *_nothing(q))


def _backward(
    grads: list[Tensor], saved: list[Tensor], q: Tensor, k: Tensor, v: Tensor, log_f: Tensor, a: Tensor, b: Tensor,
    state: Tensor, save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of the inputs of `delta_walk`, in their order."""
    from .gradients import delta_rule_gradients

    (grad, grad_state), (z, states) = grads, saved
    dq, dk, da, db = like(q, k, a, b)
    q1, k1, v1, f1, a1, b1 = _contiguous(q, k, v, log_f, a, b)
    grad = grad.contiguous()
    dv, d_state, y, ends = _run((k1, q1, grad, f1, b1, a1), grad_state.float().contiguous(), True)
    sizes = _sizes(q.shape[3], v.shape[4], a.shape[3], f1, *GRADIENTS[a.shape[3]])
    tiles = -(-q.shape[3] // sizes["BD"])
    df = q.new_empty((*q.shape[:3], tiles if f1.shape[3] == 1 else q.shape[3]), dtype=torch.float32)
    if q.shape[0]:
        given = (states, ends, q1, k1, v1, f1, a1, b1, z, y, grad, dq, dk, da, db, df)
        grid, (n, h) = (q.shape[0] * q.shape[2], states.shape[2], tiles), q.shape[1:3]
        with torch.cuda.device_of(q):
            launch(delta_rule_gradients, grid, *given, n, h, **sizes)
    df = (df.sum(3, keepdim=True) if f1.shape[3] == 1 else df).to(log_f.dtype)
    return dq, dk, dv.unsqueeze(3), df, da, db, d_state.to(state.dtype)


delta_walk, delta_walk_backward = saved_op("delta_walk", _forward, _outputs, _backward, count=7, results=2)
