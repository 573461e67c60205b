"""Triton form of multipole attention; weights exist one tile at a time, as in flash attention.

Degree 0 only. A tile of queries is a box of the grid. Blocks that intersect its neighbourhood are read key by key, with
two products for the scores with keys and with mean keys, and one for values. Every other block is pooled: it is read as
one key, its mean, weighted by the number of its tokens. The cost is linear in N for a fixed number of blocks. Where it
is cheaper (`plan.pools`), all keys are read one by one.

Reading order: geometry, tiles, forward, backward, plan, launch, operator. The first call imports Triton.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ....dispatch.faults import TRITON_VERSION, Fault
from ..call import MultipoleCall
from ..layout import Field
from .operator import multipole_op
from .plan import plan_of

WIDEST = 128
LARGEST = 2**22  # limit of `geometry.quotient`
HEADS = 2**16  # limit of the second axis of a launch grid
# found by `tests.ops.fused.offline.sass`: the machine code overwrites registers that a product still reads
REFUSED, REASON = "3.7", Fault("Triton 3.7 miscompiles the kernels of multipole, Triton 3.6 and 3.8 do not")


def why_not(call: MultipoleCall) -> str | None:
    """Return the reason why the Triton form does not support this call, or None."""
    q, v = call.q, call.v
    if call.degree:
        return f"the Triton form of multipole is for degree 0, not {call.degree}"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"the Triton form of multipole is for bfloat16 and float16, not {q.dtype}"
    if call.mask is not None:
        return "the Triton form of multipole has no key_padding_mask"
    if q.shape[3] != v.shape[3] or q.shape[3] % 8 or q.shape[3] > WIDEST:
        return (
            f"the Triton form of multipole needs heads of a multiple of 8 channels, at most {WIDEST}, got "
            f"{q.shape[3]} and {v.shape[3]}"
        )
    grid, blocks = call.field.layout[:2]
    if len(grid) > 3:
        return "the Triton form of multipole is for grids of up to three axes"
    if q.shape[0] * q.shape[2] >= HEADS:
        return f"the Triton form of multipole is for fewer than {HEADS} heads of a batch, got {q.shape[0] * q.shape[2]}"
    if max(q.shape[1], *(length * m for length, m in zip(grid, blocks, strict=True))) >= LARGEST:
        return f"the Triton form of multipole is for fewer than {LARGEST} tokens, and positions times blocks of an axis"
    return REASON if TRITON_VERSION.startswith(f"{REFUSED}.") else None


def evaluate(call: MultipoleCall) -> Tensor:
    """Return o [B, N, H, D]."""
    q, k, v, field, _, scale, _ = call
    group = q.shape[2] // k.shape[2]
    if group > 1:
        k, v = (t.repeat_interleave(group, dim=2) for t in (k, v))
    return multipole_op(q, k, v, *places(field), field.radius, scale)[0]


def reads_all(call: MultipoleCall) -> bool:
    """Whether no block is pooled, so that the cost is quadratic in the number of tokens."""
    return plan_of(*places(call.field), call.field.radius, call.q.shape[3]).whole


def places(field: Field) -> tuple[list[int], list[int], list[int]]:
    """Return grid and blocks with three axes, and the number of tokens before and after the grid."""
    ones = [1] * (3 - len(field.layout.grid))
    return [*ones, *field.layout.grid], [*ones, *field.layout.blocks], [field.prefix, field.suffix]
