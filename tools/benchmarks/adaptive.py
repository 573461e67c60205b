"""Table of adaptive multipole attention: time and error beside softmax with cuDNN and FlexAttention."""

import functools
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention

import hla_kernels
from benchmarks import flex, rows
from benchmarks.operators import need_gpu, package_versions
from benchmarks.timing import copy_rate, measure, peak_mib
from hla_kernels.softmax.adaptive.call import SELECTS, prepare
from hla_kernels.softmax.adaptive.fused.operator import adaptive_op
from hla_kernels.softmax.adaptive.torch_form import evaluate
from zoo.errors import unknown_name
from zoo.io import markdown_table
from zoo.ranges import check_ranges

SETS = 2  # sets of inputs in rotation
Call = Callable[[Tensor, Tensor, Tensor], Tensor]


class Shape(NamedTuple):
    """[B, N, H, D] in bfloat16 on a grid. times: least speed-up over cuDNN, forward and with the backward (None: the
    forward alone is measured)."""

    b: int
    h: int
    d: int
    grid: tuple[int, ...]
    density: float
    times: tuple[float, float | None]

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """[B, H, N, D], as result files write it."""
        return self.b, self.h, functools.reduce(lambda a, b: a * b, self.grid), self.d


SHAPES = {
    "tokens1k": Shape(32, 6, 64, (32, 32), 0.10, (1.0, 1.0)),
    "tokens4k": Shape(16, 16, 64, (64, 64), 0.10, (3.0, 2.5)),
    "tokens16k": Shape(4, 16, 64, (128, 128), 0.10, (6.0, 4.5)),
    "wan480p": Shape(2, 12, 128, (21, 30, 52), 0.0625, (8.0, 5.0)),
    "wan720p": Shape(1, 40, 128, (21, 45, 80), 0.0625, (9.0, None)),
}
IMPLS = ("ours", "sdpa_cudnn", "flex")


@dataclass(frozen=True)
class AdaptiveSettings:
    """Which part of the table of adaptive multipole attention to measure; the rows are merged into the file.

    shapes: of tokens1k, tokens4k, tokens16k, wan480p, wan720p
    impls: of ours, sdpa_cudnn, flex (forward alone)
    selects: of ours: error, mass, mean, near
    q_tiles: of ours, tokens
    k_tiles: of ours, tokens
    density: part of the key tiles that is exact; 0 for that of each shape
    flex_tile: tokens of a tile of flex, whose blocks cannot be small
    json: result file to add to
    """

    shapes: list[str] = field(default_factory=lambda: list(SHAPES))
    impls: list[str] = field(default_factory=lambda: list(IMPLS))
    selects: list[str] = field(default_factory=lambda: ["error", "mean"])
    q_tiles: list[int] = field(default_factory=lambda: [64])
    k_tiles: list[int] = field(default_factory=lambda: [16])
    density: float = 0.0
    flex_tile: int = 128
    json: str = "docs/results/adaptive-h200.json"

    def __post_init__(self) -> None:
        for key, allowed in {"shapes": SHAPES, "impls": IMPLS, "selects": SELECTS}.items():
            for name in getattr(self, key):
                if name not in allowed:
                    raise unknown_name(key.removesuffix("s"), name, allowed)
        check_ranges("", self, density="[0, 1]")


class Case(NamedTuple):
    """One line of the table."""

    shape: str
    impl: str
    options: dict[str, Any]

    def row(self, which: str) -> dict[str, Any]:
        """The keys of a row that say what was run."""
        op = "softmax_attention" if self.impl == "sdpa_cudnn" else "adaptive_multipole"
        sizes = list(SHAPES[self.shape].sizes)
        return {"op": op, "impl": self.impl, "shape": sizes, "options": self.options, "pass": which}


def cases(s: AdaptiveSettings) -> list[Case]:
    """Every case of the selection."""
    out = []
    for name in s.shapes:
        shape = SHAPES[name]
        shared = {"grid": shape.grid, "density": s.density or shape.density}
        for impl in s.impls:
            if impl == "sdpa_cudnn":
                out.append(Case(name, impl, {}))
            elif impl == "flex":
                out.append(Case(name, impl, {**shared, "q_tile": s.flex_tile, "k_tile": s.flex_tile}))
            else:
                tiles = [{"q_tile": q, "k_tile": k} for q in s.q_tiles for k in s.k_tiles]
                out += [Case(name, impl, {**shared, "select": one, **t}) for one in s.selects for t in tiles]
    return out


