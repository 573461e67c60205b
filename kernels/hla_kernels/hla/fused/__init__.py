"""Triton forms of the two-sided operators o = q M, one D x Dv matrix M per head.

Forward and backward.

    heads   one program per (batch, head), all passes in one launch           many heads of 64, 72, few tokens
    split   reduce -> combine -> middle -> apply, several programs per head   few heads, many tokens, wide heads

The kernels take features: relu and elu1 are evaluated before them, and saved for the backward in the dtype of the
tokens (`features.mapped`).

Reading order: spec (flags and widths), tiles (basic functions), loops (passes over tokens), algebra (D x D),
heads (first order; heads.summed: higher orders, centred keys; their backward runs the kernels of split), split, middle,
plan (static table; plan.paths: choice of the path), launch (`PATHS`: functions per path). Equations are in
`hla_kernels.hla`. The first call of `forward` or `backward` imports Triton; `why_not` does not.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ...dispatch.verify import Fault
from ...features import mapped
from ...sequences import WHOLE, Sequences
from . import plan
from .plan import paths
from .spec import Spec, Widths, layout, operator_dtype, summed_floats, unsupported

__all__ = ["Spec", "backward", "forward", "saved_floats", "why_not"]

# the operator of hla3 does so for tokens with a standard deviation of 4, or a ridge; bfloat16 has the range of float32
FLOAT16_RATIO = Fault("normalize=True in float16 has no Triton form: the operator of a ratio can leave its range")


def why_not(q: Tensor, k: Tensor, v: Tensor, spec: Spec, seqs: Sequences = WHOLE) -> str | None:
    """Return the reason why the Triton forms do not support this call, or None."""
    of_tokens, d = spec.of_softmax(q.shape[3])
    reason = unsupported(q, k, v, d)
    if reason is not None:
        return reason
    if spec.softmax and not (spec.of_keys() and spec.normalize):
        return Fault("features that are softmaxes have a Triton form in a ratio of linear_attention alone")
    if q.shape[1] > 2**24:
        return f"N = {q.shape[1]} is more than {2**24}: it is counted in float32"
    if q.shape[1] == 1 and spec.center is not None and not spec.of_differences:
        return "the gradient of a single centred key is zero, of which only rounding would be left beside lambda"
    if spec.normalize and q.dtype == torch.float16:
        return FLOAT16_RATIO
    reason = paths.too_wide(of_tokens, spec.widths(d, v.shape[3]), q.dtype)
    return reason if reason is None or q.dtype == torch.float32 else Fault(reason)


def saved_floats(q: Tensor, k: Tensor, v: Tensor, spec: Spec, seqs: Sequences = WHOLE) -> int | torch.SymInt:
    """Return the length of the float32 buffer that `forward` fills for `backward`: operators and states of the split
    path, operators and vectors of normalised heads, float16 factors of `heads.summed`, features.
    There is no branch on B, N and H, which may be symbolic."""
    return operator_floats(q, v, spec, seqs) + mapped.kept_floats(spec.feature_map, q, k)


def operator_floats(q: Tensor, v: Tensor, spec: Spec, seqs: Sequences) -> int | torch.SymInt:
    """Return the floats of operators and states in that buffer, a multiple of 16 bytes."""
    sizes, (batch, _, heads) = sizes_of(q, v, spec, seqs), seqs.sizes(q)
    w, own, kept = sizes[1], sizes[5], paths.saves(*sizes)
    lay, size = layout(spec, w), operator_dtype(q.dtype).itemsize
    whole: int | torch.SymInt = lay.vectors().floats(size) if spec.normalize else 0
    if paths.halved(spec, w, q.dtype, own):
        whole = sum(summed_floats(spec, w, q.dtype))
    return -(-(batch * heads * (whole + kept * (lay.floats(size) - whole))) // 4) * 4


def plans() -> tuple:
    """Return the global settings that plans depend on; equal settings give equal plans for a call."""
    return (plan.INVARIANT["on"],)


def told(first: Tensor, spec: Spec, seqs: Sequences) -> Sequences:
    """Return the sequences of tokens [.., H, D] with the tables that kernels read."""
    heads = first.shape[-2]
    if first.dtype == torch.float16:
        spec = spec.in_range(seqs.max_seqlen if seqs.mask is None else first.shape[1])
    return seqs._replace(told=seqs.tables(heads, spec.scales))


def sizes_of(
    q: Tensor, v: Tensor, spec: Spec, seqs: Sequences, features: int = 0
) -> tuple[Spec, Widths, int, int, torch.dtype, bool]:
    """Return what `plan.paths.path` depends on; features: channels of phi(q), by default of q."""
    batch, n, heads = seqs.sizes(q)
    own = seqs.mask is None and seqs.cu_seqlens is None and q.shape[2] == v.shape[2]
    return spec, spec.widths(features or q.shape[3], v.shape[3]), plan.planned(batch * heads), n, q.dtype, own


def path_of(q: Tensor, v: Tensor, spec: Spec, seqs: Sequences, save: bool = True) -> str:
    """Return the path of a call, see `plan.paths.path`."""
    return paths.path(*sizes_of(q, v, spec, seqs), save)


@functools.lru_cache(maxsize=1024)
def variant_of(spec: Spec, w: Widths, heads: int, n: int, dtype: torch.dtype, own: bool) -> tuple:
    """Return what compiled kernels depend on in addition to the form of a call, from its `sizes_of`: its paths with and
    without a backward, whether queries are cut into several parts, and of split paths, whether keys are, whether heads
    alone fill the GPU, and the precision of D x D products."""
    path = paths.path(spec, w, heads, n, dtype, own)
    parts = plan.query_parts(heads, n, 64)[0] > 1 and spec.alone(dtype)
    found = (path, paths.path(spec, w, heads, n, dtype, own, False), parts)
    if path not in ("split", "first_split"):
        return found
    full, mid = heads >= paths.PROGRAMS // 2, plan.precisions(spec, w, dtype, n, heads)["MID"]
    return (*found, plan.reduce_parts(heads, n, 64)[0] > 1, full and mid == "tf32", mid)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    coefficients: Tensor | None,
    spec: Spec,
    save: bool = False,
    seqs: Sequences = WHOLE,
) -> tuple[Tensor, Tensor]:
    """Return o [B, N, H, Dv], contiguous, from q [B, N, H, D], k, v [B, N, Hk, .], and a float32 buffer for `backward`
    (`saved_floats`; empty without `save`)."""
    from .launch import PATHS, Call

    new = torch.empty if seqs.mask is None else torch.zeros  # padded tokens are not written
    o = new((*q.shape[:3], v.shape[3]), dtype=q.dtype, device=q.device)
    saved = torch.empty(saved_floats(q, k, v, spec, seqs) if save else 0, dtype=torch.float32, device=q.device)
    kept, (fq, fk) = mapped.features(spec.feature_map, q, k, saved, spec.center)
    path = path_of(q, v, spec, seqs, save)
    PATHS[path].forward(Call(spec, fq, fk, v, coefficients, seqs, path), o, kept)
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
    """Write dq, dk, dv into `outs` (any strides with contiguous last dimension) and return d coefficients [H, 4] or
    None (no coefficients, or `Spec.fixed`). saved: the buffer of `forward`; if it is empty, its contents are
    recomputed."""
    from . import launch

    path = path_of(q, v, spec, seqs)
    if saved.numel() == 0 and saved_floats(q, k, v, spec, seqs) > 0:
        saved = forward(q, k, v, coefficients, spec, save=True, seqs=seqs)[1]
    saved, features = mapped.split(spec.feature_map, saved, q, k)
    call = launch.Call(spec, *features, v, coefficients, seqs, path)
    grad = grad if grad.stride(3) == 1 else grad.contiguous()  # an expanded gradient (y.sum().backward()) has stride 0
    keys = launch.head_grads(q, outs[1:], seqs.mask)
    dc = launch.PATHS[path].backward(call, grad, (outs[0], *keys), saved)
    launch.sum_heads(keys, outs[1:])
    mapped.gradients(spec.feature_map, q, k, outs[:2], outs[:2])
    return None if dc is None else launch.coefficients_grad(call, dc)
