"""Custom operator `hla_kernels::causal_stages`: causal la, hla2, ahla and hla3 in Triton.

The operator "paper" is hla2 with the paper's decay rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ...dispatch.operator import custom_op, loadable
from ...dispatch.recording import repeated
from ...features import feature, feature_grad, feature_width
from ..streaming.contents import STAGES
from .plan import REST, in_tf32, walks

if TYPE_CHECKING:
    from .launch import Pass, Tokens

MOST = 2**22  # numbers of q, or of the states of its frames, in a call that is recorded


def work_dtype(x: Tensor, op: str, normalize: bool, save: bool) -> torch.dtype:
    """Return the dtype of stages between the tokens and the output: the tokens' dtype, or float32 with products in
    TF32, which has the precision of float16. Inner stages of float16 tokens leave its range; gradients of ratios of
    higher orders (save: with a backward) are small differences of large terms."""
    exact = x.dtype == torch.float16 or (normalize and save and op != "linear_attention")
    return torch.float32 if exact else x.dtype


def _features(x: Tensor, name: str | None, dtype: torch.dtype) -> Tensor:
    """Return phi(x) in `dtype`, rounded to the precision of products, which would truncate."""
    if name in (None, "identity"):
        return loadable(x.to(dtype))
    from . import rows

    if name in rows.MAPS:
        return rows.features(x, name, dtype, in_tf32(dtype))
    y = feature(x.float(), name)
    return ((y.view(torch.int32) + 0x1000) & -0x2000).view(torch.float32) if in_tf32(dtype) else y.to(dtype)


def _feature_grad(x: Tensor, grad: Tensor, name: str) -> Tensor:
    """Return the gradient of x from the gradient of phi(x)."""
    from . import rows

    if name in rows.MAPS:
        return rows.features(x, name, x.dtype, False, grad)
    return feature_grad(x.float(), feature(x.float(), name), grad.float(), name)


def _shapes(q: Tensor, k: Tensor, v: Tensor, op: str, name: str | None, normalize: bool, save: bool) -> list[tuple]:
    """Return the shapes of u, of r (of `paper`, w) and its extra channel, of the divisor and of the rounding error of
    o."""
    (b, n, h, d), dv = q.shape, v.shape[3]
    u = (b, n, h, feature_width(d, name)) if save and op in ("hla2", "hla3", "paper") else (0,)
    r = (b, n, h, dv) if save and op in ("ahla", "hla3", "paper") else (0,)
    ratio = save and normalize
    return [u, r, (b, n, h) if ratio and len(r) > 1 else (0,), *(((b, n, h), (b, n, h, dv)) if ratio else ((0,), (0,)))]


def _saved(q: Tensor, work: torch.dtype, shapes: list[tuple]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dtypes = (work, work, torch.float32, torch.float32, REST)
    u, r, extra, divisor, rest = (q.new_empty(s, dtype=t) for s, t in zip(shapes, dtypes, strict=True))
    return u, r, extra, divisor, rest


def log2_decay(gamma: Tensor | None, h: int, hk: int) -> Tensor | None:
    """Return log2 of the decay per query head, float32 [H]."""
    return None if gamma is None else gamma.float().log2().expand(1, hk, h // hk, 1, 1).reshape(h).contiguous()


class Constants(NamedTuple):
    """Tensors that torch makes for a call: log2 of the decay per query head, and the same between tokens of a segment,
    float32 [H], or None; the column of ones of a ratio, float32 [B, N, Hk], or None."""

    log2: Tensor | None
    within: Tensor | None
    ones: Tensor | None

    @classmethod
    def of(cls, q: Tensor, v: Tensor, gamma: Tensor | None, normalize: bool, frame: int) -> Constants:
        h, hk = q.shape[2], v.shape[2]
        log2 = log2_decay(gamma, h, hk)
        within = None if frame else log2  # a decay over frames acts between them alone
        if normalize and within is None:
            # without a decay, tiles that are operands are also read by threads, and Triton's pipeline could overwrite
            # them
            within = q.new_zeros(h, dtype=torch.float32)
        return cls(log2, within, v.new_ones(v.shape[:3], dtype=torch.float32) if normalize else None)


def _pass(
    q: Tensor, k: Tensor, v: Tensor, x: Constants, name: str | None, scale: float | None, frame: int,
    work: torch.dtype,
) -> tuple[Pass, tuple[Tokens, Tokens, Tokens]]:  # fmt: skip
    """Return the launches of a call, and its q, k, v after the feature map, in the dtype `work`."""
    from .launch import Pass, Tokens

    launches = Pass(q.shape[2], x.log2, x.within, 1.0 if scale is None else scale, frame)
    q, k, v = _features(q, name, work), _features(k, name, work), loadable(v.to(work))
    return launches, (Tokens(q), Tokens(k), Tokens(v, x.ones))


def _repeated(
    form: tuple, tokens: tuple[Tensor, Tensor, Tensor], others: Sequence[Tensor | None], frame: int,
    run: Callable[[], tuple[Tensor, ...]],
) -> Any:  # fmt: skip
    """Return run(), replayed from a recording if the call is small: a recording keeps all buffers of a call at once."""
    q, _, v = tokens
    numbers = max(q.numel(), q.numel() // frame * v.shape[3] if frame else 0)
    with torch.cuda.device_of(q):
        return run() if numbers > MOST else repeated(form, (*tokens, *others), run)


def _by_stage(op: str, state: Tensor, d: int, e: int) -> dict[str, Tensor]:
    """Return the tensors [B, H, D, Dz] of a state [B, H, numbers]; d: features, e: channels of values with the column
    of a ratio."""
    shapes = {name: (d, d if name == "S" else e) for name in STAGES[op]}
    parts = state.split([a * b for a, b in shapes.values()], 2)
    return {name: x.unflatten(2, shapes[name]).contiguous() for name, x in zip(shapes, parts, strict=True)}


def _flat(op: str, states: dict[str, Tensor]) -> Tensor:
    """Undo `_by_stage`."""
    return torch.cat([states[name].flatten(2) for name in STAGES[op]], 2)


def state_size(op: str, d: int, e: int) -> int:
    """Return the numbers of a state per head; d, e: see `_by_stage`."""
    return sum(d * (d if name == "S" else e) for name in STAGES[op])


@custom_op("causal_stages")
def causal_stages(
    q: Tensor, k: Tensor, v: Tensor, gamma: Tensor | None, first: Tensor | None, op: str, feature_map: str | None,
    normalize: bool, scale: float | None, frame: int, eps: float, save: bool, keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return o [B, N, H, Dv], with `keep` the state after the tokens, and with `save` what the backward needs: u, r
    with its extra channel, the divisor and the rounding error of o.

    q [B, N, H, D], k [B, N, Hk, D], v [B, N, Hk, Dv]; gamma [1, Hk or 1, G or 1, 1, 1] or None; first, the state before
    the tokens, float32 [B, H, `state_size`] or None; frame: tokens per frame, or 0; arguments are checked by `op.run`.
    """
    none, size = q.new_empty(0, dtype=torch.float32), state_size(op, *_widths(q, v, feature_map, normalize))
    work = work_dtype(q, op, normalize, save)
    if not q.shape[0]:
        last = none.new_empty(0, q.shape[2], size) if keep else none
        found = _saved(q, work, _shapes(q, k, v, op, feature_map, normalize, save))
        return q.new_empty((*q.shape[:3], v.shape[3])), last, *found
    x = Constants.of(q, v, gamma, normalize, frame)
    rest = (op, feature_map, normalize, scale, frame, eps, save, keep)
    form, run = ("causal_stages", *rest), lambda: _forward(q, k, v, x, first, *rest)
    return _repeated(form, (q, k, v), (first, *x), frame, run)


