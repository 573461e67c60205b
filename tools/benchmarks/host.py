"""Table of host times: an eager call, and the first call of a new process.

Eager calls have so few tokens that the GPU always waits for the host; softmax is torch's attention.
First calls run in one new process per case, with empty compiler caches and after another operator ran.
"""

import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

import hla_kernels
from benchmarks import rows
from benchmarks.operators import need_gpu
from benchmarks.shapes import OPS
from hla_kernels.dispatch.verify import SWITCH
from zoo.io import markdown_table, package_versions

KEY = ("op", "shape", "options", "verify", "pass")
EAGER, FIRST = (2, 6, 197, 64), (64, 16, 256, 72)  # [B, H, N, D], bfloat16
OPTIONS: dict[str, dict[str, Any]] = {"plain": {}, "ratio": {"feature_map": "elu1", "normalize": True}}
WARMUP, CALLS, ROUNDS = 20, 200, 9
PASSES = ("no_grad", "forward", "forward_backward")
TARGETS = "Targets: 80 us forward and backward; 2 s for a first call on 16 cores."


@dataclass(frozen=True)
class HostSettings:
    """Selection of the table of host times; rows are merged into the file.

    ops: linear_attention, hla2, ahla, hla3, polynomial; for eager calls also softmax
    options: plain, ratio (elu1 with denominator)
    verify: first calls without (false) and with (true) the check on first use
    first: whether to measure first calls, about 10 s each
    json: result file to add to
    """

    ops: list[str] = field(default_factory=lambda: [*OPS, "softmax"])
    options: list[str] = field(default_factory=lambda: list(OPTIONS))
    verify: list[bool] = field(default_factory=lambda: [False, True])
    first: bool = True
    json: str = "docs/results/host-h200.json"

    def __post_init__(self) -> None:
        rows.check_names(self, ops=(*OPS, "softmax"), options=OPTIONS)


def run(settings: HostSettings, command: str) -> dict[str, Any]:
    """Measure the selection and return the whole file. Raises ValueError without a GPU."""
    need_gpu("host")
    file = Path(settings.json)
    content = rows.start(file, command, package_versions("triton") | {"cores": str(os.cpu_count())})

    def add(case: dict[str, Any], values: dict[str, Any]) -> None:
        print(case, values, flush=True)
        rows.add(content, case | values, KEY, file)

    for op in settings.ops:
        for name in settings.options:
            if op == "softmax" and name != "plain":
                continue
            case: dict[str, Any] = {"op": op, "shape": list(EAGER), "options": OPTIONS[name]}
            for which, us in eager(op, OPTIONS[name]).items():
                add(case | {"pass": which}, {"us": us})
            for verify in settings.verify if settings.first and op != "softmax" else ():
                case = {"op": op, "shape": list(FIRST), "options": OPTIONS[name], "verify": verify, "pass": "first"}
                add(case, in_new_process(op, OPTIONS[name], verify))
    return content


def calls(
    op: str, shape: tuple[int, ...], options: dict[str, Any], device: str = "cuda"
) -> tuple[Callable[[], Tensor], Callable[[Tensor], Any]]:
    """Return the call of an operator on packed qkv, and the gradients of its output."""
    b, h, n, d = shape
    qkv = torch.randn(b, n, 3, h, d, device=device, dtype=torch.bfloat16).requires_grad_()
    g = torch.randn(b, n, h, d, device=device, dtype=torch.bfloat16)
    more = (torch.rand(h, 4, device=device).requires_grad_(),) if op == "polynomial" else ()

    def forward() -> Tensor:
        if op == "softmax":
            q, k, v = qkv.transpose(1, 3).unbind(2)
            return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return getattr(hla_kernels, f"{op}_qkvpacked")(qkv, *more, **options)

    return forward, lambda o: torch.autograd.grad(o, (qkv, *more), g)


def eager(op: str, options: dict[str, Any]) -> dict[str, float]:
    """Return the host microseconds per call by pass, each a median over rounds."""
    forward, backward = calls(op, EAGER, options)
    passes = (torch.no_grad()(forward), forward, lambda: backward(forward()))
    return {name: round(statistics.median(_rounds(call)), 1) for name, call in zip(PASSES, passes, strict=True)}


def _rounds(call: Callable[[], Any]) -> list[float]:
    for _ in range(WARMUP):
        call()
    times = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter() - start) / CALLS * 1e6)
    torch.cuda.synchronize()
    return times


def in_new_process(op: str, options: dict[str, Any], verify: bool) -> dict[str, Any]:
    """Return the seconds of `first_call` in a new process with empty caches, or a `reason`."""
    with tempfile.TemporaryDirectory() as cache:
        own = {"TRITON_CACHE_DIR": cache, "XDG_CACHE_HOME": cache, SWITCH: str(int(verify))}
        spawn = multiprocessing.get_context("spawn")
        with mock.patch.dict(os.environ, own), ProcessPoolExecutor(1, mp_context=spawn) as pool:
            try:
                return pool.submit(first_call, op, options).result()
            except Exception as error:  # compilers and devices raise many types; continue with the other cases
                return rows.reason(error)


def first_call(op: str, options: dict[str, Any]) -> dict[str, float]:
    """Return the seconds of the first forward and backward pass in this process, after a call of the torch form."""
    warm = torch.randn(1, 64, 1, 64, device="cuda").requires_grad_()
    torch.autograd.grad(hla_kernels.linear_attention(warm, warm, warm, impl="torch").sum(), warm)
    forward, backward = calls(op, FIRST, options)
    start = _now()
    o = forward()
    middle = _now()
    backward(o)
    return {"forward_s": round(middle - start, 2), "backward_s": round(_now() - middle, 2)}


def _now() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


def text(result: dict[str, Any]) -> str:
    """Return Markdown tables: microseconds of eager calls by pass, and seconds of first calls."""
    eager_rows: dict[tuple[str, str], dict[str, float]] = {}
    first = []
    for r in result["rows"]:
        options = next(name for name, value in OPTIONS.items() if value == r["options"])
        if r["pass"] == "first":
            both = r["forward_s"] + r["backward_s"]
            first.append([r["op"], options, "on" if r["verify"] else "off", f"{r['forward_s']:.2f}",
                          f"{r['backward_s']:.2f}", f"{both:.2f}"])  # fmt: skip
        else:
            eager_rows.setdefault((r["op"], options), {})[r["pass"]] = r["us"]
    lines = [[*key, *(f"{row[name]:.0f}" if name in row else "" for name in PASSES)] for key, row in eager_rows.items()]
    table = markdown_table(["host us of an eager call", "options", *PASSES], lines)
    if first:
        head = ["s of the first call", "options", "check on first use", "forward", "backward", "together"]
        table += ["", *markdown_table(head, first)]
    return "\n".join([*table, "", TARGETS])
