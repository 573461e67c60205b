"""Timed implementations: functions of one packed qkv [B, N, 3, H, D] that return [B, N, H, D].

The gradient is one packed tensor. Copies that an implementation needs for its own layout count.
"""

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import hla_kernels
from benchmarks.formulas import POWER, angles, causal, locality, mixed, multipole, plain, softmax, taylor
from benchmarks.shapes import ALL_SHAPES, FIELDS, GRIDS
from hla_kernels.features.power import power_pair

Call = Callable[[Tensor, Tensor | None], Tensor]  # (qkv, `coefficients` of the case) -> o
OPTIONS: dict[str, dict[str, Any]] = {
    "identity": {},
    "elu1_ratio": {"feature_map": "elu1", "normalize": True},
    "center_mean": {"center": "k", "mean_path": True},
    "relu": {"feature_map": "relu", "normalize": False},
    "relu_ratio": {"feature_map": "relu", "normalize": True},
    "pair_ratio": {"feature_map": "softmax_pair", "normalize": True},
    "power_ratio": {"feature_map": "power", "normalize": True},  # ours: features by `power_pair`, before the operator
}
# mhla only; rotary: tables of `formulas.angles`
MIXED_OPTIONS: dict[str, dict[str, Any]] = {
    "relu": OPTIONS["relu"],
    "relu_ratio": OPTIONS["relu_ratio"],
    "float32": OPTIONS["relu_ratio"] | {"moments": "float32"},
    "rotary": OPTIONS["relu"] | {"rotary": True},
    "rotary_ratio": OPTIONS["relu_ratio"] | {"rotary": True},
    "order_ahla": OPTIONS["relu"] | {"order": "ahla"},
    "order_hla2": OPTIONS["relu"] | {"order": "hla2"},
}
FIXED = {"fixed": {"fixed": True}}  # our polynomial only: coefficients without gradient
DEGREES = {"degree0": 0, "degree1": 1}  # multipole only
OTHERS = ("mhla", "taylor2", "multipole")
PACKAGES = {"fla": "fla.ops.linear_attn", "flash_bla": "flash_bla.ops.simple_la.fused"}
CHECKOUTS = {"flash_bla": "fla-org/flash-bidirectional-linear-attention"}  # not on PyPI, no licence file


class Case(NamedTuple):
    """One line of the table. options: options of the operator, as in `hla_kernels`."""

    shape: str
    op: str
    impl: str
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def title(self) -> str:
        """Text of the progress bar."""
        return " ".join([self.shape, self.impl, self.op, *(f"{k}={v}" for k, v in self.options)])


def cases(shapes: Iterable[str], ops: Iterable[str], impls: Iterable[str], options: Iterable[str]) -> list[Case]:
    """Return all cases of the selection. Softmax and causal peers have one operator each, whatever `ops` selects."""
    out = []
    for shape in shapes:
        for impl in impls:
            if impl.startswith("sdpa"):
                out.append(Case(shape, "softmax_attention", impl))
            elif impl == "fla":
                out.append(Case(shape, "linear_attention", impl, (("causal", True),)))
            elif impl == "flash_bla":
                out.append(Case(shape, "linear_attention", impl))
            else:
                chosen = [o for o in options if o in OPTIONS and (impl != "compiled" or o == "identity")]
                plain_ops = [op for op in ops if op not in OTHERS]
                out += [Case(shape, op, impl, tuple(OPTIONS[o].items())) for op in plain_ops for o in chosen]
                if "polynomial" in ops and impl == "ours":
                    out += [Case(shape, "polynomial", impl, tuple(FIXED[o].items())) for o in options if o in FIXED]
                if "mhla" in ops and impl != "compiled":
                    out += _mixed_cases(shape, impl, [o for o in options if o in MIXED_OPTIONS])
                if "taylor2" in ops:
                    out.append(Case(shape, "taylor2", impl))
                if "multipole" in ops and impl != "compiled":
                    out += _near_and_far_cases(shape, impl, [DEGREES[o] for o in options if o in DEGREES])
    return out


def _mixed_cases(shape: str, impl: str, options: list[str]) -> list[Case]:
    """`mhla` for each division of the grid of a shape, if it has a grid."""
    grid, cuts = GRIDS.get(shape, ((), ()))
    where = [{"grid": grid, "blocks": blocks} for blocks in cuts]
    return [Case(shape, "mhla", impl, tuple((MIXED_OPTIONS[o] | w).items())) for w in where for o in options]


def _near_and_far_cases(shape: str, impl: str, degrees: list[int]) -> list[Case]:
    """`multipole` on the grid of a shape, if it has one."""
    if shape not in FIELDS:
        return []
    grid, blocks, radius = FIELDS[shape]
    each = [{"grid": grid, "blocks": blocks[degree], "radius": radius, "degree": degree} for degree in degrees]
    return [Case(shape, "multipole", impl, tuple(options.items())) for options in each]


def why_unavailable(impl: str) -> str | None:
    """Return which package a peer lacks, or None."""
    package = PACKAGES.get(impl)
    if package and not importlib.util.find_spec(package.partition(".")[0]):
        checkout = f" (on no package index: it needs a checkout of {CHECKOUTS[impl]})" if impl in CHECKOUTS else ""
        return f"{impl}: the package {package.partition('.')[0]} is not installed{checkout}"
    return None


