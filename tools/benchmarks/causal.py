"""Table of causal operators, frames, decoding and delta rules, against causal softmax.

Cases in Triton are compiled and checked against float64 in parallel processes; then all are timed one by one on the
idle GPU, on several input sets in rotation, so that inputs are never in cache.
"""

import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import hla_kernels
from benchmarks import rows
from benchmarks.adaptive import relative, run_cases
from benchmarks.operators import need_gpu
from benchmarks.timing import timed_row
from hla_kernels import delta_rules as rules
from zoo.io import markdown_table, package_versions
from zoo.ranges import check_ranges

SETS = 2  # input sets used in rotation
Sizes = tuple[int, int, int, int]  # B, H, N, D
Inputs = dict[str, Tensor]
OPS = ("linear_attention", "ahla", "hla2", "hla3")
TITLES = {"linear_attention": "la", "softmax_attention": "softmax"}
SHAPES: dict[str, Sizes] = {"tokens4k": (8, 16, 4096, 64), "tokens32k": (2, 12, 32768, 128)}
VIDEO: Sizes = (1, 12, 28080, 128)
FRAME = 1560  # tokens of a frame of VIDEO
BLOCKS: dict[str, Any] = {"grid": (18, 30, 52), "blocks": (1, 3, 4)}  # of mhla in VIDEO
DECODED: list[Sizes] = [(64, 16, 1, 128), (256, 16, 1, 64)]
RATIO = {"feature_map": "relu", "normalize": True}
GROUPS = ("plain", "decay", "ratio", "float16", "frame", "frame_decay", "paper", "decode", "delta")
IMPLS = ("triton", "torch", "sdpa_cudnn")
BOTH_FORMS = ("ratio", "frame_decay", "paper", "delta")  # groups timed in torch too
PASSES = ("forward", "forward_backward")
DECAYED: dict[str, tuple[Sequence[str], dict[str, Any]]] = {  # group with learned decays -> operators and options
    "frame_decay": (OPS, {"causal": "frame", "frame": 256}),
    "paper": (("hla2",), {"causal": True, "decay_rule": "paper", "scale": 0.05}),
}
# minimum speed-up over softmax, forward and backward, of plain calls; other calls may take SLOWER times as long
SPEED_UP = {
    "tokens4k": {"linear_attention": 5.0, "ahla": 3.0, "hla2": 3.0, "hla3": 2.2},
    "tokens32k": {"linear_attention": 30.0, "ahla": 15.0, "hla2": 15.0, "hla3": 11.0},
}
SLOWER = 1.15
# maximum time relative to the base of a group: two-sided la, copy of the state, gated_delta_net
AT_MOST = {"frame": 1.3, "decode": 1.3, "delta": 1.6}
RULES = ("gla", "delta_net", "gated_delta_net", "hdla")  # ranks 0, 1, 1, 2
FLA = {  # operator or rule -> module of fla-core
    "linear_attention": "linear_attn", "gla": "gla", "delta_net": "delta_rule", "gated_delta_net": "gated_delta_rule",
}  # fmt: skip


@dataclass(frozen=True)
class CausalSettings:
    """Selection of the table of causal operators; rows are merged into the file.

    groups: plain, decay (learned, per head), ratio (relu), float16, frame (28,080 tokens in frames of 1,560),
      frame_decay (4,096 tokens in frames of 256, learned decay), paper (hla2 with decay_rule="paper", learned decay),
      decode (one token with a state), delta (ranks 0, 1, 2)
    shapes: of plain, decay, ratio, float16: tokens4k, tokens32k
    impls: triton, torch (ratio, frame_decay, paper, delta), sdpa_cudnn; fla (plain la, delta; needs fla-core)
    workers: number of processes that compile and check in parallel
    json: result file to add to
    """

    groups: list[str] = field(default_factory=lambda: list(GROUPS))
    shapes: list[str] = field(default_factory=lambda: list(SHAPES))
    impls: list[str] = field(default_factory=lambda: list(IMPLS))
    workers: int = 8
    json: str = "docs/results/causal-forms-h200.json"

    def __post_init__(self) -> None:
        rows.check_names(self, groups=GROUPS, shapes=SHAPES, impls=(*IMPLS, "fla"))
        check_ranges("", self, workers="[1, inf)")


