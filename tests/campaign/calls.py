"""Random calls of the operators: what is drawn, the tensors of it, and smaller ones."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

LINEAR = ("linear_attention", "hla2", "ahla", "hla3", "polynomial")
OPS = (*LINEAR, "mhla", "taylor2", "multipole", "adaptive_multipole", "softmax_attention", "delta")
MAPS = (None, "identity", "relu", "elu1", "softmax", "softmax_pair", "power")
DTYPES = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Call:
    """A call as plain values. options: keywords that are passed as they are; extra: what tensors are made of (mask,
    lengths, decay, rotary, mixing, narrow, rank, log_f, removed, power); pieces: lengths of the segments of a call with
    a state, () for none."""

    op: str
    dtype: str
    b: int
    n: int
    h: int
    hk: int
    d: int
    dv: int
    seed: int
    layout: str = "plain"
    impl: str = "auto"
    mean: float = 0.0
    size: float = 1.0
    options: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    pieces: tuple[int, ...] = ()


def draw(rng: random.Random, gpu: bool) -> Call:
    """One random call; a few are refused."""
    op = rng.choice(OPS)
    h = rng.choice((1, 2, 3, 4, 6, 12) if gpu else (1, 2, 3, 4))
    hk = rng.choice([x for x in range(1, h + 1) if h % x == 0]) if rng.random() < 0.4 else h
    if gpu:
        n = rng.choice((1, 2, 5, 16, 17, 63, 64, 65, 127, 197, 257, 577, 1025, rng.randint(1, 1500)))
        b = rng.choice((1, 2, 3, 8, 32)) if n < 600 else rng.choice((1, 2))
        d = rng.choice((16, 24, 32, 40, 48, 64, 64, 72, 72, 80, 96, 112, 128))
        dv = d if rng.random() < 0.7 else rng.choice((16, 32, 48, 64, 72, 96, 128))
        dtype = rng.choice(("bfloat16", "bfloat16", "float16", "float32"))
    else:
        n, b, d = rng.choice((1, 2, 3, 5, 8, 17, 40, 65, 130)), rng.choice((0, 1, 1, 2, 3)), rng.randint(1, 12)
        dv = d if rng.random() < 0.5 else rng.randint(1, 12)
        dtype = rng.choice(("float64", "float64", "float32", "bfloat16", "float16"))
    layout = rng.choice(("plain", "plain", "heads first", "packed" if hk == h and d == dv else "plain"))
    call = Call(
        op, dtype, b, n, h, hk, d, dv, rng.randrange(2**31), layout,
        "auto" if gpu else rng.choice(("auto", "torch", "reference")), rng.choice((0.0, 0.0, 0.5, -1.0)),
    )  # fmt: skip
    return DRAW.get(op, _linear)(rng, call, gpu)


def _linear(rng: random.Random, call: Call, gpu: bool) -> Call:
    name, options, extra = features(rng)
    causal = call.op != "polynomial" and rng.random() < (0.1 if gpu else 0.4)
    if name not in (None, "identity") and rng.random() < 0.6:
        options |= {"normalize": True, "eps": rng.choice((1e-12, 1e-6, 0.1))}
    else:
        options |= {"center": rng.choice((None, None, "k", "qk")), "mean_path": rng.random() < 0.3}
    if call.op in ("hla2", "ahla", "hla3") and rng.random() < 0.3:
        options["ridge"] = rng.choice((0.1, 1.0))
    options |= {"scale": rng.choice((None, None, 1 / 64, 0.3)), "q_scale": rng.choice((1.0, 1.0, call.d**-0.5))}
    pieces: tuple[int, ...] = ()
    if causal:
        options["causal"] = True
        extra["decay"] = rng.choice((None, None, 0.9, 0.5, 1.0, "heads", "keys"))
        if call.op == "hla2" and rng.random() < 0.3:
            options["decay_rule"] = "paper"
    elif rng.random() < 0.3:
        extra["mask"] = rng.choice((0.3, 0.8, 1.0))
    elif rng.random() < 0.15:
        cuts = sorted(rng.randint(0, call.n) for _ in range(rng.randint(0, 3)))
        extra["lengths"] = [b - a for a, b in zip([0, *cuts], [*cuts, call.n], strict=True)]
        return replace(call, b=1, options=options, extra=extra)
    if not extra.get("mask") and rng.random() < 0.15 and call.impl != "reference":
        pieces = segments(rng, call.n)
    return replace(call, options=options, extra=extra, pieces=pieces)


def features(rng: random.Random) -> tuple[str | None, dict[str, Any], dict[str, Any]]:
    """A feature map, with its option and extra: `power` comes before the operator."""
    name = rng.choice(MAPS)
    if name == "power":
        return name, {"feature_map": "identity"}, {"power": True}
    return name, {"feature_map": name}, {}


def segments(rng: random.Random, n: int) -> tuple[int, ...]:
    """n cut into lengths."""
    found = []
    while n:
        found.append(min(n, rng.choice((1, 1, 2, 7, 33, n))))
        n -= found[-1]
    return tuple(found)


def field_of(rng: random.Random, gpu: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A grid and its blocks."""
    axes = rng.choice((1, 2, 2, 3))
    most = (1200, 36, 10) if gpu else (60, 9, 5)
    grid = tuple(rng.randint(1, most[axes - 1]) for _ in range(axes))
    return grid, tuple(rng.randint(1, min(length, 8)) for length in grid)


