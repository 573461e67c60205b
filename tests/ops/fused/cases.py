"""Inputs, the float64 truth and the forced paths of the tests of the Triton forms."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import hla_kernels
from hla_kernels.hla import fused
from hla_kernels.hla.fused import Spec, plan
from hla_kernels.hla.fused.plan import paths
from hla_kernels.hla.two_sided import evaluate
from hla_kernels.options import Options
from tests.helpers.error_rule import check_coefficients, check_tokens, features_as_read, sizes_of_coefficients

HALF, FULL = torch.float16, torch.float32
FIXED, SCALE, ANCHORED = {"fixed": True}, {"scale": 0.2}, {"center": "k", "mean_path": True}
RATIO, RELU_RATIO = ({"feature_map": name, "normalize": True} for name in ("elu1", "relu"))
# op, options, path, N, D, Dv, heads, dtype, layout: `polynomial` of one program a head, in use for bfloat16 tokens, and
# the sums and moments that it replaces
OF_MIXTURES = [
    *(("polynomial", {}, path, 70, d, d, (2, 2), HALF, "packed") for path, d in (("split", 64), ("roles", 32))),
    ("polynomial", SCALE, "split", 37, 64, 64, (1, 1), HALF, "packed"),
    ("polynomial", {}, "split", 70, 72, 72, (2, 2), HALF, "contiguous"),
    *(("polynomial", FIXED, "split", 70, d, d, (2, 2), HALF, "packed") for d in (64, 72)),
    *(("polynomial", {**FIXED, **SCALE}, "split", 37, d, d, (1, 1), HALF, "contiguous") for d in (64, 72)),
    *(("polynomial", {**FIXED, **more}, "split", 20, 16, 16, (2, 2), FULL, "packed") for more in (ANCHORED, RATIO)),
    ("polynomial", ANCHORED, "split", 37, 32, 32, (2, 2), HALF, "packed"),
    ("polynomial", {"center": "k"}, "split", 37, 32, 32, (1, 1), HALF, "contiguous"),
    *(("polynomial", {**x, **ANCHORED}, "split", 37, 72, 72, (1, 1), HALF, "packed") for x in (FIXED, {})),
    ("polynomial", {**FIXED, **ANCHORED}, "split", 37, 32, 32, (2, 2), HALF, "packed"),
    *(("polynomial", RATIO, "split", n, d, d, (1, 1), HALF, "packed") for n, d in ((37, 32), (40, 72))),
    ("polynomial", {**FIXED, **RATIO}, "split", 37, 72, 72, (1, 1), HALF, "packed"),
    ("polynomial", {**FIXED, **RELU_RATIO}, "split", 37, 32, 32, (2, 2), HALF, "strided"),
]


def truth(spec: Spec, tokens: list[Tensor], grad: Tensor, coefficients: Tensor | None) -> list[Tensor]:
    """o, dq, dk, dv (and d coefficients) of the torch form in float64, by autograd."""
    q, k, v = (x.detach().double().requires_grad_() for x in tokens)
    c = None if coefficients is None else coefficients.detach().double().requires_grad_()
    fq, fk, options = features_as_read(q, k, options_of(spec)._asdict(), tokens[0].dtype)
    y = evaluate(spec.op, fq, fk, v, c, Options(**options))
    wanted = [q, k, v] if c is None or spec.fixed else [q, k, v, c]
    return [y.detach(), *torch.autograd.grad(y, wanted, grad.to(y.dtype))]


def options_of(spec: Spec) -> Options:
    """The options of the torch form."""
    return Options(
        False, spec.feature_map, spec.normalize, spec.center, spec.mean_path, None, "cascade", spec.ridge, spec.scale,
        spec.eps, spec.q_scale,
    )  # fmt: skip


def poison(patch) -> None:
    """Every buffer starts as NaN: what is not written is seen."""
    for name in ("empty", "empty_like", "empty_strided"):
        new = getattr(torch, name)
        patch.setattr(torch, name, lambda *a, new=new, **k: _nan(new(*a, **k)))


def _nan(x: Tensor) -> Tensor:
    if x.dtype == torch.uint8:  # scratch memory of a repeated call: ones are NaN in every floating type
        return x.fill_(255)
    return x.fill_(float("nan")) if x.is_floating_point() else x


def twice(work: Callable, *args, **options):
    """work(*args, **options) as it is, and again, repeated and poisoned; a run in between notes the launches."""
    first = work(*args, **options)
    work(*args, **options)
    with pytest.MonkeyPatch.context() as patch:
        poison(patch)
        return first, work(*args, **options)


def run(monkeypatch, spec: Spec, tokens, grad, coefficients, path: str, save: bool, packed: bool) -> list[Tensor]:
    """o, dq, dk, dv (and d coefficients) of the Triton form on a forced path, poisoned; `packed`: into one buffer.
    "whole" is "split" with the D x D algebra of a head in one program, "roles" with one for each moment."""
    with monkeypatch.context() as patch:
        poison(patch)
        split = path in ("split", "whole", "roles")
        patch.setattr(paths, "saves", lambda *a: int(split))
        patch.setattr(paths, "halved", lambda *a: path.startswith("halves"))
        if path == "roles":
            patch.setattr(plan, "reduce_roles", lambda *a: 5)
        if path == "whole":
            patch.setattr(plan, "PROGRAMS", 2)
        outs = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in tokens)
        if packed:
            b, n, h, d = tokens[0].shape
            outs = torch.empty(b, n, 3, h, d, dtype=tokens[0].dtype).unbind(2)
        o, saved = fused.forward(*tokens, coefficients, spec, save=save)
        dc = fused.backward(grad, *tokens, coefficients, spec, outs, saved)
    return [o, *outs] + ([] if dc is None else [dc])


def make(spec: Spec, n: int, d: int, dv: int, heads: tuple[int, int], dtype: torch.dtype, layout: str = "packed"):
    """tokens, the output's gradient and coefficients. Layouts: views of a packed qkv (as many key heads, D = Dv),
    contiguous, "strided": [B, H, N, D] seen as [B, N, H, D], one sequence, or contiguous "ones", v one number,
    and "positive", none negative but v."""
    torch.manual_seed(n + d)
    (h, hk), batch = heads, 1 if layout == "strided" else 2
    if layout == "packed":
        tokens = list(torch.randn(batch, n, 3, h, d).to(dtype).unbind(2))
    else:
        tokens = [torch.randn(batch, n, heads_, w).to(dtype) for heads_, w in ((h, d), (hk, d), (hk, dv))]
        if layout == "strided":
            tokens = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tokens]
        if layout == "ones":  # the denominator behind a rotary embedding
            tokens[2] = torch.ones(dv, dtype=dtype).expand(batch, n, hk, dv)
        if layout == "positive":
            tokens = [tokens[0].abs(), tokens[1].abs(), tokens[2]]
    grad, c = torch.randn(batch, n, h, dv).to(dtype), torch.randn(h, 4)
    c = c.abs() if layout == "positive" else c
    return tokens, grad, c if spec.op == "polynomial" else None


def of_polynomial(x, c, grad, dtype=None, **options):
    """o, dq, dk, dv and, unless they are fixed, d coefficients; dtype: of features as they are read."""
    x = [t.detach().requires_grad_() for t in (x if hla_kernels.explain("polynomial", *x, c).fixed else [*x, c])]
    q, k, options = (*x[:2], options) if dtype is None else features_as_read(*x[:2], options, dtype)
    y = hla_kernels.polynomial(q, k, x[2], x[3] if len(x) == 4 else c, **options)
    return [y.detach(), *torch.autograd.grad(y, x, grad.to(y.dtype))]


def check(spec: Spec, tokens: list[Tensor], grad: Tensor, coefficients: Tensor | None, got: list[Tensor]) -> None:
    """Results of the Triton form obey the error rule."""
    exact = truth(spec, tokens, grad, coefficients)
    check_tokens(got, exact)
    if len(got) == 5:
        assert coefficients is not None
        check_coefficients(got[4], exact[4], sizes_of_coefficients(tokens, coefficients, grad, options_of(spec)))


def kernel_names() -> set[str]:
    """Those of every Triton kernel of the package, as a profiler gives them."""
    import triton

    modules = [importlib.import_module(x.name) for x in pkgutil.walk_packages(hla_kernels.__path__, "hla_kernels.")]
    return {f.fn.__name__ for m in modules for f in vars(m).values() if isinstance(f, triton.JITFunction)}
