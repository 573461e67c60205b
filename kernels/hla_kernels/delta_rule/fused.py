"""Triton form of the delta rule for ranks 0 to 2 and one write per token, forward and backward.

The adjoint of the recurrence is the recurrence in reversed time: with G_t the gradient of S_t,

    G_t = (D_{t+1} - B_{t+1} A_{t+1}') G_{t+1} + q_t do_t'       dv_t = G_t' k_t      y_t = A_t' G_t

so that one kernel (`walk`) serves both. What remains are products of states with rows of values (`rows.state_rows`):

    dq_t = S_t do_t     dk_t = G_t v_t     dA_t = -G_t z_t'     dB_t = -S_{t-1} y_t'     z_t = B_t' S_{t-1}
    dlog_f_t = f_t o G_t o S_{t-1} = dlog_f_{t+1} + q_t o dq_t + B_{t+1} o dB_{t+1} - A_t o dA_t - k_t o dk_t

The first form is evaluated at the starts of chunks, where states are at hand, and the second one inside of chunks:
over all tokens its rounding errors add up to more than what is left.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..dispatch.operator import custom_op
from ..dispatch.recording import launch
from .call import DeltaCall

CHUNK = 16  # tokens
LEAST = -10.0  # smallest log_f: stronger decays leave less than the rounding error of 16 bits
BLOCK = 16  # channels of values per program
TILE = 32  # channels of q, k, a and b per tile
WIDEST = 128


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


def _walk(
    q: Tensor, k: Tensor, v: Tensor, log_f: Tensor, a: Tensor, b: Tensor, state: Tensor, dtype: torch.dtype, save: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return o [B, N, H, Dv] in `dtype`, the last state, what tokens read and the states of chunks (empty without
    `save`). k and v have no axis of writes."""
    from .walk import walk

    (n_batch, n, h, d), dv, r = q.shape, v.shape[3], a.shape[3]
    found = _empty(q, v, a, dtype, save)
    if not n_batch:
        return found
    given = [x.contiguous() for x in (q, k, v, log_f.float(), a, b, state.float())]
    with torch.cuda.device_of(q):
        launch(
            walk, (n_batch * h, -(-dv // BLOCK)), *given, *found, n, h, D=d, DV=dv,
            BD=16 if d <= 16 else TILE, BV=BLOCK, FD=log_f.shape[3], R=r, RP=max(1, r), C=CHUNK,
            LEAST=LEAST, SAVE=save, num_warps=4, num_stages=1,
        )  # fmt: skip
    return found


def _empty(
    q: Tensor, v: Tensor, a: Tensor, dtype: torch.dtype, save: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (n_batch, n, h, d), dv = q.shape, v.shape[-1]
    reads = (n_batch, n, h, a.shape[3], dv) if save else (0,)
    states = (n_batch, h, -(-n // CHUNK), d, dv) if save else (0,)
    o = q.new_empty((n_batch, n, h, dv), dtype=dtype)
    last, z, kept = (q.new_empty(x, dtype=torch.float32) for x in ((n_batch, h, d, dv), reads, states))
    return o, last, z, kept


@custom_op("delta_walk")
def delta_walk(
    q: Tensor, k: Tensor, v: Tensor, log_f: Tensor, a: Tensor, b: Tensor, state: Tensor, save: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return o [B, N, H, Dv], the last state [B, H, D, Dv], and with `save` what the backward needs. Arguments as in
    `delta_op`, checked."""
    return _walk(q, k[:, :, :, 0], v[:, :, :, 0], log_f, a, b, state, q.dtype, save)


@delta_walk.register_fake
def _(q, k, v, log_f, a, b, state, save):
    return _empty(q, v, a, q.dtype, save)


def _state_rows(
    states: Tensor, k: Tensor, v: Tensor, log_f: Tensor, a: Tensor, z: Tensor, w: Tensor, strict: bool
) -> Tensor:
    """Return S_t w_t, or S_{t-1} w_t if strict, [B, N, H, m, D] in float32, for rows w [B, N, H, m, Dv]; states at the
    starts of chunks."""
    from .rows import state_rows

    (n_batch, n, h, d), (m, dv), r = k.shape, w.shape[3:], a.shape[3]
    out = k.new_empty((n_batch, n, h, m, d), dtype=torch.float32)
    given = [x.contiguous() for x in (states, k, v, log_f.float(), a, z, w)]
    with torch.cuda.device_of(k):
        launch(
            state_rows, (n_batch * h, states.shape[2], m), *given, out, n, h, D=d, DV=dv,
            BD=16 if d <= 16 else TILE, BV=16 if dv <= 16 else TILE, FD=log_f.shape[3], R=r, RP=max(1, r), M=m, C=CHUNK,
            LEAST=LEAST, STRICT=strict, num_warps=4, num_stages=1,
        )  # fmt: skip
    return out


def _later(x: Tensor) -> Tensor:
    """Shift tokens by one in reversed time: x_{t+1} at token t, zero at the last one."""
    return torch.cat([torch.zeros_like(x[:, :1]), x.flip(1)[:, :-1]], 1)


@custom_op("delta_walk_backward")
def delta_walk_backward(
    grad: Tensor, grad_state: Tensor, q: Tensor, k: Tensor, v: Tensor, log_f: Tensor, a: Tensor, b: Tensor,
    state: Tensor, z: Tensor, states: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of the inputs of `delta_walk`, in their order."""
    n, more = q.shape[1], -q.shape[1] % CHUNK
    tokens = [F.pad(x, (*[0] * (2 * x.dim() - 3), more)) if more else x for x in (grad, q, k, v, log_f, a, b, z)]
    with torch.autocast(q.device.type, enabled=False):
        *grads, d_state = _gradients(tokens, grad_state, state, states)
    kinds = (q, k, v, log_f, a, b)
    dq, dk, dv, df, da, db = (g[:, :n].to(x.dtype).contiguous() for g, x in zip(grads, kinds, strict=True))
    return dq, dk, dv, df, da, db, d_state.to(state.dtype).contiguous()


def _gradients(tokens: list[Tensor], grad_state: Tensor, state: Tensor, states: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of q, k, v, log_f, a, b and state in float32.

    tokens: the gradient of o, q, k, v, log_f, a, b and z, of whole chunks of tokens
    """
    grad, q, k, v, log_f, a, b, z = tokens
    k1, v1 = k[:, :, :, 0], v[:, :, :, 0]
    back = (q.flip(1), grad.flip(1), _later(log_f), _later(b), _later(a))
    dv, g_first, y, g_states = _walk(k1.flip(1), *back, grad_state.float(), torch.float32, True)
    y_first = torch.einsum("bhrd,bhdv->bhrv", a[:, 0].float(), g_first)
    y = torch.cat([y[:, 1:], y_first[:, None]], 1).flip(1)  # what was read at token t belongs to t + 1
    dq = _state_rows(states, k1, v1, log_f, a, z, grad.unsqueeze(3), False)[:, :, :, 0]
    db = -_state_rows(states, k1, v1, log_f, a, z, y, True)
    rows = torch.cat([v1.unsqueeze(3).float(), -z], 3).flip(1)
    z_back = torch.cat([torch.zeros_like(y[:, :1]), y.flip(1)[:, :-1]], 1)
    found = _state_rows(g_states, back[0], back[1], back[2], back[3], z_back, rows, False).flip(1)
    dk, da = found[:, :, :, 0], found[:, :, :, 1:]
    change = q * dq - k1 * dk - (a * da).sum(3)
    change[:, :-1] += (b * db).sum(3)[:, 1:]
    first = torch.cat([g_first.unsqueeze(2), g_states.flip(2)[:, :, :-1]], 2)  # G at the first tokens of chunks
    d_first = (first * states).sum(4).transpose(1, 2) * log_f[:, ::CHUNK].float().clamp(min=LEAST).exp()
    change = change.unflatten(1, (-1, CHUNK))
    d_log = (d_first.unsqueeze(2) + change - change.cumsum(2)).flatten(1, 2)
    d_log = d_log.sum(3, keepdim=True) if log_f.shape[3] == 1 else d_log
    erased = torch.einsum("bhrd,bhrv->bhdv", b[:, 0].float(), y_first)
    d_state = log_f[:, 0].float().exp().unsqueeze(3) * g_first - erased
    return dq, dk.unsqueeze(3), dv.flip(1).unsqueeze(3), d_log, da, db, d_state


@delta_walk_backward.register_fake
def _(grad, grad_state, q, k, v, log_f, a, b, state, *saved):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, log_f, a, b, state))


def _setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.mark_non_differentiable(*output[2:])
    ctx.save_for_backward(*inputs[:7], *output[2:])


def _backward(ctx: Any, grad: Tensor, grad_state: Tensor, *_: Tensor) -> tuple:
    return (*delta_walk_backward(grad, grad_state, *ctx.saved_tensors), None)


delta_walk.register_autograd(_backward, setup_context=_setup_context)
