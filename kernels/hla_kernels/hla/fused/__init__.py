"""Triton forms of the two-sided operators o = q M, one D x Dv matrix M per head.

Forward and backward.

    heads   one program per (batch, head), all passes in one launch          many heads, few tokens
    split   reduce -> combine -> middle -> apply, several programs a head     few heads, many tokens, wide heads
    pairs   the same with two neighbouring heads a program                    many heads of 72 channels
    blocks  the same with one block of a matrix a program                     what fits in no program otherwise,
            (softmaxes: of a ratio of both softmaxes, one half of the      or is faster or more exact so
            features after the other)

Features of relu and elu1 are computed once, by the pass of the forward that sums them, and kept for the backward in the
dtype of the tokens (not for `polynomial` and not in float32): twice the bytes of q, instead of three evaluations. A
ratio of first order keeps nothing: each direction reads every token once (`loops.first`; queries of wide heads twice),
nor does one of higher order of 72 channels, or of 64 and more than 512 tokens (`heads.summed`).

Reading order: spec (flags and widths), tiles and maps (vocabulary), loops (passes over tokens), algebra (D x D), heads
(heads.plain: higher orders without options; heads.summed: ratios, centred keys; heads.pairs, heads.divided (a ratio),
heads.duo; heads.mixture: `polynomial` of all three), split, middle, plan (the static table; plan.paths: which path a
call takes), launch (launch.table: the functions of each). Equations in `hla_kernels.hla`. Triton is imported by the
first call of `forward` or `backward`: whether a call could run is answered without it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...dispatch.faults import Fault
from ...sequences import WHOLE, Sequences
from . import plan
from .blocks.layout import layout as block_layout
from .plan import mixture, paths, sums
from .spec import DTYPES, MAX_D, MIN_D, Spec, layout, widths

__all__ = ["Spec", "backward", "forward", "saved_floats", "why_not"]

# that of hla3 does with tokens four times a normal distribution, or a ridge; bfloat16 has the range of float32
FLOAT16_RATIO = Fault("normalize=True in float16 has no Triton form: the operator of a ratio can leave its range")


def why_not(q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> str | None:
    """The reason why the Triton forms cannot run this call, or None."""
    if q.dtype not in DTYPES:
        return f"dtype {q.dtype} is not bfloat16, float16 or float32"
    for name, d in (("D", q.shape[3]), ("Dv", v.shape[3])):
        if not MIN_D <= d <= MAX_D:
            return f"{name} = {d} is outside {MIN_D}..{MAX_D}"
    if q.shape[1] > 2**24:
        return f"N = {q.shape[1]} is more than {2**24}: it is counted in float32"
    if q.shape[1] == 1 and spec.center is not None and not spec.of_differences:
        return "the gradient of a single centred key is zero, of which only rounding would be left beside lambda"
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.stride(3) != 1:
            return f"the last dimension of {name} is not contiguous"
    if spec.normalize and q.dtype == torch.float16:
        return FLOAT16_RATIO
    return None


def saved_floats(q: Tensor, k: Tensor, v: Tensor, spec: Spec, seqs: Sequences = WHOLE) -> int | torch.SymInt:
    """Length of the float32 buffer that `forward` fills for `backward`: operators and states of the split path, the
    operators and their vectors of normalised heads, the float16 factors of `heads.plain` and `heads.mixture`. A
    function of sizes without a branch on B, N and H, so that they may be symbols."""
    return operator_floats(q, v, spec, seqs) + kept_features(q, v, spec, seqs) * feature_floats(q, k)


def kept_features(q: Tensor, v: Tensor, spec: Spec, seqs: Sequences) -> int | torch.SymInt:
    """1 where a forward that is asked to keeps the features of q and k for the backward. No branch on B, N and H."""
    w, (batch, n, heads), own = widths(spec, q.shape[3], v.shape[3]), seqs.sizes(q), own_keys(q, v, seqs)
    if paths.in_blocks(spec, w, q.dtype, own):
        return 0
    if not paths.halved(spec, w, q.dtype, own):
        return int(spec.keeps(q.dtype))
    split = paths.saves(spec, w, plan.planned(batch * heads), n, q.dtype, own)
    return int(spec.keeps(q.dtype)) * (split + (1 - split) * sums.keeps_features(w, n))


def operator_floats(q: Tensor, v: Tensor, spec: Spec, seqs: Sequences) -> int | torch.SymInt:
    """Room of operators and states in that buffer, whole 16 bytes."""
    w, (batch, n, heads), own = widths(spec, q.shape[3], v.shape[3]), seqs.sizes(q), own_keys(q, v, seqs)
    batch_heads = batch * heads
    blocks = batch_heads * block_layout(spec, q.shape[3], v.shape[3]).state
    if paths.in_blocks(spec, w, q.dtype, own):
        return blocks
    kept, lay = paths.saves(spec, w, plan.planned(batch_heads), n, q.dtype, own), layout(spec, w)
    size = spec.matrix_dtype(q.dtype).itemsize
    whole: int | torch.SymInt = lay.vectors().floats(size) if spec.normalize else 0
    if paths.halved(spec, w, q.dtype, own):
        whole = sums.kept_floats(spec, w, n, q.dtype)
    if paths.mixed(spec, w, q.dtype, own):
        whole = mixture.mixture_floats(spec, w, n)
    floats = -(-(batch_heads * (whole + kept * (lay.floats(size) - whole))) // 4) * 4
    more = torch.sym_min(1, (n - 1) * (n - 1)) if paths.bare(spec) else 1  # 0 of one token
    return more * floats + (1 - more) * blocks


def plans() -> tuple:
    """What a plan depends on beside a call: while it is the same, so are the plans of the same call."""
    return (plan.INVARIANT["on"],)


def told(first: Tensor, spec: Spec, seqs: Sequences) -> Sequences:
    """The sequences of tokens [.., H, D] with what a kernel needs to know of them."""
    heads, d = first.shape[-2:]
    if first.dtype == torch.float16:
        spec = spec.in_range(d, seqs.max_seqlen if seqs.mask is None else first.shape[1])
    return seqs._replace(told=seqs.tables(heads, spec.scale, spec.q_scale, spec.of_differences))


def own_keys(q: Tensor, v: Tensor, seqs: Sequences) -> bool:
    """Whether every token is real and every head has its own keys."""
    return seqs.mask is None and seqs.cu_seqlens is None and q.shape[2] == v.shape[2]


def path_of(q: Tensor, v: Tensor, spec: Spec, seqs: Sequences, save: bool = True) -> str:
    """`plan.paths.path` of a call."""
    w, (batch, n, heads) = widths(spec, q.shape[3], v.shape[3]), seqs.sizes(q)
    return paths.path(spec, w, plan.planned(batch * heads), n, q.dtype, own_keys(q, v, seqs), save)


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
    from .launch import Call
    from .launch.table import PATHS

    call = Call(spec, q, k, v, coefficients, seqs)
    new = torch.empty if seqs.mask is None else torch.zeros  # padded tokens are not written
    o = new((*q.shape[:3], v.shape[3]), dtype=q.dtype, device=q.device)
    saved = call.buffer(saved_floats(q, k, v, spec, seqs) if save else 0)
    if save and kept_features(q, v, spec, seqs):
        call.features = features_of(saved, q, k)
    PATHS[path_of(q, v, spec, seqs, save)].forward(call, o, saved)
    return o, saved


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
    from .launch.table import PATHS

    path = path_of(q, v, spec, seqs)
    again = path != "split" or spec.normalize or spec.keeps(q.dtype)  # moments alone are summed by `launch.prepare`
    if saved.numel() == 0 and again and saved_floats(q, k, v, spec, seqs) > 0:
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
    dc = PATHS[path].backward(call, grad, full, saved)
    if call.g > 1:
        for x, out in zip(full[1:], outs[1:], strict=True):
            launch.group_sum(x, out, call.g)
    return None if dc is None else launch.coefficients_grad(call, dc)