class Case(NamedTuple):
    """One line of the table. options: options of the operator, without tensors."""

    group: str
    op: str
    impl: str
    sizes: Sizes
    options: dict[str, Any]
    dtype: torch.dtype = torch.bfloat16

    @property
    def passes(self) -> tuple[str, ...]:
        """Measured passes."""
        return ("forward",) if self.group == "decode" else PASSES

    def row(self, which: str) -> dict[str, Any]:
        """Keys of a row that identify the case."""
        options = {"group": self.group, **self.options}
        return {"op": self.op, "impl": self.impl, "shape": list(self.sizes), "options": options, "pass": which}


def cases(s: CausalSettings) -> list[Case]:
    """Return all cases of the selection."""
    out = []
    shapes = [SHAPES[name] for name in s.shapes] if {"plain", "decay", "ratio", "float16"} & {*s.groups} else []
    video = [VIDEO] if "frame" in s.groups else []
    decayed = [SHAPES["tokens4k"]] if DECAYED.keys() & {*s.groups} else []
    if "sdpa_cudnn" in s.impls:
        bases = dict.fromkeys(shapes + decayed + video)
        out += [Case("softmax", "softmax_attention", "sdpa_cudnn", sizes, {"causal": True}) for sizes in bases]
    for group in s.groups:
        for impl in s.impls:
            if impl == "triton" or group in {"torch": BOTH_FORMS, "fla": ("plain", "delta")}.get(impl, ()):
                out += _cases(group, impl, shapes)
    return out


def _cases(group: str, impl: str, shapes: list[Sizes]) -> list[Case]:
    if group == "delta":
        named = [rule for rule in RULES if impl != "fla" or rule in FLA]
        return [Case(group, rule, impl, SHAPES["tokens4k"], {}) for rule in named]
    if group == "decode":
        copies = [Case(group, op, "copy", sizes, {}) for sizes in DECODED for op in OPS]
        return copies + [Case(group, op, impl, sizes, {}) for sizes in DECODED for op in OPS]
    if group == "frame":
        frames = {"causal": "frame", "frame": FRAME}
        calls: list[tuple[str, dict[str, Any]]]
        calls = [("linear_attention", {"causal": False}), ("linear_attention", {"causal": True})]
        calls += [(op, frames) for op in OPS] + [(op, frames | RATIO) for op in ("linear_attention", "hla2")]
        calls += [("mhla", {"causal": "frame", **BLOCKS})]
        return [Case(group, op, impl, VIDEO, options) for op, options in calls]
    if group in DECAYED:
        ops, options = DECAYED[group]
        return [Case(group, op, impl, SHAPES["tokens4k"], options) for op in ops]
    dtype = torch.float16 if group == "float16" else torch.bfloat16
    out = []
    for sizes in shapes:
        # a scale keeps sums over the tokens in the range of float16
        more = {"float16": {"feature_map": "relu", "scale": 1 / sizes[2]}, "ratio": RATIO}.get(group, {})
        ops = [op for op in OPS if impl != "fla" or op in FLA]
        out += [Case(group, op, impl, sizes, {"causal": True, **more}, dtype) for op in ops]
    return out


def run(settings: CausalSettings, command: str) -> dict[str, Any]:
    """Measure the selection and return the whole file. Raises ValueError without a GPU."""
    need_gpu("causal")
    content = rows.start(Path(settings.json), command, package_versions("triton", "fla-core"))
    return run_cases(cases(settings), content, settings, "triton", errors, measured)


