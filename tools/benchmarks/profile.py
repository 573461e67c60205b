"""Device time of a step by part (attention operator, matrix products, rest), and bytes sent to GPUs.

A kernel belongs to the operator that launched it, found from the profiler's call stack in forward and backward. With
torch.compile, work fused into a matrix product counts as the product, other fused kernels as the rest.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

PARTS = ("attention", "matmul", "rest")
ATTENTION = ("scaleddotproduct", "hlakernels::")
MATMUL = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::convolution")
# the profiler numbers driver calls separately from operators, so that the two numbers may coincide
DRIVER = re.compile("cu(da)?[A-Z]")
# bytes that a GPU sends, in units of (n - 1) / n of the whole tensor, by collective
SENT = {"allreduce": 2, "allgather": 1, "reducescatter": 1, "alltoall": 1, "broadcast": 1}


def part_of(names: Iterable[str]) -> str:
    """Return the part of a kernel launched by these calls, innermost first."""
    plain = [name.lower().replace("_", "") for name in names]
    if any(word in name for name in plain for word in ATTENTION):
        return "attention"
    return "matmul" if any(name.startswith(MATMUL) for name in plain) else "rest"


def shares(step: Callable[[], Any]) -> tuple[float, dict[str, float]]:
    """Return the device time of a step in ms, and the fraction of each of PARTS."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as record:
        step()
        torch.cuda.synchronize()
    raw: Any = record.profiler
    us = times(raw.kineto_results.events())
    total = sum(us.values())
    return total / 1e3, {part: us[part] / total for part in PARTS}


def kernel_times(step: Callable[[], Any]) -> dict[str, float]:
    """Return device microseconds per step by Triton kernel, in launch order; all other kernels are "torch"."""
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        step()
        torch.cuda.synchronize()
    raw: Any = record.profiler
    us: Counter[str] = Counter()
    for work in sorted(raw.kineto_results.events(), key=lambda x: x.start_ns()):
        if work.device_type() == DeviceType.CUDA and not work.is_user_annotation():
            us[work.name() if work.name().isidentifier() else "torch"] += work.duration_ns() / 1e3
    return {name: round(value, 1) for name, value in us.items()}


def times(events: list[Any]) -> Counter[str]:
    """Return the microseconds of each of PARTS.

    events: profiler events, in which each kernel occurs once, with the number of the call that launched it; device
    spans of named regions are not kernels. The profiler's own summary counts some device time twice.
    """
    chains = _chains(events)
    us: Counter[str] = Counter()
    for work in events:
        if work.device_type() == DeviceType.CUDA and not work.is_user_annotation():
            us[part_of(chains.get(work.linked_correlation_id(), ()))] += work.duration_ns() / 1e3
    return us


def _chains(events: Iterable[Any]) -> dict[int, tuple[str, ...]]:
    """Return the name of each operator and of its callers, innermost first, by operator number."""
    host = [x for x in events if x.device_type() == DeviceType.CPU and not x.linked_correlation_id()]
    operators = [x for x in host if not DRIVER.match(x.name())]
    chains, around = dict[int, tuple[str, ...]](), defaultdict[int, list](list)
    for x in sorted(operators, key=lambda x: (x.start_ns(), -x.end_ns())):
        calls = around[x.start_thread_id()]
        while calls and calls[-1].end_ns() < x.end_ns():
            calls.pop()
        outer = chains[calls[-1].correlation_id()] if calls else ()
        chains[x.correlation_id()] = (x.name(), *outer)
        calls.append(x)
    return chains


class Traffic(TorchDispatchMode):
    """Counts the bytes that this GPU sends to n - 1 others in the collectives of a step, as in a ring."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.n, self.bytes, self.hidden = n, 0.0, False

    def __enter__(self) -> Self:
        self.all_reduce = dist.all_reduce
        self._replace(self._all_reduce)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._replace(self.all_reduce)
        super().__exit__(*error)

    def _replace(self, all_reduce: Any) -> None:
        setattr(dist, "all_reduce", all_reduce)  # noqa: B010  mypy refuses the assignment

    def _all_reduce(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.hidden:
            self.bytes += SENT["allreduce"] * (self.n - 1) / self.n * _size(x)
        return self.all_reduce(x, *args, **kwargs)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        self.hidden = func.namespace == "hla_kernels"  # the mode does not see what a custom operator calls
        out = func(*args, **(kwargs or {}))
        self.hidden = False
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func._schema.name.partition("::")[2].replace("_", "")
            times = next((times for word, times in SENT.items() if name.startswith(word)), 0)
            self.bytes += times * (self.n - 1) / self.n * max(map(_size, (*args, out)))
        return out


def _size(x: Any) -> int:
    """Return the bytes of a tensor, or of all tensors in a list; 0 for other arguments."""
    if isinstance(x, Tensor):
        return x.numel() * x.element_size()
    return sum(map(_size, x)) if isinstance(x, list | tuple) else 0
