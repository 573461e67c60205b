"""Device time of each kernel of causal linear attention and its higher orders, forward with backward.

    python docs/causal_profile.py [json]

bfloat16 on the current CUDA device, tokens of (8, 16, 4096, 64) = (B, H, N, D), causal, with a learned decay, and over
frames of 256 tokens; writes runs/causal-profile.json.
"""

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import hla_kernels
from zoo.io import result_file, write_json

FILE = Path("runs/causal-profile.json")
ORDERS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "causal, learned decay": {"causal": True},
    "over frames of 256": {"causal": "frame", "frame": 256},
}
CALLS = 5  # profiled, after as many others


def step(operator: str, order: str) -> Callable[[], tuple[Tensor, ...]]:
    """Return a call with its backward."""
    q, k, v, grad = (torch.randn(8, 4096, 16, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    inputs, options = [x.requires_grad_() for x in (q, k, v)], dict(ORDERS[order])
    learned = [torch.full((16,), 0.99, device="cuda", requires_grad=True)] if "decay" in order else []
    if learned:
        options["decay"] = learned[0]
    return lambda: torch.autograd.grad(getattr(hla_kernels, operator)(*inputs, **options), [*inputs, *learned], grad)


def row(operator: str, order: str) -> dict[str, Any]:
    """Return microseconds and launches per call of each kernel."""
    call = step(operator, order)
    for _ in range(CALLS):
        call()
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        for _ in range(CALLS):
            call()
        torch.cuda.synchronize()
    us: Counter[str] = Counter()
    launches: Counter[str] = Counter()
    for event in record.events():
        if event.device_type == DeviceType.CUDA:
            us[event.name[:40]] += event.device_time_total / CALLS
            launches[event.name[:40]] += 1
    kernels = {name: [round(time, 1), launches[name] // CALLS] for name, time in us.most_common()}
    return {"operator": operator, "order": order, "us": round(sum(us.values()), 1), "kernels": kernels}


def main() -> None:
    """Profile all operators and orders, writing the file after each."""
    file, rows = Path(sys.argv[1]) if sys.argv[1:] else FILE, []
    for operator in ("linear_attention", "ahla", "hla2", "hla3"):
        for order in ORDERS:
            rows.append(row(operator, order))
            print(rows[-1], flush=True)
            write_json(result_file("python docs/causal_profile.py", rows), file)


if __name__ == "__main__":
    main()
