"""Two-sided forms, o = q M with one D x Dv matrix per head, as torch.library custom operators.

`hla_kernels::two_sided` takes (q, k, v). `hla_kernels::two_sided_qkvpacked` takes qkv [B, N, 3, H, D], and its backward
writes one packed gradient. Both return o = q M (see `hla`) [B, N, H, Dv] and a float32 buffer for the backward, which
returns the gradients of the tokens and of the coefficients (empty if there are none or they are fixed). Arguments are
checked by `op.run`.

    save      return in `saved` what the backward would otherwise recompute (empty if that is cheap)
    impl      "torch" (`evaluate`, explicit backward in `gradient`) or "triton" (`fused`), chosen in `op`
    fixed     coefficients need no gradient (set in `op`), which saves computation
    mask, or cu_seqlens with max_seqlen   sequences of the call (see `sequences`)

`hla.streaming.stream` computes the same with plain autograd, for calls with a state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..dispatch.operator import in_triton, joined, parts, rooms, token_operators
from ..dispatch.recording import repeated
from ..features import feature
from ..options import Options, compute_dtype, plain_precision
from ..sequences import Sequences, counts, live_heads, to_heads, to_tokens
from . import fused
from .gradient import gradient
from .moments import operator_matrix, read_out, token_sums

SCHEMA = (  # of arguments behind the tokens
    "Tensor? coefficients, str op, str? feature_map, bool normalize, str? center, bool mean_path, float ridge, "
    'float? scale, float eps, float q_scale=1.0, str impl="torch", bool fixed=False, bool save=False, '
    "Tensor? mask=None, Tensor? cu_seqlens=None, SymInt max_seqlen=0"
)


def evaluate(
    op: str, q: Tensor, k: Tensor, v: Tensor, coefficients: Tensor | None, options: Options, mask: Tensor | None = None
) -> Tensor:
    """Return o [B, N, H, Dv] in the dtype of q for q [B, N, H, D], k [B, N, Hk, D], v [B, N, Hk, Dv]. Tokens outside
    `mask` [B, N] do not enter moments, and their outputs are 0."""
    n_key_heads, dtype = k.shape[2], compute_dtype(q.dtype)
    qh, kh, vh = (live_heads(to_heads(x, n_key_heads, dtype), mask) for x in (q, k, v))
    qh, kh = (live_heads(feature(x, options.feature_map), mask) for x in (qh, kh))
    sums = token_sums(op, qh, kh, vh, options)
    n = q.shape[1] if mask is None else counts(mask, dtype)
    matrix = operator_matrix(op, sums, n, options, coefficients)
    return to_tokens(read_out(qh, matrix, sums, n, options, mask), q.dtype)


def _options(spec: fused.Spec) -> Options:
    _, feature_map, normalize, center, mean_path, ridge, scale, eps, q_scale, _ = spec
    return Options(False, feature_map, normalize, center, mean_path, None, "cascade", ridge, scale, eps, q_scale)


def _contiguous(coefficients: Tensor | None) -> Tensor | None:
    """Return contiguous coefficients [H, 4], which the Triton forms require."""
    return coefficients if coefficients is None or coefficients.is_contiguous() else coefficients.contiguous()


def _forward(tokens: Sequence[Tensor], coefficients: Tensor | None, *arguments: Any) -> tuple[Tensor, Tensor]:
    spec, impl, (save, *rest) = _spec(arguments)
    first, seqs = tokens[0], Sequences(*rest)
    if not in_triton(impl, first):
        with plain_precision(first):
            (q, k, v), mask = seqs.padded(*parts(tokens))
            o = evaluate(spec.op, q, k, v, coefficients, _options(spec), mask)
            return seqs.packed(o, first.shape[1]), first.new_empty((0,), dtype=torch.float32)

    def work() -> tuple[Tensor, ...]:
        q, k, v = parts(tokens)
        return fused.forward(q, k, v, _contiguous(coefficients), spec, save, known)

    with torch.cuda.device_of(first):
        known, tables = _with_tables(first, spec, seqs)
        form = ("forward", spec, save, seqs.max_seqlen, *fused.plans())
        o, saved = repeated(form, (*tokens, coefficients, *tables), work)
        return o, saved


def _with_tables(first: Tensor, spec: fused.Spec, seqs: Sequences) -> tuple[Sequences, tuple[Tensor | None, ...]]:
    """Return the sequences with precomputed tables, and the tables."""
    if seqs.mask is None and seqs.cu_seqlens is None:
        return seqs, ()
    with plain_precision(first):
        known = fused.told(first, spec, seqs)
    assert known.told is not None
    return known, known.told


def _outputs(tokens: Sequence[Tensor], coefficients: Tensor | None, *arguments: Any) -> tuple[Tensor, Tensor]:
    spec, impl, (save, *seqs) = _spec(arguments)
    q, k, v = tokens if len(tokens) == 3 else tokens[0].unbind(2)
    length = fused.saved_floats(q, k, v, spec, Sequences(*seqs)) if impl == "triton" and save else 0
    return q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty((length,), dtype=torch.float32)


def _backward(
    grad: Tensor, saved: Tensor, tokens: Sequence[Tensor], coefficients: Tensor | None, *arguments: Any
) -> tuple[Tensor, ...]:
    """Return the gradients of `tokens` and of the coefficients (empty if there are none or they are fixed)."""
    spec, impl, rest = _spec(arguments)
    first, seqs = tokens[0], Sequences(*rest)
    if not in_triton(impl, first):
        with plain_precision(first):
            (dy, q, k, v), mask = seqs.padded(grad, *parts(tokens))
            dq, dk, dv, dc = gradient(spec.op, dy, q, k, v, coefficients, _options(spec), mask)
            of_tokens = [seqs.packed(x, first.shape[1]) for x in (dq, dk, dv)]
            return (*joined(of_tokens, tokens), first.new_empty((0,)) if dc is None or spec.fixed else dc)

    def work() -> tuple[Tensor, ...]:
        q, k, v = parts(tokens)
        grads, each = rooms(tokens, seqs.mask)
        dc = fused.backward(grad, q, k, v, _contiguous(coefficients), spec, each, saved, known)
        return (*grads, first.new_empty((0,)) if dc is None or spec.fixed else dc)

    with torch.cuda.device_of(first):
        known, tables = _with_tables(first, spec, seqs)
        form = ("backward", spec, seqs.max_seqlen, *fused.plans())
        return repeated(form, (*tokens, grad, saved, coefficients, *tables), work)


def _spec(arguments: tuple) -> tuple[fused.Spec, str, tuple]:
    """Return (spec, impl, the others) from the arguments of an operator behind the coefficients."""
    options, (impl, fixed), others = arguments[:9], arguments[9:11], arguments[11:]
    return fused.Spec._make((*options, fixed)), impl, others


def _coefficients_grad(tokens: Sequence[Tensor], coefficients: Tensor | None, *arguments: Any) -> Tensor:
    if coefficients is None or _spec(arguments)[0].fixed:
        return tokens[0].new_empty((0,))
    return coefficients.new_empty(coefficients.shape)


RULES = (SCHEMA, _forward, _outputs, _backward, _coefficients_grad)
two_sided, two_sided_backward = token_operators("two_sided", 3, *RULES)
two_sided_qkvpacked, two_sided_qkvpacked_backward = token_operators("two_sided_qkvpacked", 1, *RULES)