def _widths(q: Tensor, v: Tensor, feature_map: str | None, normalize: bool) -> tuple[int, int]:
    """Return the number of features, and of channels of values with the column of a ratio."""
    return feature_width(q.shape[3], feature_map), v.shape[3] + normalize


def _forward(
    q: Tensor, k: Tensor, v: Tensor, x: Constants, first: Tensor | None, op: str, feature_map: str | None,
    normalize: bool, scale: float | None, frame: int, eps: float, save: bool, keep: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return the outputs of `causal_stages`."""
    from . import compose, paper

    (d, e), none = _widths(q, v, feature_map, normalize), q.new_empty(0, dtype=torch.float32)
    work = work_dtype(q, op, normalize, save)
    saved = _saved(q, work, _shapes(q, k, v, op, feature_map, normalize, save))
    sizes = (q.shape[0] * q.shape[2], q.shape[1], d, v.shape[3])
    if walks(op, q.dtype, sizes, x.log2 is not None, normalize, frame, save):
        from .walk import walked

        phi_q, phi_k = _features(q, feature_map, work), _features(k, feature_map, work)
        y, state = walked(
            op, phi_q, phi_k, loadable(v.to(work)), x.log2, first, 1.0 if scale is None else scale, keep
        )
        return y, none if state is None else state, *saved
    p, tokens = _pass(q, k, v, x, feature_map, scale, frame, work)
    before = None if first is None else _by_stage(op, first, d, e)
    eps_of = eps if normalize else None
    if op == "paper":
        o, u, r, after = paper.forward(p, *tokens, before, keep, q.dtype)
    else:
        o, u, r, after = compose.forward(op, p, *tokens, eps_of, before, keep, q.dtype)
    last = _flat(op, after) if keep else none
    if not save:
        return o.x, last, *saved
    kept = (None if u is None else u.x, None if r is None else r.x, None if r is None else r.extra, o.extra, o.rest)
    return o.x, last, *(empty if new is None else new for new, empty in zip(kept, saved, strict=True))


@causal_stages.register_fake
def _(q, k, v, gamma, first, op, feature_map, normalize, scale, frame, eps, save, keep):
    o = q.new_empty((*q.shape[:3], v.shape[3]))
    size = state_size(op, feature_width(q.shape[3], feature_map), v.shape[3] + normalize)
    last = q.new_empty((q.shape[0], q.shape[2], size) if keep else (0,), dtype=torch.float32)
    work = work_dtype(q, op, normalize, save)
    return o, last, *_saved(q, work, _shapes(q, k, v, op, feature_map, normalize, save))


@custom_op("causal_stages_backward")
def causal_stages_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, gamma: Tensor | None, first: Tensor | None,
    last_grad: Tensor | None, saved: Sequence[Tensor], gamma_grad: bool, op: str, feature_map: str | None,
    normalize: bool, scale: float | None, frame: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return (dq, dk, dv, dgamma, dfirst); last_grad: gradient of the state after the tokens, None without one; saved:
    the outputs of the forward; dgamma is empty unless `gamma_grad`, dfirst without states."""
    if not q.shape[0]:
        none = q.new_empty((0,))
        d_gamma = torch.zeros_like(gamma) if gamma is not None and gamma_grad else none
        d_first = none if first is None else torch.zeros_like(first)
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v), d_gamma, d_first
    x = Constants.of(q, v, gamma, normalize, frame)
    rest = (op, feature_map, normalize, scale, frame)
    return _repeated(
        ("causal_stages_backward", gamma_grad, *rest), (q, k, v), (grad, first, last_grad, *saved, *x), frame,
        lambda: _backward(grad, q, k, v, gamma if gamma_grad else None, x, first, last_grad, saved, *rest),
    )  # fmt: skip


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, gamma: Tensor | None, x: Constants, first: Tensor | None,
    last_grad: Tensor | None, saved: Sequence[Tensor], op: str, feature_map: str | None, normalize: bool,
    scale: float | None, frame: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return the outputs of `causal_stages_backward`. gamma: None if it needs no gradient."""
    from . import compose, paper, rows
    from .launch import Sums, Tokens, gradient_of_decay

    none, streams = q.new_empty((0,)), first is not None or last_grad is not None
    o, last, u, r, r_extra, divisor, rest = (t if t.numel() else None for t in saved)
    dtype, group = work_dtype(q, op, normalize, True), q.shape[2] // k.shape[2]
    p, tokens = _pass(q, k, v, x, feature_map, scale, frame, dtype)
    p.sums = None if gamma is None else Sums()
    extra = None
    if o is not None and divisor is not None and rest is not None:
        grad, extra = rows.of_ratio(grad, o, rest, divisor, dtype, in_tf32(dtype))
    do = Tokens(loadable(grad.to(dtype)), extra)
    inner = None if u is None else Tokens(u), None if r is None else Tokens(r, r_extra)
    wide = torch.float32 if group > 1 else dtype
    before, after = None, None
    factor: float | Tensor = p.scale
    if streams:
        d, e = _widths(q, v, feature_map, normalize)
        zeros = q.new_zeros((q.shape[0], q.shape[2], state_size(op, d, e)), dtype=torch.float32)
        # reversed sums begin one token after the last one, end at the first, and their outputs are scaled
        factor = p.scale if p.log2 is None else p.scale * p.log2.exp2()[:, None]
        before = _by_stage(op, zeros if first is None else first, d, e)
        after = _by_stage(op, zeros if last_grad is None else last_grad / factor, d, e)
    adjoint = compose.Adjoint(before, after, normalize)
    if op == "paper":
        found = list(paper.backward(p, *tokens, *inner, do, adjoint))
    else:
        found = list(compose.backward(op, p, *tokens, *inner, do, wide, adjoint))
    d_first = _flat(op, adjoint.grads) * factor if streams else none
    if p.sums is not None and first is not None:
        p.sums.add_states(first, d_first, -1)
    if p.sums is not None and last is not None and last_grad is not None:
        p.sums.add_states(last, last_grad, q.shape[1] // (frame or 1) - 1)
    if group > 1:
        found[1:] = (t.unflatten(2, (-1, group)).sum(3) for t in found[1:])
    if feature_map not in (None, "identity"):
        for i, t in enumerate((q, k)):
            found[i] = _feature_grad(t, found[i], feature_map)
    d_gamma = none if p.sums is None or gamma is None else gradient_of_decay(p.sums, gamma, group)
    return *(t.to(q.dtype).contiguous() for t in found), d_gamma, d_first


@causal_stages_backward.register_fake
def _(grad, q, k, v, gamma, first, last_grad, saved, gamma_grad, op, feature_map, normalize, scale, frame):
    outs = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    size = state_size(op, feature_width(q.shape[3], feature_map), v.shape[3] + normalize)
    streams = first is not None or last_grad is not None
    d_first = q.new_empty((q.shape[0], q.shape[2], size), dtype=torch.float32) if streams else q.new_empty((0,))
    return (*outs, torch.empty_like(gamma) if gamma_grad else q.new_empty((0,)), d_first)


def _setup(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.options, ctx.kept = inputs[5:10], inputs[12]
    ctx.mark_non_differentiable(*output[1 if not ctx.kept else 2 :])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:5], *output)


def _gradients(ctx: Any, grad: Tensor | None, last_grad: Tensor | None, *_: None) -> tuple:
    rest = (None,) * 8
    if grad is None and last_grad is None:
        return None, None, None, None, None, *rest
    q, k, v, gamma, first, *saved = ctx.saved_tensors
    if grad is None:
        grad = torch.zeros_like(saved[0])
    gamma_grad = ctx.needs_input_grad[3]
    *grads, d_gamma, d_first = causal_stages_backward(
        grad, q, k, v, gamma, first, last_grad, saved, gamma_grad, *ctx.options
    )
    return *grads, d_gamma if gamma_grad else None, d_first if first is not None else None, *rest


causal_stages.register_autograd(_gradients, setup_context=_setup)
