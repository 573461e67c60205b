"""Table of adaptive multipole attention: time and error against cuDNN and FlexAttention.

Cases are compiled and checked in parallel in separate processes, so that a failing kernel does not affect others; then
they are timed one by one on the idle GPU.
"""

import functools
import multiprocessing
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention

from benchmarks import flex, rows
from benchmarks.operators import need_gpu
from benchmarks.profile import kernel_times
from benchmarks.timing import copy_rate, timed_row
from hla_kernels.softmax.adaptive import fused
from hla_kernels.softmax.adaptive.call import SELECTS, AdaptiveCall, prepare
from hla_kernels.softmax.adaptive.torch_form import evaluate
from zoo.io import markdown_table, package_versions
from zoo.ranges import check_ranges

SETS = 2  # input sets used in rotation
Call = Callable[[Tensor, Tensor, Tensor], Tensor]


class Shape(NamedTuple):
    """Shape [B, N, H, D] in bfloat16 with its grid.

    times: target speed-up over cuDNN, forward and with backward (None: only the forward pass is measured).
    """

    b: int
    h: int
    d: int
    grid: tuple[int, ...]
    density: float
    times: tuple[float, float | None]

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """[B, H, N, D], as in result files."""
        return self.b, self.h, functools.reduce(lambda a, b: a * b, self.grid), self.d


SHAPES = {
    "tokens1k": Shape(32, 6, 64, (32, 32), 0.10, (1.0, 1.0)),
    "channels72": Shape(32, 6, 72, (32, 32), 0.10, (1.0, 1.0)),
    "tokens4k": Shape(16, 16, 64, (64, 64), 0.10, (3.0, 2.5)),
    "tokens16k": Shape(4, 16, 64, (128, 128), 0.10, (6.0, 4.5)),
    "wan480p": Shape(2, 12, 128, (21, 30, 52), 0.0625, (8.0, 5.0)),
    "wan720p": Shape(1, 40, 128, (21, 45, 80), 0.0625, (9.0, None)),
}
IMPLS = ("ours", "sdpa_cudnn", "flex")
FLEX_TILE = 128  # tokens per tile of flex, whose blocks cannot be small


@dataclass(frozen=True)
class AdaptiveSettings:
    """Selection of the table of adaptive multipole attention; rows are merged into the file.

    shapes: tokens1k, tokens4k, tokens16k, wan480p, wan720p
    impls: ours, sdpa_cudnn, flex (forward only)
    selects: choices of exact tiles (ours): error, mass, mean, near
    q_tiles: tokens per query tile (ours)
    k_tiles: tokens per key tile (ours)
    density: fraction of exact key tiles; 0 for the default of each shape
    workers: number of processes that compile and check in parallel
    json: result file to add to
    """

    shapes: list[str] = field(default_factory=lambda: list(SHAPES))
    impls: list[str] = field(default_factory=lambda: list(IMPLS))
    selects: list[str] = field(default_factory=lambda: ["error", "mean"])
    q_tiles: list[int] = field(default_factory=lambda: [64])
    k_tiles: list[int] = field(default_factory=lambda: [16])
    density: float = 0.0
    workers: int = 16
    json: str = "docs/results/adaptive-h200.json"

    def __post_init__(self) -> None:
        rows.check_names(self, shapes=SHAPES, impls=IMPLS, selects=SELECTS)
        check_ranges("", self, density="[0, 1]", workers="[1, inf)")


class Case(NamedTuple):
    """One line of the table."""

    shape: str
    impl: str
    options: dict[str, Any]

    @property
    def passes(self) -> tuple[str, ...]:
        """Measured passes."""
        one_way = self.impl == "flex" or SHAPES[self.shape].times[1] is None
        return ("forward",) if one_way else ("forward", "forward_backward")

    def row(self, which: str) -> dict[str, Any]:
        """Keys of a row that identify the case."""
        op = "softmax_attention" if self.impl == "sdpa_cudnn" else "adaptive_multipole"
        sizes = list(SHAPES[self.shape].sizes)
        return {"op": op, "impl": self.impl, "shape": sizes, "options": self.options, "pass": which}


