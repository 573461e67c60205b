"""Checks of a call and the choice of its implementation: reference, torch or triton."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .blockmix import call as block_call
from .blockmix import fused as block_fused
from .blockmix.frames import every_frame, mixing_of_frames
from .blockmix.operator import flat, mhla_op, mhla_packed_op
from .blockmix.reference import reference as block_reference
from .blockmix.streaming import stream as block_stream
from .checks import (
    cast_tensors,
    check_arguments,
    check_coefficients,
    check_decay,
    check_features,
    check_name,
    check_options,
    check_sequences,
    check_whole_sequences,
    is_finite,
    is_number,
    unpacked,
    warn_of_eps,
)
from .delta_rule import call as delta_call
from .delta_rule import fused as delta_fused
from .dispatch.forms import form_of, recall, remember
from .dispatch.gate import why_no_kernels
from .dispatch.operator import are_fixed, needs_backward, refuse_forward_mode
from .dispatch.trial import shared_trial, trial_of
from .dispatch.verify import Fault, fault, is_shipped, warn
from .features import feature
from .hla import fused, stages
from .hla.causal import causal, causal_op
from .hla.reference import reference as linear_reference
from .hla.streaming.checks import check_mergeable, check_state
from .hla.streaming.contents import Sizes
from .hla.streaming.state import State
from .hla.streaming.stream import stream
from .hla.two_sided import two_sided, two_sided_qkvpacked
from .options import (
    IMPLS,
    OPS,
    Options,
    canonical,
    compute_dtype,
    decay_heads,
    plain_precision,
)
from .sequences import WHOLE, Sequences, real
from .softmax import FORMS, PREPARE, MultipoleCall
from .softmax import why_not as why_not_multipole
from .softmax.adaptive.call import AdaptiveCall
from .softmax.attention import reference as softmax_reference
from .softmax.attention import sdpa
from .softmax.multipole import MultipoleCall as PlainMultipoleCall
from .softmax.taylor import call as taylor_call
from .softmax.taylor.operator import taylor2_op
from .softmax.taylor.reference import definition as taylor_definition

# arguments of a call in addition to tokens and `Options`
BESIDE = ("coefficients", "state", "return_state", "key_padding_mask", "cu_seqlens", "max_seqlen")
SLOWER = {
    "reference": "slower: it is the definition, with N x N matrices or token by token",
    "torch": "slower: it writes moments and features in float32 where the Triton form keeps tiles",
}


class Call(NamedTuple):
    """A checked call: tensors cast for autocast, options in canonical form, gamma [1, Hk, 1 or G, 1, 1] or None."""

    op: str
    q: Tensor
    k: Tensor
    v: Tensor
    coefficients: Tensor | None
    options: Options
    gamma: Tensor | None
    state: State | None
    return_state: bool | str
    sequences: Sequences


AnyCall = Call | block_call.BlockCall | taylor_call.TaylorCall | MultipoleCall | delta_call.DeltaCall


class Explanation(NamedTuple):
    """Result of `explain`: the implementation that would run, and reasons against the others.

    fixed: whether coefficients need no gradient, so that less is computed. density: fraction of exact key tiles.
    """

    impl: str
    why_not: dict[str, str]
    fixed: bool = False
    density: float | None = None


def without_form(call: AnyCall) -> str | None:
    """Return the reason of a call whose operator has no Triton form on any GPU, or None."""
    if isinstance(call, PlainMultipoleCall):
        return why_not_multipole(call)
    if isinstance(call, taylor_call.TaylorCall):
        return "taylor2 has no Triton form"
    if isinstance(call, Call) and call.op == "softmax_attention":
        return "softmax_attention uses torch's own kernels and has no Triton form"
    return None


def why_not_triton(call: AnyCall) -> str | None:
    """Return the reason why no Triton form supports this call, or None."""
    device = call.q.device
    if reason := (without_form(call) if device.type == "cuda" else None) or why_no_kernels(device):
        return reason
    assert not isinstance(call, taylor_call.TaylorCall)  # for mypy: it has a reason
    if isinstance(call, MultipoleCall):
        return why_not_multipole(call)
    if isinstance(call, delta_call.DeltaCall):
        return delta_fused.why_not(call)
    if isinstance(call, Call) and call.options.causal:
        return stages.why_not(call.q, call.v, call.options, call.return_state)
    if call.state is not None or call.return_state:
        return "these calls have no Triton form with a state"
    if isinstance(call, block_call.BlockCall):
        return block_fused.why_not(call.q, call.k, call.v, every_frame(call.options), call.rotary)
    spec = fused.Spec(call.op, *_two_sided_options(call.options))
    return fused.why_not(call.q, call.k, call.v, spec, call.sequences)


def why_not_reference(call: AnyCall) -> str | None:
    """Return the reason why the reference does not support this call, or None."""
    stateful = isinstance(call, Call | block_call.BlockCall) and (call.state is not None or call.return_state)
    return None if not stateful else "the reference is an N x N matrix and has no state"


def unverified(call: AnyCall, shared: bool = False) -> Fault | None:
    """Return the reason not to trust the Triton form of a supported call on its device, or None (`dispatch.verify`).
    shared: the kernels of tokens shared by ranks run."""
    index = call.q.device.index
    shipped = is_shipped(_family(call), index, call.q.shape[-1], call.v.shape[-1])
    if shipped or not call.q.shape[0]:  # a batch of no samples launches nothing
        return None
    form = trial_of(call)
    return fault(shared_trial(form) if shared and form else form, index)


def _family(call: AnyCall) -> str:
    """Return the family of the kernels of a call, as in `verify.SHIPPED`."""
    if isinstance(call, Call):
        return "causal" if call.options.causal else "two-sided"
    named = {delta_call.DeltaCall: "delta", block_call.BlockCall: "mhla", AdaptiveCall: "adaptive_multipole"}
    return named.get(type(call), "none")


def loses_kernels(call: AnyCall) -> bool:
    """Whether a call in 16 bits on a GPU is of an operator with a Triton form, so that torch is a surprise."""
    in_16_bits = call.q.device.type == "cuda" and call.q.dtype in (torch.bfloat16, torch.float16)
    return in_16_bits and without_form(call) is None


def choose(call: AnyCall, impl: str, shared: bool = False) -> str:
    """Return the implementation of a call, perhaps of tokens shared by ranks. Raises ValueError if an explicit `impl`
    does not support it."""
    check_name("impl", impl, IMPLS)
    if impl == "auto":
        reason = why_not_triton(call) or unverified(call, shared)
        warn(reason, loses_kernels(call))
        return "triton" if reason is None else "torch"
    reason = why_not_reference(call) if impl == "reference" else None
    if impl == "triton":
        reason = why_not_triton(call) or unverified(call)
    if reason is not None:
        raise ValueError(f'impl="{impl}" cannot run here: {reason}; use impl="auto".')
    return impl


def explain(op: str, *inputs: Tensor, impl: str = "auto", **options: Any) -> Explanation:
    """Explain which implementation `op(*inputs, **options)` would run, and why not the others, without running it
    (but for the first-use check of a Triton form on a GPU that the tests did not cover, see `dispatch.verify`).

    op: a name of OPS, "mhla", "taylor2", "multipole", "adaptive_multipole" or "delta", or the function. inputs: q, k, v
    (and coefficients for polynomial and taylor2, mixing for mhla), or one packed qkv. Raises ValueError like the call.
    """
    op = str(getattr(op, "__name__", op)).removesuffix("_qkvpacked")
    own = {"mhla": block_call, "taylor2": taylor_call, "delta": delta_call}
    others: Any = {name: call.prepare for name, call in own.items()} | PREPARE
    check_name("operator", op, (*OPS, *others))
    if inputs and isinstance(inputs[0], Tensor) and inputs[0].dim() == 5:
        inputs = (*unpacked(inputs[:1]), *inputs[1:])
    if op in others:
        check_arguments(op, inputs, options)
        return _explained(others[op](*inputs, **options), impl)
    if len(inputs) not in (3, 4):
        raise ValueError(
            f"explain needs the tensors of the call, q, k, v (and coefficients for polynomial) or one packed qkv of "
            f"rank 5, got {len(inputs)}."
        )
    return _explained(prepare(op, *inputs, **options), impl)


def _explained(call: AnyCall, impl: str) -> Explanation:
    other = None if impl == "auto" else f"impl={impl!r} was asked for"
    why_not: dict[str, Any] = {
        "reference": why_not_reference(call) or other or SLOWER["reference"],
        "torch": other or SLOWER["torch"],
        "triton": why_not_triton(call) or other or unverified(call),
    }
    if impl == "auto":  # without a warning, which `choose` gives only once
        chosen = "torch" if why_not["triton"] else "triton"
    else:
        chosen = choose(call, impl)
    del why_not[chosen]
    density = call.exact / call.field.n_key_tiles if isinstance(call, AdaptiveCall) else None
    return Explanation(chosen, why_not, isinstance(call, Call) and are_fixed(call.coefficients), density)


def prepare(
    op: str, q: Tensor, k: Tensor, v: Tensor, coefficients: Tensor | None = None, *,
    state: State | None = None, return_state: bool | str = False, decay: float | Tensor | None = None,
    key_padding_mask: Tensor | None = None, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None,
    **options: Any,
) -> Call:  # fmt: skip
    """Check a call and bring it to canonical form: autocast applied, decay 1.0 replaced by None, float options as
    floats."""
    for name in options:
        check_name("option", name, (*Options._fields, *BESIDE))
    q, k, v = cast_tensors(q, k, v)
    if is_number(decay):
        decay = float(decay) if is_finite(decay) else math.nan  # type: ignore[arg-type]
    elif decay is not None and not isinstance(decay, Tensor):
        raise ValueError(f"decay must be None, a float or a tensor [heads], got {type(decay).__name__}.")
    kept = Options(decay="tensor" if isinstance(decay, Tensor) else decay, **options)
    check_options(op, kept, return_state, q.shape[1])
    warn_of_eps(op, kept, q.shape[1], q.shape[3])
    check_features(q.shape[3], kept.feature_map)
    check_coefficients(op, coefficients, q.shape[2], q.device)
    check_decay(decay, q.shape[2], k.shape[2], compute_dtype(q.dtype))
    gamma = decay_heads(decay, q, k)
    check_sequences(q, key_padding_mask, cu_seqlens, max_seqlen)
    if key_padding_mask is not None or cu_seqlens is not None:
        stateful = state is not None or bool(return_state)
        check_whole_sequences(kept.causal, stateful, key_padding_mask is not None)
    kept = canonical(op, kept)
    if state is not None:
        if op == "softmax_attention":
            raise ValueError("softmax_attention has no state: state must be None.")
        state = check_state(state, op, kept, gamma, Sizes.of(q, k, v, gamma, kept.feature_map), q.device)
    if return_state == "mergeable":
        check_mergeable(op, kept, state)
    sequences = Sequences(key_padding_mask, cu_seqlens, max_seqlen or 0)
    return Call(op, q, k, v, coefficients, kept, gamma, state, return_state, sequences)


class TwoSided(NamedTuple):
    """Non-tensor arguments of `two_sided`: dtypes, the feature map applied to q and k before it, its options."""

    op: str
    dtypes: tuple[torch.dtype, ...]
    softmax: str | None
    options: tuple

    @classmethod
    def of(cls, call: Call, tensors: int, chosen: str) -> TwoSided:
        """Return the arguments for q, k, v or one packed tensor. Features that are softmaxes are tokens of the Triton
        form."""
        feature_map, *options = _two_sided_options(call.options)
        softmax = feature_map if chosen == "triton" and feature_map in ("softmax", "softmax_pair") else None
        dtypes = (call.q.dtype, call.k.dtype, call.v.dtype)[:tensors]
        return cls(call.op, dtypes, softmax, (feature_map if softmax is None else None, *options, chosen))


def run(
    op: str, tokens: tuple[Tensor, ...], coefficients: Tensor | None = None, impl: str = "auto", **options: Any
) -> Any:
    """Check one call, choose its implementation and run it; body of the operators of `OPS`.

    tokens: (q, k, v), or (qkv,), for which the backward of a two-sided call writes a single buffer."""
    form = form_of(op, impl, options, (*tokens, coefficients))
    known = recall(form)
    if known is not None:
        return _two_sided(known, tokens, coefficients, WHOLE)
    call = prepare(op, *unpacked(tokens), coefficients, **options)
    chosen = choose(call, impl)
    stateful = call.state is not None or call.return_state
    if op == "softmax_attention" or call.options.causal or stateful or chosen == "reference":
        with plain_precision(call.q):
            y, state = (_definition(call), None) if chosen == "reference" else _kernel(call, chosen)
        return (y, state) if call.return_state else y
    known = TwoSided.of(call, len(tokens), chosen)
    remember(form, known)
    return _two_sided(known, tokens, coefficients, call.sequences)


def _two_sided(known: TwoSided, tokens: tuple[Tensor, ...], coefficients: Tensor | None, seqs: Sequences) -> Tensor:
    op, dtypes, softmax, options = known
    refuse_forward_mode(op, *tokens, coefficients)
    save, fixed = needs_backward(*tokens, coefficients), are_fixed(coefficients)
    cast = [x.to(dtype) for x, dtype in zip(tokens, dtypes, strict=True)]
    if softmax is not None:
        q, k, v = cast if len(cast) == 3 else cast[0].unbind(2)
        cast = [*(feature(real(x, seqs.mask), softmax) for x in (q, k)), v]
    operator = two_sided if len(cast) == 3 else two_sided_qkvpacked
    return operator(*cast, coefficients, op, *options, fixed, save, *seqs[:3])[0]


def run_blocks(tokens: tuple[Tensor, ...], mixing: Tensor, impl: str = "auto", **options: Any) -> Any:
    """Check, choose and run one call of `mhla`; tokens (q, k, v), or (qkv,) whose gradient is one packed tensor."""
    call = block_call.prepare(*unpacked(tokens), mixing, **options)
    chosen = choose(call, impl)
    q, k, v, mixing, kept, mask, rotary, state, return_state = call
    if chosen == "triton" and kept.causal == "frame":
        mixing, kept = mixing_of_frames(mixing, kept.layout.grid[0]), every_frame(kept)
    with plain_precision(q):
        if chosen != "reference" and (kept.causal == "frame" or state is not None or return_state):
            y, state = block_stream(q, k, v, mixing, kept, rotary, state)
            return (y, state) if return_state else y
        if chosen == "reference":
            wide = [t.to(compute_dtype(q.dtype)) for t in (q, k, v, mixing)]
            return block_reference(wide[0], wide[1], wide[2], wide[3], kept, mask, rotary).to(q.dtype)
        refuse_forward_mode("mhla", q, k, v, mixing)
        rest = (mixing, mask, *(rotary or (None, None)), *flat(kept), chosen, needs_backward(q, k, v, mixing))
        return mhla_op(q, k, v, *rest)[0] if len(tokens) == 3 else mhla_packed_op(tokens[0].to(q.dtype), *rest)[0]


def run_taylor(tokens: tuple[Tensor, ...], coefficients: Tensor, impl: str = "auto", **options: Any) -> Tensor:
    """Check, choose and run one call of `taylor2`; tokens (q, k, v) or (qkv,)."""
    call = taylor_call.prepare(*unpacked(tokens), coefficients, **options)
    chosen = choose(call, impl)
    with plain_precision(call.q):
        if chosen == "reference":
            return taylor_definition(call)
        refuse_forward_mode("taylor2", *call[:6])
        return taylor2_op(*call)


def run_multipole(op: str, tokens: tuple[Tensor, ...], impl: str = "auto", **options: Any) -> Tensor:
    """Check, choose and run one call of `multipole` or `adaptive_multipole`; tokens (q, k, v)."""
    call = PREPARE[op](*tokens, **options)
    chosen = choose(call, impl)
    if chosen == "triton":
        refuse_forward_mode(op, *tokens)
    with plain_precision(call.q):
        return FORMS[type(call)][chosen](call)


def _two_sided_options(o: Options) -> tuple:
    return (o.feature_map, o.normalize, o.center, o.mean_path, o.ridge, o.scale, o.eps, o.q_scale)


def _kernel(call: Call, chosen: str) -> tuple[Tensor, State | None]:
    """Run a causal call, a call with a state, or softmax."""
    op, q, k, v, coefficients, o, gamma, state, return_state, sequences = call
    if o.causal and sequences.cu_seqlens is not None:  # one sequence per row of a batch
        n, ((q, k, v), _) = q.shape[1], sequences.padded(q, k, v)
        y, _ = _kernel(Call(op, q, k, v, coefficients, o, gamma, None, False, WHOLE), chosen)
        return sequences.packed(y, n), None
    if op == "softmax_attention":
        return sdpa(q, k.to(q.dtype), v.to(q.dtype), bool(o.causal), o.scale, sequences), None  # autocast keeps float64
    if not o.causal:
        return stream(op, q, k, v, coefficients, o, state)
    if chosen == "triton":
        return stages.evaluate(op, q, k, v, gamma, o, state, bool(return_state))
    if state is not None or return_state:
        return causal(op, q, k, v, o, gamma, state, return_state)
    refuse_forward_mode(op, q, k, v, gamma)
    rest = (o.feature_map, o.normalize, o.center, o.mean_path, o.decay_rule, o.ridge, o.scale, o.eps, o.frame)
    return causal_op(q, k, v, gamma, op, *rest), None


def _definition(call: Call) -> Tensor:
    """Return o [B, N, H, Dv] in the dtype of q by the reference: N x N matrices, one sequence at a time."""
    dtype = compute_dtype(call.q.dtype)
    q, k, v = (x.to(dtype) for x in (call.q, call.k, call.v))
    if call.sequences.cu_seqlens is None:
        return _whole(call, q, k, v, call.sequences.mask).to(call.q.dtype)
    lengths = call.sequences.cu_seqlens.diff().tolist()
    each = zip(*(x.split(lengths, 1) for x in (q, k, v)), strict=True)
    return torch.cat([_whole(call, qs, ks, vs, None) for qs, ks, vs in each], 1).to(call.q.dtype)


def _whole(call: Call, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    if call.op == "softmax_attention":
        return softmax_reference(q, k, v, bool(call.options.causal), call.options.scale, mask)
    gamma = None
    if call.gamma is not None:  # one per query head
        gamma = call.gamma.expand(1, k.shape[2], q.shape[2] // k.shape[2], 1, 1).flatten()
    return linear_reference(call.op, q, k, v, call.options, gamma, call.coefficients, mask)