def inputs(case: Case, seed: int, device: str = "cuda") -> Inputs:
    """Return the tensors of a call, and `grad`, the gradient of its output: tokens [B, N, H, ..], gamma [H]."""
    b, h, n, d = case.sizes
    g = torch.Generator(device).manual_seed(seed)
    x = {
        name: torch.randn(b, n, h, d, generator=g, device=device, dtype=torch.float32).to(case.dtype)
        for name in ("q", "k", "v", "grad")
    }
    if case.group == "decay" or case.group in DECAYED:
        x["gamma"] = torch.linspace(0.99, 0.9999, h, device=device)
    if case.op == "mhla":
        m = math.prod(case.options["blocks"])
        x["mixing"] = torch.rand(m, m, generator=g, device=device)
    if case.group == "delta":
        x["k"] = F.normalize(x["k"].float(), dim=-1).to(case.dtype)
        width = (d,) if case.op in ("gla", "hdla") else ()
        x["log_f"] = F.logsigmoid(torch.randn(b, n, h, *width, generator=g, device=device) + 3)
        x["beta"] = torch.rand(b, n, h, generator=g, device=device, dtype=torch.float32).to(case.dtype)
    return x


def compute(case: Case, x: Inputs, impl: str) -> Tensor:
    """Run the call of a case on its tensors."""
    q, k, v = x["q"], x["k"], x["v"]
    if case.op == "softmax_attention":
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION if q.is_cuda else SDPBackend.MATH):
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).contiguous()
    if impl == "fla" and case.op == "linear_attention":
        return fla(case.op)(q, k, v, normalize=False, scale=1.0)[0]
    if case.group == "delta":
        more = [x[name] for name in {"gla": ["log_f"], "delta_net": ["beta"]}.get(case.op, ["log_f", "beta"])]
        if impl == "fla":
            return fla(case.op)(q, k, v, *more, scale=1.0)[0]
        found = hla_kernels.delta(q, **getattr(rules, case.op)(k, v, *more), impl=impl)
        assert isinstance(found, Tensor)
        return found
    tensors = {name: x[of] for name, of in (("decay", "gamma"), ("mixing", "mixing")) if of in x}
    return getattr(hla_kernels, case.op)(q, k, v, **case.options, **tensors, impl=impl)


def fla(op: str) -> Callable[..., tuple[Tensor, ...]]:
    """Return the chunked form in fla-core, which takes q, k, v and the decays and beta of a delta rule as rules do."""
    return getattr(importlib.import_module(f"fla.ops.{FLA[op]}"), f"chunk_{FLA[op]}")


def make(case: Case, seed: int, device: str = "cuda") -> dict[str, Callable[[], Any]]:
    """Build the functions to time, by pass."""
    x = inputs(case, seed, device)
    if case.group != "decode":
        return {which: partial(one_pass, case, x, case.impl, which) for which in PASSES}
    call = partial(getattr(hla_kernels, case.op), x["q"], x["k"], x["v"], causal=True, return_state=True)
    state = call(impl="torch")[1]
    if case.impl != "copy":
        return {"forward": partial(call, state=state, impl=case.impl)}
    return {"forward": lambda: [torch.clone(t) for t in state.tensors.values()]}


def one_pass(case: Case, x: Inputs, impl: str, which: str) -> list[Tensor]:
    """Return o, or o and the gradients of all inputs that the call uses."""
    if which == "forward":
        with torch.no_grad():
            return [compute(case, x, impl)]
    given = {name: t.detach().requires_grad_(name != "grad") for name, t in x.items()}
    o = compute(case, given, impl)
    grads = torch.autograd.grad(o, [t for t in given.values() if t.requires_grad], x["grad"], allow_unused=True)
    return [o.detach(), *(g for g in grads if g is not None)]


def errors(case: Case, device: str = "cuda") -> dict[str, float]:
    """Return the largest relative L2 error by pass, over the first and the last head, against the torch form in
    float64. The backward pass includes the gradients."""
    if case.group == "decode":
        x = inputs(case, 0, device)
        call = getattr(hla_kernels, case.op)
        state = call(x["q"], x["k"], x["v"], causal=True, return_state=True, impl="torch")[1]
        o = make(case, 0, device)["forward"]()[0]
        tokens = [x[name].double() for name in "qkv"]
        truth = call(*tokens, causal=True, state=state.to(torch.float64), return_state=True, impl="torch")[0]
        return {"forward": relative(o, truth)}
    worst = dict.fromkeys(PASSES, 0.0)
    x = inputs(case, 0, device)
    for which in PASSES:
        found = one_pass(case, x, case.impl, which)
        for i, j in ((0, 0), (case.sizes[0] - 1, case.sizes[1] - 1)):
            part = partial(of_head, i=i, j=j)
            truth = one_pass(case, {name: part(t).double() for name, t in x.items()}, "torch", which)
            pairs = [(part(a), b) for a, b in zip(found, truth, strict=True)]
            worst[which] = max(worst[which], *(relative(a, b) for a, b in pairs if a.shape == b.shape and b.dim() > 2))
    return worst


