"""Where the device time of a step goes: the attention operator, the matrix products around it, the rest.

A kernel belongs to the operator that launched it, found by walking up the profiler's calls, forward and backward. With
torch.compile what is fused into a matrix product counts as the product, other fused kernels as the rest.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

PARTS = ("attention", "matmul", "rest")
ATTENTION = ("scaleddotproduct", "hlakernels::")
MATMUL = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::convolution")
# a call of the driver that no operator made has an id that may be an operator's too, and then torch < 2.15 gives it the
# kernels of that operator once more (pytorch issue 124388)
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
    us = times(record.events() or ())
    total = sum(us.values())
    return total / 1e3, {part: us[part] / total for part in PARTS}


def times(events: Iterable[Any]) -> Counter[str]:
    """Microseconds of the kernels of each of PARTS among the events of a profiler."""
    us: Counter[str] = Counter()
    for event in events:
        if not DRIVER.match(event.name):
            us[part_of(_calls(event))] += sum(kernel.duration for kernel in event.kernels)
    return us


def _calls(event: Any) -> list[str]:
    names = []
    while event is not None:
        names.append(event.name)
        event = event.cpu_parent
    return names