def cases(s: AdaptiveSettings) -> list[Case]:
    """Return all cases of the selection."""
    out = []
    for name in s.shapes:
        shape = SHAPES[name]
        shared = {"grid": shape.grid, "density": s.density or shape.density}
        for impl in s.impls:
            if impl == "sdpa_cudnn":
                out.append(Case(name, impl, {}))
            elif impl == "flex":
                out.append(Case(name, impl, {**shared, "q_tile": FLEX_TILE, "k_tile": FLEX_TILE}))
            else:
                tiles = [{"q_tile": q, "k_tile": k} for q in s.q_tiles for k in s.k_tiles]
                out += [Case(name, impl, {**shared, "select": one, **t}) for one in s.selects for t in tiles]
    return out


def run(settings: AdaptiveSettings, command: str) -> dict[str, Any]:
    """Measure the selection and return the whole file. Raises ValueError without a GPU."""
    need_gpu("adaptive")
    content = rows.start(Path(settings.json), command, package_versions("triton"))
    return run_cases(cases(settings), content, settings, "ours", errors, measured, tasks=1)


def run_cases(
    todo: Sequence[Any], content: dict[str, Any], settings: Any, impl: str, check: Callable[[Any], dict[str, float]],
    measured: Callable[[Any, str], dict[str, Any]], tasks: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Check the cases of an implementation in processes of at most `tasks` cases, time all cases one by one, and return
    the content of the result file with their rows."""
    rate, spawn = round(copy_rate() / 1e12, 3), multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(settings.workers, spawn, max_tasks_per_child=tasks) as pool:
        checked = check_all(todo, pool, impl, check)
    for case, found in zip(todo, checked, strict=True):
        for which in case.passes:
            row = case.row(which) | timed(case, which, found, measured) | {"copy_tb_s": rate}
            print(*row.values(), flush=True)
            rows.add(content, row, rows.KERNEL_KEY, Path(settings.json))
    return content


def check_all(
    todo: Sequence[Any], pool: Executor, impl: str, check: Callable[[Any], dict[str, float]]
) -> list[dict[str, Any]]:
    """Return the errors of each case of an implementation by pass, or a `reason`; `check` runs in a pool of
    processes."""
    waiting = [pool.submit(check, case) if case.impl == impl else None for case in todo]
    found: list[dict[str, Any]] = []
    for one in waiting:
        try:
            found.append({} if one is None else one.result())
        except Exception as error:  # compilers and devices raise many types; continue with the other cases
            found.append(rows.reason(error))
    return found


def inputs(shape: Shape, seed: int, device: str = "cuda") -> list[Tensor]:
    """Return q, k, v and the gradient of the output, [B, N, H, D]."""
    b, h, n, d = shape.sizes
    g = torch.Generator(device).manual_seed(seed)
    return [torch.randn(b, n, h, d, generator=g, device=device, dtype=torch.bfloat16) for _ in range(4)]


def make(case: Case) -> Call:
    """Build the function to time."""
    if case.impl == "sdpa_cudnn":
        return _cudnn
    if case.impl == "flex":
        return functools.partial(flex.adaptive, **case.options, attention=torch.compile(flex_attention, dynamic=False))
    scale = SHAPES[case.shape].d ** -0.5
    return lambda q, k, v: fused.evaluate(prepare(q, k, v, **case.options, q_scale=scale))


def _cudnn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).contiguous()


def timed(
    case: Any, which: str, checked: dict[str, Any], measured: Callable[[Any, str], dict[str, Any]]
) -> dict[str, Any]:
    """Return the measured values of a pass, and its error if it was checked; or a `reason`."""
    if "reason" in checked:
        return dict(checked)
    try:
        return measured(case, which) | ({"rel_err": checked[which]} if which in checked else {})
    except Exception as error:  # as in check_all
        return rows.reason(error)
    finally:
        torch.cuda.empty_cache()


def measured(case: Case, which: str) -> dict[str, Any]:
    """Return device time, timer and peak memory of a pass, and for ours the time per kernel."""
    call, sets = make(case), [inputs(SHAPES[case.shape], seed) for seed in range(SETS)]
    calls = [functools.partial(one_pass, call, x, which) for x in sets]
    return timed_row(calls) | ({"kernels_us": kernel_times(calls[0])} if case.impl == "ours" else {})


def one_pass(call: Call, x: list[Tensor], which: str) -> Any:
    """Return o, or o and the gradients of q, k, v."""
    if which == "forward":
        with torch.no_grad():
            return call(*x[:3])
    tokens = [t.detach().requires_grad_() for t in x[:3]]
    o = call(*tokens)
    return o.detach(), torch.autograd.grad(o, tokens, x[3])


def errors(case: Case) -> dict[str, float]:
    """Return the largest relative L2 error of ours by pass, over the first and the last head.

    The backward pass includes the gradients. The reference is the torch form in float64 with the tiles that ours chose.
    """
    shape = SHAPES[case.shape]
    x, scale = inputs(shape, 0), shape.d**-0.5
    found = {which: one_pass(make(case), x, which) for which in case.passes}
    chosen = fused.chosen(prepare(*x[:3], **case.options, q_scale=scale))
    worst = dict.fromkeys(case.passes, 0.0)
    for i, j in ((0, 0), (shape.b - 1, shape.h - 1)):
        one = [t[i : i + 1, :, j : j + 1].double() for t in x]
        wide = prepare(*one[:3], **case.options, q_scale=scale)

        def reference(*tokens: Tensor, wide: AdaptiveCall = wide, own: Tensor = chosen[i, j][None, None]) -> Tensor:
            return evaluate(wide._replace(q=tokens[0], k=tokens[1], v=tokens[2]), own)

        for which in case.passes:
            both = [flat(result) for result in (found[which], one_pass(reference, one, which))]
            for a, b in zip(*both, strict=True):
                a = a[i : i + 1, :, j : j + 1]
                worst[which] = max(worst[which], relative(a, b))
    return worst


def relative(found: Tensor, truth: Tensor) -> float:
    """Return the relative L2 error."""
    return float(f"{float((found.double() - truth).norm() / truth.norm()):.3g}")


def flat(result: Any) -> list[Tensor]:
    """Return o, or o and its gradients, as one list."""
    return [result] if isinstance(result, Tensor) else [result[0], *result[1]]


def text(result: dict[str, Any]) -> str:
    """Return Markdown tables: milliseconds, speed-up over cuDNN and target; microseconds per kernel of ours."""
    softmax = {(str(r["shape"]), r["pass"]): r["us"] for r in result["rows"] if r["impl"] == "sdpa_cudnn"}
    names = {str(list(shape.sizes)): name for name, shape in SHAPES.items()}
    kernels = list(dict.fromkeys(name for r in result["rows"] for name in r.get("kernels_us", ())))
    lines, parts = [], []
    for r in result["rows"]:
        name, base = names[str(r["shape"])], softmax.get((str(r["shape"]), r["pass"]))
        target = SHAPES[name].times[r["pass"] != "forward"]
        times = "" if base is None else f"{base / r['us']:.2f}"
        o = r["options"]
        options = " ".join(str(o[key]) for key in ("select", "density", "q_tile", "k_tile") if key in o)
        lines.append([name, r["impl"], options, r["pass"], f"{r['us'] / 1e3:.3f}", times,
                      str(target) if r["impl"] == "ours" else "", str(r.get("rel_err", ""))])  # fmt: skip
        if own := r.get("kernels_us"):
            parts.append([name, options, r["pass"], *(f"{own[each]:.0f}" if each in own else "" for each in kernels)])
    head = ["shape", "implementation", "select, density, tiles", "pass", "ms", "times cuDNN", "target", "error"]
    rate = statistics.median(r["copy_tb_s"] for r in result["rows"])
    table = [*markdown_table(head, lines), "", f"Copy {rate:.2f} TB/s."]
    if parts:
        table += ["", "Microseconds of each kernel:", ""]
        table += markdown_table(["shape", "select, density, tiles", "pass", *kernels], parts)
    return "\n".join(table)
