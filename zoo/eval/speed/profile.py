"""Where the device time of a step goes: the attention operator, the matrix products around it, the rest.

A kernel belongs to the operator that launched it, found by walking up the profiler's calls, forward and backward. With
torch.compile what is fused into a matrix product counts as the product, other fused kernels as the rest.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

PARTS = ("attention", "matmul", "rest")
ATTENTION = ("scaleddotproduct", "hlakernels::")
MATMUL = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::convolution")
# calls of the driver are numbered by themselves: one that no operator made may have the number of an operator
DRIVER = re.compile("cu(da)?[A-Z]")


def part_of(names: Iterable[str]) -> str:
    """The part of a kernel that these calls launched, innermost first."""
    plain = [name.lower().replace("_", "") for name in names]
    if any(word in name for name in plain for word in ATTENTION):
        return "attention"
    return "matmul" if any(name.startswith(MATMUL) for name in plain) else "rest"


def shares(step: Callable[[], Any]) -> tuple[float, dict[str, float]]:
    """Device time of a step in ms, and the share of each of PARTS in it."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as record:
        step()
        torch.cuda.synchronize()
    raw: Any = record.profiler
    us = times(record.events() or (), raw.kineto_results.events())
    total = sum(us.values())
    return total / 1e3, {part: us[part] / total for part in PARTS}


def times(events: Iterable[Any], raw: Iterable[Any]) -> Counter[str]:
    """Microseconds of each of PARTS. events: a profiler's calls; raw: what it recorded, where each kernel is once and
    says who launched it. The calls' own lists of kernels have some twice, and count the spans that named regions take
    on the device as kernels."""
    host = [x for x in events if x.device_type == DeviceType.CPU and not x.is_user_annotation]
    operators = {x.id: x for x in host if not DRIVER.match(x.name)}
    us: Counter[str] = Counter()
    for work in raw:
        if work.device_type() == DeviceType.CUDA and not work.is_user_annotation():
            us[part_of(_calls(operators.get(work.linked_correlation_id())))] += work.duration_ns() / 1e3
    return us


def _calls(event: Any) -> list[str]:
    names = []
    while event is not None:
        names.append(event.name)
        event = event.cpu_parent
    return names