def _mhla(rng: random.Random, call: Call, gpu: bool) -> Call:
    grid, blocks = field_of(rng, gpu)
    causal = rng.random() < 0.3
    if causal:
        blocks = (blocks[0], *[1] * (len(grid) - 1))
    prefix, (name, options, extra) = rng.choice((0, 0, 1, 3)), features(rng)
    normalize = name is not None and name != "identity" and rng.random() < 0.6
    n = prefix + math.prod(grid)
    options |= {
        "grid": grid, "blocks": blocks, "prefix": prefix, "normalize": normalize,
        "order": rng.choice(("la", "ahla", "hla2")), "scale": rng.choice((None, None, 0.3)),
        "q_scale": rng.choice((1.0, call.d**-0.5)), "moments": rng.choice(("bfloat16", "float32")),
    }  # fmt: skip
    extra["mixing"] = rng.choice(("shared", "heads"))
    if causal:
        options["causal"] = True
        n = rng.randint(1, n)
    elif rng.random() < 0.3:
        extra["mask"] = rng.choice((0.3, 0.8))
    if rng.random() < 0.4:
        extra["rotary"], options["rotary_half"] = rng.choice(("shared", "own")), rng.random() < 0.5
        call = replace(call, d=call.d + call.d % 2, dv=call.dv + call.dv % 2, layout="plain")
    pieces = segments(rng, n) if causal and rng.random() < 0.4 and call.impl != "reference" else ()
    return replace(call, n=n, b=min(call.b, 2), options=options, extra=extra, pieces=pieces)


def _taylor2(rng: random.Random, call: Call, gpu: bool) -> Call:
    extra: dict[str, Any] = {"mask": 0.7} if rng.random() < 0.3 else {}
    if rng.random() < 0.4:
        extra["narrow"] = rng.choice((16, 24)) if gpu else rng.randint(1, 6)
        call = replace(call, layout="plain")
    options = {"normalize": rng.random() < 0.7, "q_scale": rng.choice((1.0, call.d**-0.5))}
    return replace(call, b=min(call.b, 3), options=options, extra=extra)


def _multipole(rng: random.Random, call: Call, gpu: bool) -> Call:
    grid, blocks = field_of(rng, gpu)
    prefix, suffix = rng.choice((0, 0, 1, 3)), rng.choice((0, 0, 2))
    extra: dict[str, Any] = {"mask": 0.7} if rng.random() < 0.2 else {}
    options: dict[str, Any] = {
        "grid": grid, "prefix": prefix, "suffix": suffix, "q_scale": call.d**-0.5 * rng.choice((0.5, 1.0)),
    }  # fmt: skip
    if call.op == "multipole":
        options |= {"blocks": blocks, "radius": rng.choice((0, 1, 2, 3, 50)), "degree": rng.choice((0, 1, 2))}
    else:  # a selection by scores is a matter of rounding, except in float64
        select = rng.choice(("error", "mass", "mean", "near")) if call.dtype == "float64" else "near"
        tiles = {"q_tile": rng.choice((1, 4, 16, 64)), "k_tile": rng.choice((1, 4, 16))}
        options |= {"select": select, "far": rng.choice(("mean", "variance", "first", "none")), **tiles}
        options["density"] = rng.choice((0.05, 0.125, 0.4, 1.0))
    return replace(
        call, n=math.prod(grid) + prefix + suffix, b=min(call.b, 2), layout="plain", options=options, extra=extra
    )


def _softmax(rng: random.Random, call: Call, gpu: bool) -> Call:
    options = {"scale": rng.choice((None, None, 0.3)), "causal": rng.random() < 0.4}
    extra = {} if options["causal"] else rng.choice(({}, {"mask": 0.7}, {"lengths": list(segments(rng, call.n))}))
    return replace(call, b=1 if "lengths" in extra else call.b, options=options, extra=extra)


def _delta(rng: random.Random, call: Call, gpu: bool) -> Call:
    extra = {"rank": rng.choice((0, 0, 1, 3)), "removed": rng.choice((0, 1, 1, 3))}
    extra["log_f"] = rng.choice((None, "head", "token", "channel"))
    pieces = segments(rng, call.n) if rng.random() < 0.3 else ()
    impl = rng.choice(("auto", "torch", "reference"))
    return replace(call, hk=call.h, b=min(call.b, 2), layout="plain", impl=impl, extra=extra, pieces=pieces)


DRAW = {
    "mhla": _mhla, "taylor2": _taylor2, "multipole": _multipole, "adaptive_multipole": _multipole,
    "softmax_attention": _softmax, "delta": _delta,
}  # fmt: skip


