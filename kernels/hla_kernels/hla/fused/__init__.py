"""Triton forms of the two-sided operators: o = q M with one D x Dv matrix M per head, forward and backward.

    heads   one program per (batch, head), all passes in one launch          many heads, few tokens
    split   reduce -> combine -> middle -> apply, several programs a head     few heads, many tokens, wide heads
    pairs   the same with two neighbouring heads a program                    many heads of 72 channels
    blocks  the same with one block of a matrix a program                     what fits in no program otherwise

Features of relu and elu1 are computed once, by the pass of the forward that sums them, and kept for the backward in the
dtype of the tokens (not for `polynomial` and not in float32): twice the bytes of q, instead of three evaluations. A
ratio of first order keeps nothing: each direction reads every token once (`loops.first`; queries of wide heads twice),
nor does one of higher order of 72 channels, or of 64 and more than 512 tokens (`heads.summed`).

Reading order: spec (flags and widths), tiles and maps (vocabulary), loops (passes over tokens), algebra (D x D), heads
(heads.plain: higher orders without options; heads.summed: ratios, centred keys; heads.pairs, heads.divided (a ratio),
heads.duo; heads.mixture: `polynomial` of all three), split, middle, plan (the static table), launch. Equations in
`hla_kernels.hla`. Triton is imported by the first call of `forward` or `backward`: whether a call could run is answered
without it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...sequences import WHOLE, Sequences
from . import plan
from .blocks.layout import layout as block_layout
from .plan import mixture, sums
from .plan.blocks import blocked
from .spec import DTYPES, MAX_D, MIN_D, Spec, layout, widths

__all__ = ["Spec", "backward", "forward", "saved_floats", "why_not"]


def why_not(q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> str | None:
    """The reason why the Triton forms cannot run this call, or None."""
    if q.dtype not in DTYPES:
        return f"dtype {q.dtype} is not bfloat16, float16 or float32"
    for name, d in (("D", q.shape[3]), ("Dv", v.shape[3])):
        if not MIN_D <= d <= MAX_D:
            return f"{name} = {d} is outside {MIN_D}..{MAX_D}"
    if q.shape[1] > 2**24:
        return f"N = {q.shape[1]} is more than {2**24}: it is counted in float32"
    if q.shape[1] == 1 and (spec.center is not None or spec.mean_path):
        return "one token, centred, is zero: of rank-one corrections only rounding would be left"
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.stride(3) != 1:
            return f"the last dimension of {name} is not contiguous"
    return None


def saved_floats(q: Tensor, k: Tensor, v: Tensor, spec: Spec, seqs: Sequences = WHOLE) -> int | torch.SymInt:
    """Length of the float32 buffer that `forward` fills for `backward`: operators and states of the split path, the
    operators and their vectors of normalised heads, the float16 factors of `heads.plain` and `heads.mixture`. A
    function of sizes without a branch on B, N and H, so that they may be symbols."""
    return operator_floats(q, v, spec, seqs) + kept_features(q, v, spec, seqs) * feature_floats(q, k)


def kept_features(q: Tensor, v: Tensor, spec: Spec, seqs: Sequences) -> int | torch.SymInt:
    """1 where a forward that is asked to keeps the features of q and k for the backward. No branch on B, N and H."""
    if by_blocks(q, v, spec, seqs):
        return 0
    w, (batch, n, heads), own = widths(spec, q.shape[3], v.shape[3]), seqs.sizes(q), own_keys(q, v, seqs)
    if not plan.halved(spec, w, q.dtype, own):
        return int(spec.keeps(q.dtype))
    split = plan.saves(spec, w, plan.planned(batch * heads), n, q.dtype, own)
    return int(spec.keeps(q.dtype)) * (split + (1 - split) * sums.keeps_features(w, n))


def operator_floats(q: Tensor, v: Tensor, spec: Spec, seqs: Sequences) -> int | torch.SymInt:
    """Room of operators and states in that buffer, whole 16 bytes."""
    w, (batch, n, heads) = widths(spec, q.shape[3], v.shape[3]), seqs.sizes(q)
    batch_heads = batch * heads
    if by_blocks(q, v, spec, seqs):
        return batch_heads * block_layout(spec, q.shape[3], v.shape[3]).state
    kept, lay = plan.saves(spec, w, plan.planned(batch_heads), n, q.dtype, own_keys(q, v, seqs)), layout(spec, w)
    size = spec.matrix_dtype(q.dtype).itemsize
    whole: int | torch.SymInt = lay.vectors().floats(size) if spec.normalize else 0
    if plan.halved(spec, w, q.dtype, own_keys(q, v, seqs)):
        whole = sums.kept_floats(spec, w, n, q.dtype)
    if plan.mixed(spec, w, q.dtype, own_keys(q, v, seqs)):
        whole = mixture.mixture_floats(spec, w, n)
    return -(-(batch_heads * (whole + kept * (lay.floats(size) - whole))) // 4) * 4


def plans() -> tuple:
    """What a plan depends on beside a call: while it is the same, so are the plans of the same call."""
    return plan.INVARIANT["on"], plan.tuning.STATE.edition


def told(first: Tensor, spec: Spec, seqs: Sequences) -> Sequences:
    """The sequences of tokens [.., H, D] with what a kernel needs to know of them."""
    heads, d = first.shape[-2:]
    if first.dtype == torch.float16:
        spec = spec.in_range(d, seqs.max_seqlen if seqs.mask is None else first.shape[1])
    return seqs._replace(told=seqs.tables(heads, spec.scale, spec.q_scale))


def own_keys(q: Tensor, v: Tensor, seqs: Sequences) -> bool:
    """Whether every token is real and every head has its own keys."""
    return seqs.mask is None and seqs.cu_seqlens is None and q.shape[2] == v.shape[2]


def by_blocks(q: Tensor, v: Tensor, spec: Spec, seqs: Sequences) -> bool:
    """Whether a call goes by blocks of its matrices: what fits in no program otherwise."""
    d, dv = q.shape[3], v.shape[3]
    return blocked(spec, d, dv, q.dtype) and not plan.mixed(spec, widths(spec, d, dv), q.dtype, own_keys(q, v, seqs))


def feature_floats(*tokens: Tensor) -> int | torch.SymInt:
    """Room of the features of q and of k behind them, each whole 16 bytes."""
    return sum(-(-math.prod(x.shape) * x.element_size() // 16) * 4 for x in tokens)


def features_of(buffer: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """phi(q) [B, N, H, D] and phi(k) [B, N, Hk, D] at the end of that buffer, contiguous."""
    parts = buffer[buffer.numel() - feature_floats(q, k) :].split([feature_floats(q), feature_floats(k)])
    fq, fk = (x.view(q.dtype)[: y.numel()].view(y.shape) for x, y in zip(parts, (q, k), strict=True))
    return fq, fk


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    coefficients: Tensor | None,
    spec: Spec,
    save: bool = False,
    seqs: Sequences = WHOLE,
) -> tuple[Tensor, Tensor]:
    """o [B, N, H, Dv] contiguous from q [B, N, H, D], k, v [B, N, Hk, .], and a float32 buffer for `backward`
    (`saved_floats`; empty without `save`)."""
    from .launch import Call, apply_call, head_forward_call, split_forward_call
    from .launch.blocks import block_forward_call
    from .launch.fixed import fixed_forward_call
    from .launch.mixture import mixture_forward_call
    from .launch.plain import plain_forward_call
    from .launch.ratios import ratio_forward_call
    from .launch.summed import summed_forward_call

    call = Call(spec, q, k, v, coefficients, seqs)
    new = torch.empty if seqs.mask is None else torch.zeros  # padded tokens are not written
    o = new((*q.shape[:3], v.shape[3]), dtype=q.dtype, device=q.device)
    if by_blocks(q, v, spec, seqs):
        buffer = call.buffer(saved_floats(q, k, v, spec, seqs))
        block_forward_call(call, o, buffer)
        return o, buffer if save else call.buffer(0)
    path = plan.backward_path(spec, call.w, call.planned, call.most, q.dtype, own_keys(q, v, seqs))
    split = not plan.use_heads(spec, call.w, call.planned, call.most, q.dtype, own_keys(q, v, seqs), save)
    if save:
        buffer = call.buffer(saved_floats(q, k, v, spec, seqs))
    else:
        buffer = call.buffer(operator_floats(q, v, spec, seqs) if split and path != "mixture" else 0)
    features = features_of(buffer, q, k) if save and kept_features(q, v, spec, seqs) else (None, None)
    if path == "mixture" or (not split and plan.mixed(spec, call.w, q.dtype, own_keys(q, v, seqs))):
        if spec.normalize:
            ratio_forward_call(call, o, buffer)
        else:
            fixed = spec.fixed or buffer.numel() == 0
            (fixed_forward_call if fixed else mixture_forward_call)(call, o, buffer, apply_call)
    elif split:
        split_forward_call(call, o, buffer, save, features)
    elif plan.halved(spec, call.w, q.dtype, own_keys(q, v, seqs)):
        if spec.sums:
            summed_forward_call(call, o, buffer, features)
        else:
            plain_forward_call(call, o, buffer)
    else:
        head_forward_call(call, o, buffer, features)
    return o, buffer if save else call.buffer(0)


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    coefficients: Tensor | None,
    spec: Spec,
    outs: tuple[Tensor, Tensor, Tensor],
    saved: Tensor,
    seqs: Sequences = WHOLE,
) -> Tensor | None:
    """Write dq, dk, dv into `outs` (any strides with contiguous last dimension); returns d coefficients [H, 4] or
    None (without any, or `Spec.fixed`). `saved`: the buffer of `forward`, or an empty one, then what it would hold is
    computed again."""
    from . import launch
    from .launch.blocks import block_backward_call
    from .launch.fixed import fixed_backward_call
    from .launch.mixture import mixture_backward_call
    from .launch.plain import plain_backward_call, plain_two_step_call
    from .launch.ratios import ratio_backward_call
    from .launch.summed import summed_backward_call, summed_ratio_call, summed_two_step_call

    wide = by_blocks(q, v, spec, seqs)
    if saved.numel() == 0 and (wide or spec.normalize or spec.keeps(q.dtype)):
        saved = forward(q, k, v, coefficients, spec, save=True, seqs=seqs)[1]
    if kept_features(q, v, spec, seqs):
        q, k = features_of(saved, q, k)
        saved = saved[: saved.numel() - feature_floats(q, k)]
        spec = spec.of_features()
    call = launch.Call(spec, q, k, v, coefficients, seqs)
    grad = grad if grad.stride(3) == 1 else grad.contiguous()  # an expanded gradient (y.sum().backward()) has stride 0
    full = outs
    if call.g > 1:  # per query head first, then summed over groups
        dk, dv = (call.buffer(*q.shape[:3], x.shape[3], dtype=torch.float32) for x in outs[1:])
        if seqs.mask is not None:
            dk.zero_(), dv.zero_()
        full = (outs[0], dk, dv)
    path = plan.backward_path(spec, call.w, call.planned, call.most, q.dtype, own_keys(q, v, seqs))
    more = plan.factor_floats(spec, call.w, call.most) if path.startswith("halves") else 0
    more = mixture.mixture_floats(spec, call.w, call.most) if path == "mixture" else more
    if saved.numel() == 0 and more > 0:
        saved = forward(q, k, v, coefficients, spec, save=True, seqs=seqs)[1]
    if wide:
        dc = block_backward_call(call, grad, full, saved)
    elif spec.alone(q.dtype):
        call.lay = call.lay if path == "split" else call.lay.vectors()
        launch.first_backward_call(call, grad, full, saved)
        dc = None
    elif path == "mixture" and spec.normalize:
        dc = ratio_backward_call(call, grad, full, saved)
    elif path == "mixture" and spec.fixed:
        dc = None
        fixed_backward_call(call, grad, full, saved, launch.apply_grads_call)
    elif path == "mixture":
        dc = mixture_backward_call(call, grad, full, saved, launch.apply_grads_call)
    elif path.startswith("halves") and spec.normalize and plan.cut(call.w):
        dc = None
        summed_ratio_call(call, grad, full, saved, path == "halves")
    elif path == "halves":
        dc = None
        (summed_backward_call if spec.sums else plain_backward_call)(call, grad, full, saved)
    elif path == "halves_two_step":
        dc = None
        (summed_two_step_call if spec.sums else plain_two_step_call)(call, grad, full, saved)
    elif path != "split":
        dc = call.buffer(call.b, call.h, 1, 4) if spec.learned else None
        (launch.head_backward_call if path == "heads" else launch.two_step_backward_call)(call, grad, full, dc, saved)
    else:
        filled = saved.numel() > 0
        buffer = saved if filled else call.buffer(call.bh * call.lay.floats(call.matrix_dtype.itemsize))
        dc = launch.split_backward_call(call, grad, full, buffer, filled)
    if call.g > 1:
        for x, out in zip(full[1:], outs[1:], strict=True):
            launch.group_sum(x, out, call.g)
    return None if dc is None else launch.coefficients_grad(call, dc)
