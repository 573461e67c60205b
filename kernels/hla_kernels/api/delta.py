"""Public operator of the delta-rule family.

The equation is in `delta_rule/__init__.py`, the members of the family in `delta_rule/rules.py`.
"""

from __future__ import annotations

from typing import Never

import torch
from torch import Tensor

from ..checks import check_unknown
from ..delta_rule import fused
from ..delta_rule.call import DeltaState, prepare
from ..delta_rule.operator import delta_op, evaluate
from ..dispatch.operator import needs_backward, refuse_forward_mode
from ..op import choose
from ..options import plain_precision


def delta(
    q: Tensor, k: Tensor, v: Tensor, *, log_f: Tensor | None = None, a: Tensor | None = None, b: Tensor | None = None,
    frame: int = 0, state: DeltaState | None = None, return_state: bool | str = False, impl: str = "auto",
    **unknown: Never,
) -> Tensor | tuple[Tensor, DeltaState]:  # fmt: skip
    """Causal linear attention with a diagonal plus low-rank state transition per token.

    S_t = (diag(exp(log_f_t)) - A_t B_t') S_{t-1} + K_t V_t', o_t = S_t' q_t. q [B, N, H, D], k [B, N, H, D] or
    [B, N, H, s, D], v likewise with Dv -> o [B, N, H, Dv] in the dtype of q, or (o, state) with return_state; tokens
    before heads.

    log_f   logarithm of the decays, at most 0: per channel [B, N, H, D], per head [B, N, H] or [H]; None is no decay.
            Values of CUDA tensors are not checked
    a, b    columns of A and B, [B, N, H, r, D], r at most 3; None for none. Without both: gated linear attention
    frame   tokens per frame, or 0: the tokens of a frame act together on the state before it, and read the state after
            it, the mean of the states that each of them alone would leave (`delta_rule.chunked`)
    state   state after the preceding tokens; return_state also returns the state after the last token, with
            "mergeable" including what `merge_delta` needs
    impl    "triton" (on CUDA devices): bfloat16 and float16, ranks up to 2, one write per token, at most 128 channels;
            no frames; decays below e^-10 count as e^-10. "torch" computes chunks of 64 tokens, or frames, "reference"
            single tokens; "auto" as in `api`

    States and sums are float32 (float64 for float64 tokens). Raises ValueError for wrong shapes, dtypes, devices, names
    and decays. Derivatives: reverse mode, once.
    """
    check_unknown(delta, unknown)
    x = prepare(q, k, v, log_f=log_f, a=a, b=b, frame=frame, state=state, return_state=return_state)
    refuse_forward_mode("delta", *x.tensors)
    with plain_precision(x.q):
        form = choose(x, impl)
        if form == "triton":
            o, last, *_ = fused.delta_walk(*x.tensors, needs_backward(*x.tensors))
        else:
            o, last = delta_op(*x) if form == "torch" else evaluate(*x, by_token=True)
        if not return_state:
            return o
        if return_state != "mergeable":
            return o, DeltaState(last)
        eye = torch.eye(x.q.shape[3], dtype=last.dtype, device=last.device).expand(*last.shape[:3], -1)
        nothing = x.v.new_zeros(()).expand(*x.v.shape[:4], x.q.shape[3])
        return o, DeltaState(last, delta_op(*x._replace(v=nothing, state=eye))[1])
