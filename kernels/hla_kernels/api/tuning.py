"""Measured tiles of the two-sided Triton forms, on request: `set_tuning(FILE)`, then `tune` for each kind of call.

hk.set_tuning("tuned.json")                                  in every process that should use them
hk.tune("ahla", q, k, v, feature_map="elu1", normalize=True)     once: compiles for minutes and writes the file
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..checks import check_name
from ..hla.fused.plan.tuning import Tuned, file_in_use, search
from ..hla.fused.spec import ORDERS
from ..op import explain, run, run_packed


def tune(op: str, *inputs: Tensor, **options: Any) -> Tuned:
    """Time the shipped configurations of each kernel that `op(*inputs, **options)` launches, forward without
    gradients and forward with backward, and keep the fastest in the file of `set_tuning` for calls of this class: this
    device, operator, options, dtype and widths, and sizes between the same powers of two.

    inputs: q, k, v (and coefficients for polynomial) on a CUDA device, or one packed qkv (and coefficients). Raises
    ValueError without a file, for a call that has no two-sided Triton form, and as the call would.
    """
    check_name("operator to tune", op, tuple(ORDERS))
    file_in_use()
    explain(op, *inputs, impl="triton", **options)
    x: Any = [t.detach().requires_grad_() for t in inputs]

    def call() -> Tensor:
        return run_packed(op, *x, **options) if x[0].dim() == 5 else run(op, *x, **options)

    with torch.no_grad():
        grad = torch.randn_like(call())

    def work() -> list[Tensor]:
        with torch.no_grad():
            inference = call()
        y = call()
        return [inference, y.detach(), *torch.autograd.grad(y, x, grad)]

    with torch.cuda.device(x[0].device):
        return search(work)
