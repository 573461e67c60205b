"""Random calls of the operators against dense definitions in float64, forward and gradients.

python -m tests.campaign.operators [--seed 0] [--calls 1000] [--seconds 600] [--device cuda] [--out figures.json]

Prints a line per failure, reduced to its smallest call, and figures; exits with code 1 if there is a failure. On a GPU
buffers start as NaN, every call runs twice, and both have the same bits (but for gradients of softmax_attention).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import hla_kernels as hk
from hla_kernels.dispatch import verify
from hla_kernels.features.power import power_pair
from tests.campaign import dense
from tests.campaign.calls import DTYPES, LINEAR, Call, Inputs, draw, smaller, tensors
from tests.campaign.harness import Case, fork

# what the result is rounded to, and what of its products; the latter is as large as LIKELY standard deviations
ROUNDING = {"float64": 0.0, "float32": 2e-7, "float16": 2**-10, "bfloat16": 2**-7}
ROUNDOFF = {"float64": 2.0**-53}  # float32 for the others
LIKELY = 4.0
# of softmax and its expansions in float32: so many times what the dense definition in that precision loses, and of
# results that cancel; UNIT: in float64
TIMES, CANCELLED, UNIT = 30.0, 2e-6, 2.0**-27
DECAYED = 2.0**-24 * 64 * 0.5  # of decays over a chunk of 64 tokens: the roundoff of a sum of logarithms up to 0.5
FAST = 3.0  # Triton forms round operands too: so many times the rounding, of gradients above all
FEW = 2  # real tokens of a sequence of which the parts of a gradient cancel exactly: the rounding is relative to a part
BATCH, BATCHES = 50, 200  # calls of a case, cases
STEPS, REDUCING = 200, 30.0  # calls that a reduction may try, and seconds


class Refused(Exception):
    """The call is undefined, which one sentence says."""


@dataclass
class Figures:
    """What became of calls; worst: the largest error of each operator over what is allowed; closest: its result and
    call."""

    calls: int = 0
    refused: int = 0
    kinds: Counter = field(default_factory=Counter)
    worst: dict[str, float] = field(default_factory=dict)
    closest: dict[str, str] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)


def run(call: Call, x: Inputs) -> list[Tensor]:
    """The output and the gradients of all leaves."""
    leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v, *x.more)]
    try:
        y = forward(call, x, leaves)
    except ValueError as error:
        raise Refused(str(error)) from error
    return [y.detach(), *gradients(y, leaves, x.grad)]


def gradients(y: Tensor, leaves: list[Tensor], grad: Tensor) -> list[Tensor]:
    """Zeros where nothing depends on a leaf."""
    found = torch.autograd.grad(y, leaves, grad.to(y.dtype), allow_unused=True)
    return [torch.zeros_like(x) if d is None else d for x, d in zip(leaves, found, strict=True)]


def forward(call: Call, x: Inputs, leaves: list[Tensor]) -> Tensor:
    """The output of the package."""
    q, k, v, *more = leaves
    if call.extra.get("power"):
        q, k = power_pair(q, k, *more[-2:])
        more = more[:-2]
    options: dict[str, Any] = {**call.options, "impl": call.impl}
    if "narrow" in call.extra:
        options["narrow"] = (more.pop(1), more.pop(1))
    if call.op == "delta":
        options |= dict(zip(transitions(call), more, strict=True))
        more = []
    decay = call.extra.get("decay")
    if decay is not None:
        options["decay"] = more.pop() if isinstance(decay, str) else decay
    if x.mask is not None:
        options["token_mask" if call.op == "mhla" else "key_padding_mask"] = x.mask
    if "lengths" in call.extra:
        lengths = torch.tensor([0, *call.extra["lengths"]])
        options |= {"cu_seqlens": lengths.cumsum(0).int().to(q.device), "max_seqlen": max(1, int(lengths.max()))}
    f = getattr(hk, call.op)
    if call.pieces:
        return in_pieces(call, f, q, k, v, more, x.rotary, options)
    if x.rotary is not None:
        options["rotary"] = x.rotary
    packed = call.layout == "packed" and "narrow" not in options
    if packed and k.shape == q.shape == v.shape:
        return getattr(hk, f"{call.op}_qkvpacked")(torch.stack([q, k, v], 2), *more, **options)
    return f(q, k, v, *more, **options)


def transitions(call: Call) -> list[str]:
    """The names of the leaves of `delta` after v."""
    return [*["log_f"] * (call.extra["log_f"] is not None), *["a", "b"] * (call.extra["removed"] > 0)]


def in_pieces(
    call: Call, f: Callable, q: Tensor, k: Tensor, v: Tensor, more: list[Tensor], rotary: Any, options: dict[str, Any]
) -> Tensor:
    """The outputs of all segments."""
    outs, at, state, per_token = [], 0, None, {}
    for length in call.pieces:
        part = slice(at, at + length)
        if rotary is not None:
            options["rotary"] = tuple(t[part] for t in rotary)
        if call.op == "delta":
            names = [name for name in transitions(call) if options[name].dim() > 1]
            per_token = {name: options[name][:, part] for name in names}
        y, state = f(
            q[:, part], k[:, part], v[:, part], *more, **{**options, **per_token}, state=state, return_state=True
        )
        outs.append(y)
        at += length
    return torch.cat(outs, 1)


def truth(call: Call, x: Inputs, dtype: torch.dtype, **changes: Any) -> list[Tensor]:
    """The same of the dense definitions in a precision; changes: of options."""
    leaves = [t.detach().to(dtype).requires_grad_() for t in (x.q, x.k, x.v, *x.more)]
    options = {**call.options, **changes}
    q, k, v = (t.transpose(1, 2) for t in leaves[:3])
    more = leaves[3:]
    if call.extra.get("power"):
        q, k = (dense.power(t, p, DTYPES[call.dtype], options) for t, p in zip((q, k), more[-2:], strict=True))
        more = more[:-2]
    q, k, v = (t.repeat_interleave(call.h // t.shape[1], 1) for t in (q, k, v))
    rows = []
    for i in range(call.b):
        keep = torch.ones(call.n, dtype=torch.bool, device=q.device) if x.mask is None else x.mask[i]
        rows.append(sample(call, x, options, (q[i], k[i], v[i]), more, keep, i))
    y = torch.stack(rows).transpose(1, 2) if rows else q.new_zeros(0, call.n, call.h, call.dv)
    y = y + 0 * sum(t.sum() for t in leaves)  # where no token is real
    return [y.detach(), *gradients(y, leaves, x.grad)]


def sample(
    call: Call, x: Inputs, options: dict[str, Any], tokens: tuple[Tensor, ...], more: list[Tensor], keep: Tensor, i: int
) -> Tensor:
    """One row of the batch, [H, N, Dv]."""
    options = of_few(options, int(keep.sum()))
    if call.op in ("mhla", "multipole", "adaptive_multipole"):  # tokens have places
        q, k, v = (t.where(keep[:, None], 0) for t in tokens)
        if call.op != "mhla":
            definition = dense.multipole if call.op == "multipole" else dense.adaptive_multipole
            y = definition(q, k, v, keep, options) if bool(keep.any()) else torch.zeros_like(v)
        else:
            shared = [t if t.dim() == 3 else t[:, None] for t in x.rotary or ()]
            rotary = tuple(t.transpose(0, 1).to(q.dtype) for t in shared) or None
            y = dense.mhla(q, k, v, more[0] if more[0].dim() == 3 else more[0][None], keep, rotary, options)
        return y.where(keep[:, None], 0)
    spans = [keep.nonzero()[:, 0]]
    if "lengths" in call.extra:
        spans = list(torch.arange(call.n, device=keep.device).split(call.extra["lengths"]))
    out = tokens[2].new_zeros(call.h, call.n, call.dv)
    for span in spans:
        if len(span):
            out = out.index_copy(1, span, whole(call, options, [t[:, span] for t in tokens], more, span, i))
    return out


def whole(
    call: Call, options: dict[str, Any], tokens: list[Tensor], more: list[Tensor], span: Tensor, i: int
) -> Tensor:
    """One sequence, [H, N, Dv]."""
    options = of_few(options, len(span))
    if call.op == "taylor2":
        narrow = [t[i].transpose(0, 1).repeat_interleave(call.h // t.shape[2], 0)[:, span] for t in more[1:3]]
        return dense.taylor2(*tokens, more[0], narrow or None, options)
    if call.op == "softmax_attention":
        return dense.softmax(*tokens, options)
    if call.op == "delta":
        given = dict(zip(transitions(call), more, strict=True))
        rows = {k: x if x.dim() == 1 else x[i].transpose(0, 1) for k, x in given.items()}
        return dense.delta(*tokens, *(rows.get(name) for name in ("log_f", "a", "b")))
    gamma, decay = None, call.extra.get("decay")
    if decay is not None:
        gamma = more[-1] if isinstance(decay, str) else tokens[0].new_full((call.h,), decay)
        gamma = gamma.repeat_interleave(call.h // len(gamma))
    c = more[0] if call.op == "polynomial" else None
    ends, at = [], 0
    pieces = () if options.get("causal") else call.pieces
    for length in pieces or (len(span),):  # the tokens of each segment read all tokens so far
        at += length
        ends.append(dense.linear(call.op, *(t[:, :at] for t in tokens), c, gamma, options)[:, at - length :])
    return torch.cat(ends, 1)


def of_few(options: dict[str, Any], tokens: int) -> dict[str, Any]:
    """Means and denominators are held in sequences of few tokens alone."""
    return options | {"held": bool(options.get("held")) and tokens <= FEW}


def fewest(call: Call, x: Inputs) -> int:
    """The real tokens of the shortest sequence that has any."""
    lengths = call.extra.get("lengths") or ([call.n] if x.mask is None else x.mask.sum(1).tolist())
    return min((length for length in lengths if length), default=0)


def allowed(call: Call, x: Inputs, exact: list[Tensor], fast: bool) -> list[float]:
    """How far a result may be from the truth: the rounding of the result, and of the terms that it sums, which may
    cancel; and the rounding of the gradient of features, which `power` gets."""
    sdpa = call.op == "softmax_attention" and call.impl != "reference"  # torch's own kernels round weights to 16 bits
    own = ROUNDING[call.dtype] * (FAST if fast or sdpa else 1.0)
    info = torch.finfo(DTYPES[call.dtype])
    least = info.smallest_normal * info.eps  # numbers of float16 end soon
    terms = of_products(call, x) if call.op in LINEAR or call.op == "mhla" else of_softmax(call, x, exact)
    cancelled = float(x.v.double().square().mean().sqrt() * x.grad.double().norm()) if sdpa and x.v.numel() else 0.0
    few = fast and fewest(call, x) <= FEW
    parts = truth(call, x, torch.float64, held=few, apart=True) if few or call.extra.get("power") else exact
    return [
        own * max(float(t.norm()), float(part.norm()), cancelled) + lost + least * t.numel() ** 0.5 + 1e-30
        for t, part, lost in zip(exact, parts, terms, strict=True)
    ]


def of_products(call: Call, x: Inputs) -> list[float]:
    """The likely rounding of sums of products in any order, from the magnitudes of their terms: see
    `tests.campaign.dense`. A path has at most four sums over tokens and four over channels (third order and its
    gradient), of twice the channels for pairs of softmaxes, and as many more for the sums of a feature map; `mhla` also
    sums over blocks."""
    operations = 4 * (call.n + 4 * call.d + math.prod(call.options.get("blocks", (0,))))
    unit = LIKELY * operations**0.5 * ROUNDOFF.get(call.dtype, 2.0**-24)
    sizes = truth(call, replace(x, grad=x.grad.abs()), torch.float64, magnitudes=True)
    return [unit * float(t.norm()) for t in sizes]


def of_softmax(call: Call, x: Inputs, exact: list[Tensor]) -> list[float]:
    """From the rounding of the dense definition in float32. What cancels is as large as the result, or as a value times
    the gradient of an output."""
    unit = UNIT if call.dtype == "float64" else 1.0
    lost = CANCELLED + (DECAYED if call.extra.get("log_f") else 0.0)
    value = float(x.v.double().norm()) / max(1, x.v.numel()) ** 0.5 * float(x.grad.double().norm())
    return [
        unit * (TIMES * float((r.double() - t).norm()) + lost * max(float(t.norm()), value))
        for t, r in zip(exact, truth(call, x, torch.float32), strict=True)
    ]


def check(call: Call, device: str, figures: Figures | None = None) -> str:
    """What is wrong with a call, "" if nothing is. Raises Refused."""
    x, faults = tensors(call, device), set(verify.VERDICTS.values())
    try:
        with poisoned(device):
            found = run(call, x)
            again = run(call, x) if device == "cuda" else found
    except Refused:
        raise
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    if refused := set(verify.VERDICTS.values()) - faults - {None}:  # auto ran torch instead
        return str(refused.pop())
    fixed = 1 if call.op == "softmax_attention" else len(found)  # torch sums the gradients of softmax in any order
    if not all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(found[:fixed], again[:fixed], strict=True)):
        return "two runs differ"
    exact = truth(call, x, torch.float64)
    limits = allowed(call, x, exact, device == "cuda")
    for name, a, t, limit in zip(("o", "dq", "dk", "dv", *"1234"), found, exact, limits, strict=False):
        if not bool(t.isfinite().all()) or float(t.abs().max() if t.numel() else 0) > torch.finfo(a.dtype).max / 4:
            continue
        if a.shape != t.shape:
            return f"{name} has shape {tuple(a.shape)} instead of {tuple(t.shape)}"
        error = float((a.double() - t).norm())
        if figures is not None and figures.worst.get(call.op, 0.0) < error / limit < math.inf:
            figures.worst[call.op], figures.closest[call.op] = error / limit, f"{name} of {call}"
        if not error <= limit:
            return f"{name} is off by {error:.2e}, allowed are {limit:.2e} of {float(t.norm()):.2e}"
    return ""


@contextlib.contextmanager
def poisoned(device: str) -> Iterator[None]:
    """Buffers start as NaN (scratch memory as ones, which are NaN in every floating type)."""
    if device != "cuda":
        yield
        return
    names, real = ("empty", "empty_like", "empty_strided"), {}

    def filled(x: Tensor) -> Tensor:
        with torch.no_grad():
            return x.fill_(255) if x.dtype == torch.uint8 else x.fill_(float("nan")) if x.is_floating_point() else x

    for name in names:
        real[name] = getattr(torch, name)
        setattr(torch, name, lambda *a, new=real[name], **k: filled(new(*a, **k)))
    try:
        yield
    finally:
        for name in names:
            setattr(torch, name, real[name])


def reduced(call: Call, complaint: str, device: str) -> Call:
    """A smaller call with the same kind of complaint."""
    kind, steps, end = complaint.split()[0:2], 0, time.monotonic() + REDUCING
    while True:
        for other in smaller(call):
            steps += 1
            if steps > STEPS or time.monotonic() > end:
                return call
            try:
                found = check(other, device)
            except Exception:  # a change that makes no call
                continue
            if found.split()[0:2] == kind:
                call = other
                break
        else:
            return call


def attack(seed: int, calls: int, seconds: float, device: str) -> Figures:
    """Try so many calls, or for so many seconds; print each failure as it is found."""
    figures, end = Figures(), time.monotonic() + seconds
    for i in range(calls):
        if time.monotonic() > end:
            break
        call = draw(random.Random(f"{seed} {i}"), device == "cuda")
        figures.calls += 1
        try:
            complaint = check(call, device, figures)
        except Refused:
            figures.refused += 1
            continue
        figures.kinds[call.op] += 1
        if complaint:
            figures.failures.append(f"{complaint}: {reduced(call, complaint, device)} (number {i} of seed {seed})")
            print(figures.failures[-1], flush=True)
        if device == "cuda":
            torch.cuda.empty_cache()  # for other processes on the same GPU
    return figures


def main(seed: int, calls: int, seconds: float, device: str = "cpu", out: str = "") -> int:
    """Print the figures of `attack`, and write them to the file `out`. Returns the exit code."""
    warnings.simplefilter("ignore")
    figures = attack(seed, calls, seconds, device)
    if out:
        Path(out).write_text(json.dumps({"seed": seed, "device": device, **vars(figures)}, indent=1) + "\n")
    print(f"calls {figures.calls}, compared {sum(figures.kinds.values())}, refused {figures.refused}, "
          f"failed {len(figures.failures)}")  # fmt: skip
    for op, count in sorted(figures.kinds.items()):
        print(f"  {op:<18} {count:>6} compared, largest error {figures.worst.get(op, 0.0):.2f} of what is allowed")
    return int(bool(figures.failures))


def cases(folder: Path, seed: int) -> list[Case]:
    """Batches of calls on the CPU for `tests.campaign`, each in a process of its own."""

    def check(place: Path, number: int) -> str:
        result = fork(lambda: sys.exit(main(number, BATCH, 300.0)), cwd=place, limit=600.0)
        return "" if result.code == 0 else (result.out + result.err)[-600:]

    command = f"python -m tests.campaign.operators --calls {BATCH} --seed "
    numbers = range(seed * BATCHES, (seed + 1) * BATCHES)
    return [Case(f"batch-{n}", lambda place, n=n: check(place, n), f"{command}{n}") for n in numbers]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", default="", help="file for the figures and failures as JSON")
    sys.exit(main(**vars(parser.parse_args())))