def run(settings: AdaptiveSettings, command: str) -> dict[str, Any]:
    """Measure the selection and return the whole file. Raises ValueError without a GPU."""
    need_gpu("adaptive")
    file = Path(settings.json)
    content = rows.start(file, command, package_versions("triton"))
    rate = round(copy_rate() / 1e12, 3)
    for case in cases(settings):
        one_way = case.impl == "flex" or SHAPES[case.shape].times[1] is None
        for which in ("forward",) if one_way else ("forward", "forward_backward"):
            try:
                values = timed(case, which) | {"copy_tb_s": rate}
            except RuntimeError as error:
                values = {"reason": " ".join(str(error).split())[:200]}
            print(case.shape, case.impl, case.options, which, values, flush=True)
            rows.add(content, case.row(which) | values, rows.KERNEL_KEY, file)
            torch.cuda.empty_cache()
    return content


def inputs(shape: Shape, seed: int, device: str = "cuda") -> list[Tensor]:
    """q, k, v and the gradient of the output, [B, N, H, D]."""
    b, h, n, d = shape.sizes
    g = torch.Generator(device).manual_seed(seed)
    return [torch.randn(b, n, h, d, generator=g, device=device, dtype=torch.bfloat16) for _ in range(4)]


def make(case: Case) -> Call:
    """The function that is timed."""
    if case.impl == "sdpa_cudnn":
        return _cudnn
    if case.impl == "flex":
        return functools.partial(flex.adaptive, **case.options, attention=torch.compile(flex_attention, dynamic=False))
    scale = SHAPES[case.shape].d ** -0.5
    return functools.partial(hla_kernels.adaptive_multipole, **case.options, q_scale=scale, impl="triton")


def _cudnn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).contiguous()


def timed(case: Case, which: str) -> dict[str, Any]:
    """Device time, way of timing, peak memory and, of ours, the error."""
    call, sets = make(case), [inputs(SHAPES[case.shape], seed) for seed in range(SETS)]
    values = {"rel_err": float(f"{error(case, sets[0], which):.3g}")} if case.impl == "ours" else {}
    calls = [functools.partial(one_pass, call, x, which) for x in sets]
    for each in calls:
        each()
    peak, timing = peak_mib(calls[0]), measure(calls)
    return values | {
        "us": round(timing.us, 2), "timer": timing.timer, "peak_mib": round(peak, 1),
        "launched_us": round(timing.launched_us, 2),
    }  # fmt: skip


def one_pass(call: Call, x: list[Tensor], which: str) -> Any:
    """o, or o and the gradients of q, k, v."""
    if which == "forward":
        with torch.no_grad():
            return call(*x[:3])
    tokens = [t.detach().requires_grad_() for t in x[:3]]
    o = call(*tokens)
    return o.detach(), torch.autograd.grad(o, tokens, x[3])


def error(case: Case, x: list[Tensor], which: str) -> float:
    """Largest relative L2 error of ours, of o and with the backward of its gradients, for the first sample and head.
    The truth is the torch form in float64 with the tiles that ours chose."""
    few, scale = [t[:1, :, :1].contiguous() for t in x], SHAPES[case.shape].d ** -0.5
    call = prepare(*few[:3], **case.options, q_scale=scale)
    with torch.no_grad():
        options = (None, list(call.field.grid), *call.field[1:], call.exact, call.select, call.far, scale)
        listed = adaptive_op(*few[:3], *options)[9].long()[None]
    wide = prepare(*(t.double() for t in few[:3]), **case.options, q_scale=scale)

    def truth(*tokens: Tensor) -> Tensor:
        return evaluate(wide._replace(q=tokens[0], k=tokens[1], v=tokens[2]), listed)

    found, wanted = (one_pass(f, t, which) for f, t in ((make(case), few), (truth, [t.double() for t in few])))
    pairs = [(found, wanted)] if which == "forward" else [(found[0], wanted[0]), *zip(found[1], wanted[1], strict=True)]
    return max(float((a.double() - b).norm() / b.norm()) for a, b in pairs)


def text(result: dict[str, Any]) -> str:
    """The table in Markdown: milliseconds, times cuDNN and the target."""
    softmax = {(str(r["shape"]), r["pass"]): r["us"] for r in result["rows"] if r["impl"] == "sdpa_cudnn"}
    names = {str(list(shape.sizes)): name for name, shape in SHAPES.items()}
    lines = []
    for r in result["rows"]:
        name, base = names[str(r["shape"])], softmax.get((str(r["shape"]), r["pass"]))
        target = SHAPES[name].times[r["pass"] != "forward"]
        times = "" if base is None else f"{base / r['us']:.2f}"
        o = r["options"]
        options = " ".join(str(o[key]) for key in ("select", "density", "q_tile", "k_tile") if key in o)
        lines.append([name, r["impl"], options, r["pass"], f"{r['us'] / 1e3:.3f}", times,
                      str(target) if r["impl"] == "ours" else "", str(r.get("rel_err", ""))])  # fmt: skip
    head = ["shape", "implementation", "select, density, tiles", "pass", "ms", "times cuDNN", "target", "error"]
    rate = statistics.median(r["copy_tb_s"] for r in result["rows"])
    return "\n".join([*markdown_table(head, lines), "", f"Copy {rate:.2f} TB/s."])
