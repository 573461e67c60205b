"""Operator table: time, peak memory and error of each case.

Cases are compiled and checked in parallel in a pool of processes, so that nothing wrong is timed; then they are timed
one by one on the idle GPU.
"""

import multiprocessing
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks import rows
from benchmarks.check import Checked, check, inputs
from benchmarks.peers import (
    DEGREES,
    FIXED,
    MIXED_OPTIONS,
    OPTIONS,
    OTHERS,
    Call,
    Case,
    cases,
    coefficients,
    inputs_with_grad,
    make,
    why_unavailable,
)
from benchmarks.shapes import ALL_SHAPES, OPS, PASSES, SHAPES, floor_us
from benchmarks.timing import copy_rate, measure, timed_row
from zoo.io import package_versions
from zoo.ranges import check_ranges

IMPLS = ("ours", "sdpa_cudnn", "sdpa_flash", "eager", "compiled", "fla", "flash_bla")
SETS = 3  # input sets used in rotation
L2_BYTES = 60e6  # L2 cache of an H200; smaller tensors are also timed with a single input set (`warm_us`)


@dataclass(frozen=True)
class KernelSettings:
    """Selection of the operator table; rows are merged into the file.

    shapes: vit224, vit512, dit256, dit512, tokens16k, wan480p; wan800, dits512 (with wan480p the shapes of mhla),
      tokens4k (multipole)
    ops: two-sided operators, mhla, taylor2, multipole; softmax and causal peers are always timed
    impls: ours and the peers
    options: identity (unnormalised), elu1_ratio, center_mean (centred keys and mean path), relu, relu_ratio, pair_ratio
      (softmax pair features, twice as many as channels), power_ratio (`power`, in a launch before the operator);
      fixed (polynomial: coefficients without gradient); mhla only: relu, relu_ratio, float32 (moments), rotary,
      rotary_ratio, order_ahla, order_hla2; multipole only: degree0, degree1
    workers: number of processes that compile and check in parallel
    json: result file to add to
    picture: PNG to draw from the whole file
    """

    shapes: list[str] = field(default_factory=lambda: list(SHAPES))
    ops: list[str] = field(default_factory=lambda: list(OPS))
    impls: list[str] = field(default_factory=lambda: list(IMPLS))
    options: list[str] = field(default_factory=lambda: ["identity", "elu1_ratio", "center_mean", "fixed"])
    workers: int = 8
    json: str = "docs/results/kernels-h200.json"
    picture: str = "docs/pictures/kernels-h200.png"

    def __post_init__(self) -> None:
        options = OPTIONS | MIXED_OPTIONS | FIXED | DEGREES
        rows.check_names(self, shapes=ALL_SHAPES, ops=(*OPS, *OTHERS), impls=IMPLS, options=options)
        check_ranges("", self, workers="[1, inf)")


def run(settings: KernelSettings, command: str) -> dict[str, Any]:
    """Measure the selection and return the whole file. Raises ValueError without a GPU."""
    need_gpu("kernels")
    absent = {impl: reason for impl in settings.impls if (reason := why_unavailable(impl))}
    for sentence in absent.values():
        print(f"not timed: {sentence}")
    impls = [impl for impl in settings.impls if impl not in absent]
    todo = cases(settings.shapes, settings.ops, impls, settings.options)
    file = Path(settings.json)
    content = rows.start(file, command, package_versions("triton", "fla-core"))
    record = partial(rows.add, content, names=rows.KERNEL_KEY, file=file)
    with tempfile.TemporaryDirectory() as cache:  # an empty cache, to measure first compile times
        for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
            os.environ[name] = f"{cache}/{name}"
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # the pool is parallel already
        checked = check_all(todo, settings.workers)
        for case, result in checked.items():
            if result.problem:
                print(f"not timed: {case.title}: {result.problem}")
                record(case_row(case) | {"reason": result.problem})
        rate = copy_rate()
        print(f"copy: {rate / 1e12:.2f} TB/s")
        good = [case for case in todo if checked[case].problem is None]
        for case, values in tqdm(timed(good), total=len(good) * len(PASSES), desc="timing", mininterval=5):
            if "reason" in values:
                print(f"not timed: {case.title}: {values['reason']}")
            record(case_row(case) | kernel_values(case, checked[case], rate, values))
    return content


