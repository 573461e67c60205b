"""Differentiable collectives, and stages of kernels between them.

Every rank calls collectives in the same order, forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..dispatch.recording import repeated
from ..hla.fused import plans

ALONE = "no group"  # in place of a process group and its name: one rank, which the first-use check runs


class _AddRanks(torch.autograd.Function):
    """Sum of a tensor over the ranks. All ranks use the result, so its gradient is summed over the ranks too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        total = x.clone(memory_format=torch.contiguous_format)  # NCCL refuses others
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Exchange(torch.autograd.Function):
    """Pieces of a flat tensor sent to each rank; the result holds the pieces received, in the order of the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
        ctx.sizes, ctx.group = (sent, received), group
        return _all_to_all(x, sent, received, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        sent, received = ctx.sizes
        return _all_to_all(grad, received, sent, ctx.group), None, None, None


def _all_to_all(x: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
    out = x.new_empty(sum(received))
    dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
    return out


def add_ranks(x: Tensor, group: Any) -> Tensor:
    """Return the sum of x [...] over the ranks of `group`, on all ranks. Its gradient is summed over them too."""
    return _AddRanks.apply(x, group)


def add_together(tensors: list[Tensor], group: Any) -> list[Tensor]:
    """Return the sums of tensors of one dtype over the ranks, in one all-reduce."""
    flat = add_ranks(torch.cat([x.flatten() for x in tensors]), group)
    parts = flat.split([x.numel() for x in tensors])
    return [part.view(x.shape) for part, x in zip(parts, tensors, strict=True)]


def add_tokens(x: Tensor, group: Any) -> tuple[Tensor, Tensor]:
    """Return the sum of x [B, N, ...] over the tokens of all ranks, [B, 1, ...], and their number."""
    total, count = add_together([x.sum(1, keepdim=True), x.new_full((1,), x.shape[1])], group)
    return total, count[0]


def add_in_place(x: Tensor, group: Any) -> None:
    """Add a tensor over the ranks of `group`, without a gradient."""
    if group != ALONE:
        dist.all_reduce(x, group=group)


def rank_in(group: Any) -> tuple[int, int]:
    """Return the rank of this process in `group`, and the number of ranks."""
    return (0, 1) if group == ALONE else (dist.get_rank(group), dist.get_world_size(group))


def gather_ranks(x: Tensor, group: Any) -> Tensor:
    """Return x [...] of every rank, stacked in the order of the ranks; differentiable, of equal shape on all ranks."""
    before, ranks = dist.get_rank(group), dist.get_world_size(group)
    return add_ranks(
        torch.cat([x.new_zeros(before, *x.shape), x[None], x.new_zeros(ranks - 1 - before, *x.shape)]), group
    )


def exchange(pieces: list[Tensor], received: list[int], group: Any) -> list[Tensor]:
    """Send one flat piece to each rank; return the flat pieces from each rank, of the sizes `received`."""
    flat = _Exchange.apply(torch.cat(pieces), [len(x) for x in pieces], received, group)
    return list(flat.split(received))


def token_counts(n: int, group: Any, device: torch.device) -> Tensor:
    """Return the number of tokens of each rank, int64 [ranks], without waiting for it."""
    rank, ranks = rank_in(group)
    counts = torch.zeros(ranks, dtype=torch.int64, device=device)
    counts[rank : rank + 1].fill_(n)  # an assignment would copy from the host, and wait for the device
    add_in_place(counts, group)
    return counts


def one_token(*tokens: Tensor) -> tuple[Tensor, ...]:
    """Return tokens [B, N, ...] for the checks of a call: one zero token instead of none."""
    empty = all(isinstance(x, Tensor) and x.dim() == 4 and x.shape[1] == 0 for x in tokens)
    return tuple(x.new_zeros(x.shape[0], 1, *x.shape[2:]) for x in tokens) if empty else tokens


def name_of(group: Any) -> str:
    """Return the name of a process group (None: of all ranks), which a custom operator can have as an argument."""
    whole: Any = dist.group
    return group if group == ALONE else (whole.WORLD if group is None else group).group_name


def group_named(name: str) -> Any:
    """Return the process group with a name."""
    known: Any = dist.distributed_c10d
    return name if name == ALONE else known._resolve_process_group(name)


def stage(name: str, call: tuple, work: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> tuple[Tensor, ...]:
    """Return work(*inputs), a stage of a call between collectives, recorded and replayed. call: all that `work` depends
    on, tensors and constants."""
    tensors = [x for x in call if isinstance(x, Tensor)]
    form = (name, *(None if isinstance(x, Tensor) else x for x in call), *plans())
    return repeated(form, (*tensors, *inputs), lambda: work(*inputs))