def of_head(x: Tensor, i: int, j: int) -> Tensor:
    """Return head j of sample i of tokens [B, N, H, ..], or of a decay [H]; a mixing matrix [M, M] is of all heads."""
    return x if x.dim() == 2 else x[j : j + 1] if x.dim() == 1 else x[i : i + 1, :, j : j + 1]


def measured(case: Case, which: str) -> dict[str, Any]:
    """Return device time, timer and peak memory of a pass."""
    return timed_row([make(case, seed)[which] for seed in range(SETS)])


def text(result: dict[str, Any]) -> str:
    """Return one Markdown table: milliseconds, time relative to the base of the group, and target."""
    found = {_place(row): row["us"] for row in result["rows"]}
    lines = []
    for row in result["rows"]:
        group, options = row["options"]["group"], {k: v for k, v in row["options"].items() if k != "group"}
        base, times, target = _relative(row, found)
        words = ["two-sided" if options.get("causal") is False else group]
        words += [k if v is True else f"{k}={v:.3g}" if isinstance(v, float) else f"{k}={v}"
                  for k, v in options.items() if k != "causal"]  # fmt: skip
        lines.append([", ".join(map(str, row["shape"])), ", ".join(words), TITLES.get(row["op"], row["op"]),
                      row["impl"], row["pass"], f"{row['us'] / 1e3:.3f}", base,
                      "" if math.isnan(times) else f"{times:.2f}", target, str(row.get("rel_err", ""))])  # fmt: skip
    head = ["samples, heads, tokens, channels", "call", "operator", "implementation", "pass", "ms", "base", "times"]
    failed = [f"Not timed: {r['options']['group']} {r['op']} {r['impl']}: {r['reason']}." for r in result["failed"]]
    return "\n".join([*markdown_table([*head, "target", "error"], lines), *failed])


def _place(row: dict[str, Any]) -> tuple:
    """Return the key of a row among others of its shape; the plain calls of a group have no map."""
    options = row["options"]
    kind = (options["group"], options.get("causal"), "feature_map" in options)
    return (tuple(row["shape"]), row["op"], row["impl"], row["pass"], *kind)


def _relative(row: dict[str, Any], found: dict[tuple, float]) -> tuple[str, float, str]:
    """Return the base of a row, its speed-up over softmax or else its time relative to the base, and the target."""
    sizes, which, group = tuple(row["shape"]), row["pass"], row["options"]["group"]
    bases = {
        "frame": ("two-sided la", (sizes, "linear_attention", row["impl"], which, "frame", False, False)),
        "decode": ("copy of the state", (sizes, row["op"], "copy", which, "decode", None, False)),
        "delta": ("gated_delta_net", (sizes, "gated_delta_net", row["impl"], which, "delta", None, False)),
    }
    if group in bases:
        name, place = bases[group]
        wanted = row["op"] == "hdla" or (group == "frame" and row["options"]["causal"] == "frame") or (
            group == "decode" and row["impl"] != "copy")  # fmt: skip
        most = f"at most {AT_MOST[group]:g}" if wanted and (group != "delta" or which != "forward") else ""
        return name, row["us"] / found.get(place, math.nan), most
    softmax = found.get((sizes, "softmax_attention", "sdpa_cudnn", which, "softmax", True, False), math.nan)
    least = next((SPEED_UP[name].get(row["op"]) for name, one in SHAPES.items() if one == sizes), None)
    if which == "forward" or least is None or row["impl"] != "triton" or group in DECAYED:
        return "softmax", softmax / row["us"], ""
    return "softmax", softmax / row["us"], f"at least {least if group == 'plain' else least / SLOWER:.3g}"