@dataclass
class Inputs:
    """The tensors of a call: leaves that get gradients, in the order of the arguments, and the others."""

    q: Tensor
    k: Tensor
    v: Tensor
    more: list[Tensor]  # coefficients, mixing, narrow queries and keys, decay, exponents; or log_f, a, b of `delta`
    grad: Tensor
    mask: Tensor | None
    rotary: tuple[Tensor, Tensor] | None


def tensors(call: Call, device: str) -> Inputs:
    """Tensors by the seed of the call."""
    g = torch.Generator().manual_seed(call.seed)
    dtype = DTYPES[call.dtype]

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    def tokens(heads: int, width: int, mean: float) -> Tensor:
        x = (call.size * normal(call.b, call.n, heads, width) + mean).to(device, dtype)
        return x.transpose(1, 2).contiguous().transpose(1, 2) if call.layout == "heads first" else x

    q, k, v = tokens(call.h, call.d, call.mean), tokens(call.hk, call.d, 0.0), tokens(call.hk, call.dv, call.mean)
    if call.layout == "packed" and call.hk == call.h and call.d == call.dv:
        q, k, v = torch.stack([q, k, v], 2).unbind(2)
    wide, more = torch.float64 if dtype == torch.float64 else torch.float32, []
    if call.op in ("polynomial", "taylor2"):
        c = torch.rand(call.h, 4 if call.op == "polynomial" else 2, generator=g, dtype=torch.float64) + 0.1
        more.append(c.to(device, wide))
    if call.op == "mhla":
        m = math.prod(call.options["blocks"]) + (call.options.get("prefix", 0) > 0)
        shape = (m, m) if call.extra["mixing"] == "shared" else (call.h, m, m)
        more.append(torch.rand(shape, generator=g, dtype=torch.float64).to(device, wide))
    if width := call.extra.get("narrow"):
        more += [normal(call.b, call.n, heads, width).to(device, dtype) for heads in (call.h, call.hk)]
    if isinstance(call.extra.get("decay"), str):
        heads = call.h if call.extra["decay"] == "heads" else call.hk
        more.append((0.5 + 0.5 * torch.rand(heads, generator=g, dtype=torch.float64)).to(device, wide))
    if call.extra.get("power"):
        heads = (call.h, call.hk)
        more += [(1.5 + 3.5 * torch.rand(h, generator=g, dtype=torch.float64)).to(device, wide) for h in heads]
    if call.op == "delta":
        if rank := call.extra["rank"]:
            k, v = (tokens(call.h * rank, width, 0.0).unflatten(2, (call.h, rank)) for width in (call.d, call.dv))
        more += _transitions(call, g, dtype, wide, device)
    mask = None
    if kept := call.extra.get("mask"):
        mask = (torch.rand(call.b, call.n, generator=g) < kept).to(device)
    rotary = None
    if kind := call.extra.get("rotary"):
        angles = normal(call.n, *([call.h] if kind == "own" else []), call.d // 2).to(device, wide)
        rotary = angles.cos(), angles.sin()
    return Inputs(q, k, v, more, normal(call.b, call.n, call.h, call.dv).to(device, dtype), mask, rotary)


def _transitions(
    call: Call, g: torch.Generator, dtype: torch.dtype, wide: torch.dtype, device: str
) -> list[Tensor]:
    """log_f, a and b of `delta`, each only if the call has it. States do not grow: b is a unit vector, a is near it."""
    full = (call.b, call.n, call.h, call.d)
    shapes = {"head": full[2:3], "token": full[:3], "channel": full}
    found = []
    if (kind := call.extra["log_f"]) is not None:
        found.append(-0.5 * torch.rand(shapes[kind], generator=g, dtype=torch.float64).to(device, wide))
    if rank := call.extra["removed"]:
        b, noise = torch.randn(2, *full[:3], rank, call.d, generator=g, dtype=torch.float64).unbind()
        b = b / b.norm(dim=-1, keepdim=True)
        a = (b + 0.1 * noise / call.d**0.5) / rank
        found += [x.to(device, dtype) for x in (a, b)]
    return found


def smaller(call: Call) -> Iterator[Call]:
    """Simpler calls, the largest steps first."""
    if call.pieces:
        yield replace(call, pieces=())
        yield replace(call, pieces=(call.n,))
    for name in ("extra", "options"):
        value = getattr(call, name)
        for key in sorted(value.keys() - {"grid", "blocks", "mixing", "lengths", "rank", "removed", "log_f"}):
            yield replace(call, **{name: {other: x for other, x in value.items() if other != key}})
    sizes = {"b": (1, 2), "h": (1, 2), "hk": (1, call.h), "d": (1, 2, 4, 16, 64), "dv": (1, 2, 4, 16, 64)}
    for name, values in sizes.items():
        for value in values:
            if value < getattr(call, name):
                yield replace(call, **{name: value})
    if "grid" not in call.options and "lengths" not in call.extra and not call.pieces:
        for n in (1, 2, 4, call.n // 2, call.n - 1):
            if 0 < n < call.n:
                yield replace(call, n=n)
    for name, value in (("layout", "plain"), ("impl", "auto"), ("mean", 0.0), ("dtype", "float64")):
        if getattr(call, name) != value:
            yield replace(call, **{name: value})