def need_gpu(what: str) -> None:
    """Raise ValueError unless there is a CUDA device."""
    if not torch.cuda.is_available():
        raise ValueError(f"{what} measures a CUDA GPU, and torch sees none here")


def check_all(todo: list[Case], workers: int) -> dict[Case, Checked]:
    """Run `check` for every case in a pool of processes."""
    context = multiprocessing.get_context("spawn")
    out = {}
    with ProcessPoolExecutor(min(workers, len(todo)), mp_context=context) as pool:
        first = sorted(todo, key=lambda case: case.impl != "fla")  # fla autotunes for a minute
        waiting = {pool.submit(check, case): case for case in first}
        for done in tqdm(as_completed(waiting), total=len(todo), desc="compile and check", mininterval=5):
            out[waiting[done]] = done.result()
    return out


def timed(todo: list[Case]) -> Iterator[tuple[Case, dict[str, Any]]]:
    """Return time, timer and peak memory of each case and pass; a `reason` if the timing failed."""
    shape = ""
    sets: list[tuple[torch.Tensor, torch.Tensor]] = []
    for case in todo:
        if case.shape != shape:
            sets.clear()
            torch.cuda.empty_cache()
            shape, sets = case.shape, [inputs(case.shape, seed, "cuda") for seed in range(SETS)]
        call, c = make(case), coefficients(case, "cuda")
        for which in PASSES:
            try:
                calls = [partial(one_pass, which, call, qkv, c, grad) for qkv, grad in sets]
                values = timed_row(calls)
                if ALL_SHAPES[shape].token_bytes < L2_BYTES:
                    values["warm_us"] = round(measure(calls[:1]).us, 2)
                yield case, {"pass": which} | values
            except RuntimeError as error:
                yield case, {"pass": which, "reason": f"{' '.join(str(error).split())[:200]}"}


def one_pass(which: str, call: Call, qkv: torch.Tensor, c: torch.Tensor | None, grad: torch.Tensor) -> Any:
    """Return o, or o and the packed gradient (with the gradient of the coefficients)."""
    if which == "forward":
        with torch.no_grad():
            return call(qkv, c)
    o = call(qkv, c)
    grads = torch.autograd.grad(o, inputs_with_grad(qkv, c), grad)
    return o.detach(), grads  # a live graph of o would make the next call wait for this stream


def case_row(case: Case) -> dict[str, Any]:
    """Return the keys of a row that identify the case."""
    options, sizes = dict(case.options), ALL_SHAPES[case.shape].sizes
    return {"op": case.op, "impl": case.impl, "shape": sizes, "options": options}


def kernel_values(case: Case, checked: Checked, rate: float, values: dict[str, Any]) -> dict[str, Any]:
    """Return the measured keys of a row.

    us: device time per call; launched_us: without a graph; warm_us: on one input set. floor_us: memory floor at the
    copy rate of this run. rel_err: error against float64, in the backward pass of the gradient. first_s: seconds of the
    first call with empty compiler caches (shapes that share kernels compile them once); the forward pass runs after the
    backward pass.
    """
    if "reason" in values:
        return values
    which = values["pass"]
    measured = {
        "floor_us": round(floor_us(ALL_SHAPES[case.shape], case.op, which, rate), 2),
        "rel_err": float(f"{checked.rel_err[which]:.3g}"),
        "first_s": checked.first_s[which],
        "copy_tb_s": round(rate / 1e12, 3),
    }
    ran = {} if checked.ran is None else {"ran": checked.ran}
    return values | measured | ran
