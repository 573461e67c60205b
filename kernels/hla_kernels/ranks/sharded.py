"""Calls whose tokens are shared by the ranks of a process group. `ranks` lists what they exchange."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from ..checks import check_name
from ..features import feature
from ..hla.moments import operator_matrix, read_out, token_sums
from ..op import Call, prepare, run, run_multipole
from ..options import IMPLS, OPS, compute_dtype, plain_precision
from ..sequences import to_heads, to_tokens
from ..softmax import PREPARE
from .blocks import mix_blocks
from .collectives import ALONE, add_together, one_token
from .heads import by_heads
from .scan import scan
from .taylor import expand
from .two_sided import evaluate, in_triton

ABSENT = ("key_padding_mask", "token_mask", "cu_seqlens", "state", "return_state")  # unsupported


def sharded(op: Any, q: Tensor, k: Tensor, v: Tensor, *, group: Any, impl: str = "auto", **options: Any) -> Tensor:
    """Return o [B, N, H, Dv] of this rank's tokens for `op` over the tokens of all ranks of `group`.

    op: an operator or its name. q [B, N, H, D], k, v [B, N, Hk, .]: this rank's tokens; N may be 0 and may differ
    between ranks. Where order matters (causal, grid), ranks hold consecutive tokens in their order. options: as
    for the operator (grid: of all tokens; rotary, narrow: of this rank's tokens); coefficients and mixing are keyword
    arguments. All ranks must call this function with equal options, and all must run the backward pass. Gradients refer
    to the sum of the losses of all ranks; the gradient of a tensor option (coefficients, mixing, decay) is this rank's
    share.

    Raises ValueError like the operator, for masked and stateful calls, for causal mhla, for fewer key heads than ranks
    if heads are exchanged, and for an impl other than "auto" and "torch".
    """
    name = str(getattr(op, "__name__", op))
    check_name("operator", name, (*OPS, "mhla", "taylor2", *PREPARE))
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"group must be a process group of torch.distributed, or None for all ranks, got {group!r}.")
    check_name("impl", impl, IMPLS)
    if impl in ("reference", "triton"):
        raise ValueError(f'impl="{impl}" cannot run tokens spread over ranks; use impl="auto".')
    for absent in ABSENT:
        if options.get(absent) not in (None, False):
            raise ValueError(f"tokens spread over ranks have no {absent}: {name} must be called without it.")
    if name == "mhla":
        return mix_blocks(q, k, v, group, impl=impl, **options)
    if name == "taylor2":
        return expand(q, k, v, group, **options)
    if name in PREPARE:
        return by_heads(run_multipole, name, q, k, v, group, impl=impl, **options)
    if name == "softmax_attention" or _is_ordered(name, options):
        return by_heads(run, name, q, k, v, group, impl=impl, **options)
    call = _prepare(name, q, k, v, **options)
    with plain_precision(call.q):
        if call.options.causal:
            return scan(call, group, impl=impl, **options)
        return evaluate(call, group) if impl != "torch" and in_triton(call) else _evaluate(call, group)


def on_one_rank(op: str, q: Tensor, k: Tensor, v: Tensor, *learned: Tensor, **options: Any) -> Tensor:
    """Return o of a rank that has all tokens, by its kernels and without a process group, for the first-use check.
    learned: mixing of mhla, or coefficients."""
    if op == "mhla":
        return mix_blocks(q, k, v, ALONE, mixing=learned[0], **options)
    return evaluate(prepare(op, q, k, v, *learned, **options), ALONE)


def _is_ordered(name: str, options: dict[str, Any]) -> bool:
    """Whether the states of a causal call cannot be merged.

    A rank may begin inside a frame, and centred calls of higher order have no mergeable state.
    """
    causal, centred = options.get("causal"), options.get("center") is not None
    return causal == "frame" or bool(causal and centred and name != "linear_attention")


def _prepare(name: str, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Call:
    """Check a call; a rank without tokens, which takes part in the collectives, is checked with one token."""
    call = prepare(name, *one_token(q, k, v), **options)
    q, k, v = (x.to(checked.dtype) for x, checked in zip((q, k, v), (call.q, call.k, call.v), strict=True))
    return call._replace(q=q, k=k, v=v)


def _evaluate(call: Call, group: Any) -> Tensor:
    """Add the token sums of all ranks and read the outputs of this rank's queries."""
    dtype, n_key_heads = compute_dtype(call.q.dtype), call.k.shape[2]
    q, k, v = (to_heads(x, n_key_heads, dtype) for x in (call.q, call.k, call.v))
    q, k = feature(q, call.options.feature_map), feature(k, call.options.feature_map)
    parts = _parts(q.shape[-2])
    qs, ks, vs = (x.unflatten(-2, (parts, x.shape[-2] // parts)) for x in (q, k, v))
    own = {name: x.sum(-3) for name, x in token_sums(call.op, qs, ks, vs, call.options).items()}
    *totals, count = add_together([*own.values(), q.new_full((1,), q.shape[-2])], group)
    sums, n = dict(zip(own, totals, strict=True)), count[0]
    matrix = operator_matrix(call.op, sums, n, call.options, call.coefficients)
    return to_tokens(read_out(q, matrix, sums, n, call.options), call.q.dtype)


def _parts(n: int) -> int:
    """Return the number of equal parts whose sums are added: one product of all tokens per head leaves a GPU idle."""
    return next((p for p in range(32, 1, -1) if n % p == 0 and n // p >= 256), 1)