def make(case: Case) -> Call:
    """Build the function to time."""
    return MAKERS[case.impl](case.op, dict(case.options))


def coefficients(case: Case, device: str) -> Tensor | None:
    """Return the learned coefficients of an operator, or None.

    polynomial: [H, 4]. taylor2: [H, 2]. mhla: mixing matrix [M, M]. They have a gradient unless they are `FIXED`.
    """
    if case.op == "mhla":
        return locality(dict(case.options)["blocks"]).to(device).requires_grad_()
    if case.op == "taylor2":
        return torch.ones(ALL_SHAPES[case.shape].h, 2, device=device).requires_grad_()
    if case.op != "polynomial":
        return None
    row = torch.tensor([1.0, 0.5, 0.25, 0.125], device=device)
    return row.repeat(ALL_SHAPES[case.shape].h, 1).requires_grad_("fixed" not in dict(case.options))


def inputs_with_grad(qkv: Tensor, c: Tensor | None) -> list[Tensor]:
    """Return the inputs whose gradient is computed."""
    return [x for x in (qkv, c) if x is not None and x.requires_grad]


def formula(op: str, options: dict[str, Any], q: Tensor, k: Tensor, v: Tensor, c: Tensor | None) -> Tensor:
    """Compute an operator in plain torch, in the dtype of q, k, v [B, H, N, D]."""
    if op == "softmax_attention":
        return softmax(q, k, v)
    if op in ("mhla", "taylor2"):
        assert c is not None
        return mixed(q, k, v, c, **options) if op == "mhla" else taylor(q, k, v, c)
    if op == "multipole":
        return multipole(q, k, v, **options)
    return causal(q, k, v) if options.get("causal") else plain(op, q, k, v, c, **options)


def of_operator(options: dict[str, Any], qkv: Tensor) -> dict[str, Any]:
    """Convert the options of a case to operator arguments: rotary tables are tensors, `fixed` and `power` removed."""
    options = {k: "identity" if v == "power" else v for k, v in options.items() if k != "fixed"}
    if not options.get("rotary"):
        return options
    return options | {"rotary": angles(qkv.shape[1], qkv.shape[4], qkv.device)}


def _ours(op: str, options: dict[str, Any]) -> Call:
    if op == "multipole":
        return lambda qkv, c: hla_kernels.multipole(*qkv.unbind(2), **options, q_scale=qkv.shape[-1] ** -0.5)
    packed = getattr(hla_kernels, f"{op}_qkvpacked")
    if options.get("feature_map") == "power":
        return partial(_behind_power, getattr(hla_kernels, op), options)
    if op == "taylor2":
        return lambda qkv, c: packed(qkv, c, q_scale=qkv.shape[-1] ** -0.5)
    if op in ("mhla", "polynomial"):
        return lambda qkv, c: packed(qkv, c, **of_operator(options, qkv))
    return lambda qkv, c: packed(qkv, **options)


def _behind_power(operator: Callable[..., Tensor], options: dict[str, Any], qkv: Tensor, c: Tensor | None) -> Tensor:
    """Apply the map `power` to q and k with one exponent per head, and an operator to the features."""
    q, k, v = qkv.unbind(2)
    exponents = _exponents(qkv.shape[3], qkv.device)
    features = power_pair(q, k, exponents, exponents)
    return operator(*features, v, *(() if c is None else (c,)), **of_operator(options, qkv))


@functools.lru_cache
def _exponents(heads: int, device: torch.device) -> Tensor:
    return torch.full((heads,), POWER, device=device)


def _heads(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = qkv.transpose(1, 3).unbind(2)
    return q, k, v


def _eager(op: str, options: dict[str, Any]) -> Call:
    return lambda qkv, c: formula(op, options, *_heads(qkv), c).transpose(1, 2).contiguous()


def _compiled(op: str, options: dict[str, Any]) -> Call:
    torch._dynamo.reset()  # compile each case for its own shape, as with one resolution
    return torch.compile(_eager(op, options), dynamic=False)


def _sdpa(backend: SDPBackend, op: str, options: dict[str, Any]) -> Call:
    def call(qkv: Tensor, c: Tensor | None) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(*_heads(qkv)).transpose(1, 2).contiguous()

    return call


def _fla(op: str, options: dict[str, Any]) -> Call:
    chunk = importlib.import_module(PACKAGES["fla"]).chunk_linear_attn
    return lambda qkv, c: chunk(*qkv.unbind(2), scale=1.0, normalize=False)[0]


def _flash_bla(op: str, options: dict[str, Any]) -> Call:
    simple = importlib.import_module(PACKAGES["flash_bla"]).simple_la

    def call(qkv: Tensor, c: Tensor | None) -> Tensor:
        q, k, v = (x.contiguous() for x in _heads(qkv))
        return simple(q, k, v, scale=1 / q.shape[2]).transpose(1, 2).contiguous()

    return call


MAKERS: dict[str, Callable[[str, dict[str, Any]], Call]] = {
    "ours": _ours,
    "sdpa_cudnn": partial(_sdpa, SDPBackend.CUDNN_ATTENTION),
    "sdpa_flash": partial(_sdpa, SDPBackend.FLASH_ATTENTION),
    "eager": _eager,
    "compiled": _compiled,
    "fla": _fla,
    "flash_bla": _flash_bla,
}
