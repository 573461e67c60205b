"""Helpers of the operator tests: operators and options, random inputs, the tolerance rule, and allocated bytes.

Tolerance rule: a float64 result agrees with the definition to 1e-10 (largest difference); in a lower precision its
relative L2 error against the float64 definition is at most twice that of the definition itself evaluated in that
precision, because single elements at the first tokens cancel and make the largest difference a lottery. No tolerance is
a loosened number.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import hla_kernels as hk
from hla_kernels.hla.reference import reference
from hla_kernels.op import prepare
from tests.ops.recurrent import recurrent

LINEAR = tuple(op for op in hk.OPS if op != "softmax_attention")
CAUSAL = tuple(op for op in LINEAR if op != "polynomial")
RIDGED = ("hla2", "ahla", "hla3")

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": 0.3},
    "ratio_elu1": {"feature_map": "elu1", "normalize": True},
    "ratio_softmax": {"feature_map": "softmax", "normalize": True},
    "ratio_pair": {"feature_map": "softmax_pair", "normalize": True, "q_scale": 0.4},
    "ratio_relu": {"feature_map": "relu", "normalize": True, "eps": 1e-3},
    "center_k": {"center": "k"},
    "center_qk": {"center": "qk", "feature_map": "relu"},
    "mean_path": {"mean_path": True},
    "anchored": {"center": "k", "mean_path": True},
    "anchored_qk": {"center": "qk", "mean_path": True, "scale": 0.2},
    "ridge": {"ridge": 0.3, "q_scale": 0.4},
    "ridge_all": {"ridge": 0.3, "center": "qk", "mean_path": True, "scale": 0.7},
}
DECAYS: dict[str, dict[str, Any]] = {
    "none": {},
    "float": {"decay": 0.9},
    "key_heads": {"decay": torch.tensor([0.9, 0.6], dtype=torch.float64)},
    "heads": {"decay": torch.tensor([0.9, 0.6, 1.0, 0.05], dtype=torch.float64)},
    "paper": {"decay": 0.9, "decay_rule": "paper"},
}


def defined(op: str, options: dict[str, Any]) -> bool:
    """Whether `op` takes these options (the others are errors, tested in test_validation)."""
    if options.get("ridge") and op not in RIDGED:
        return False
    if options.get("causal") and op == "polynomial":
        return False
    paper = options.get("decay_rule") == "paper"
    return not (paper and (op != "hla2" or "center" in options or options.get("normalize")))


BOTH_MODES = [(op, causal) for op in LINEAR for causal in (False, True) if not (causal and op == "polynomial")]


def table(causal: bool, names: tuple[str, ...] = tuple(OPTIONS), product: bool = False) -> list[tuple]:
    """(op, options) pairs with readable ids for pytest.mark.parametrize. Causal ones have decays: all of them with
    `product`, else a Latin square (every operator and every option meet every decay), and the paper's rule."""
    import pytest

    rows, cycle = [], [name for name in DECAYS if name != "paper"]
    for i, op in enumerate(LINEAR):
        for j, name in enumerate(names):
            chosen = DECAYS if product else (cycle[(i + j) % len(cycle)], "paper")
            for decay_name in chosen if causal else [""]:
                decay = DECAYS[decay_name] if causal else {}
                options = {**OPTIONS[name], **decay, "causal": causal}
                if defined(op, options):
                    rows.append(pytest.param(op, options, id="-".join(x for x in (op, name, decay_name) if x)))
    return rows


def tokens(
    n: int = 70, b: int = 2, h: int = 4, hk: int = 2, d: int = 5, dv: int = 3,
    dtype: torch.dtype = torch.float64, seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """q [B, N, H, D], k [B, N, Hk, D], v [B, N, Hk, Dv], unit normal."""
    g = torch.Generator().manual_seed(seed)
    shapes = ((b, n, h, d), (b, n, hk, d), (b, n, hk, dv))
    q, k, v = (torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) for shape in shapes)
    return q, k, v


def coefficients(h: int = 4, dtype: torch.dtype = torch.float64) -> Tensor:
    """[H, 4], all orders present."""
    return torch.randn(h, 4, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(dtype)


def extra(op: str, h: int = 4, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """The arguments after q, k, v."""
    return (coefficients(h, dtype),) if op == "polynomial" else ()


def literal(op: str, q: Tensor, k: Tensor, v: Tensor, *more: Tensor, form: str = "reference", **options: Any) -> Tensor:
    """The definition (or the serial recurrence) evaluated in the dtype of q, without the upcast of
    `impl="reference"`."""
    call = prepare(op, q, k, v, *more, **options)
    gamma = None
    if call.gamma is not None:
        gamma = call.gamma.expand(1, k.shape[2], q.shape[2] // k.shape[2], 1, 1).flatten().to(q.dtype)
    if form == "recurrent":
        return recurrent(op, q, k, v, call.options, gamma)[0]
    return reference(op, q, k, v, call.options, gamma, *more)


def error(x: Tensor, truth: Tensor) -> float:
    """Largest difference, relative to the largest magnitude of the truth."""
    x, truth = x.detach(), truth.detach()
    scale = truth.double().abs().max().clamp(min=1e-3)  # a centred single token is exactly 0
    return float((x.double() - truth.double()).abs().max() / scale)


def l2_error(x: Tensor, truth: Tensor) -> float:
    """Relative L2 error."""
    return float((x.detach().double() - truth.detach()).norm() / truth.detach().norm())


def assert_same(x: Tensor, truth: Tensor, tolerance: float = 1e-10) -> None:
    """float64 agreement."""
    assert x.shape == truth.shape and x.dtype == truth.dtype
    assert error(x, truth) <= tolerance, error(x, truth)


class Allocated(TorchDispatchMode):
    """Bytes of all new storages, whether they live on or not, and the largest one."""

    def __init__(self) -> None:
        super().__init__()
        self.total = self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in given:
                self.total += x.untyped_storage().nbytes()
                self.largest = max(self.largest, x.untyped_storage().nbytes())
        return out


class Constant(torch.autograd.Function):
    """x -> x whose backward says that there is no gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None
