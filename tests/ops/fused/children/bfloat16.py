"""bfloat16 tokens in Triton's interpreter, which stores them as 16-bit integers and computes with those.

Not collected: `test_interpreter` runs it. Some plans and digits are for bfloat16 alone: of those, no test in another
dtype sees memory that is not written, or a product that is not there.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, _get_np_dtype

from hla_kernels.hla.fused import Spec
from hla_kernels.hla.fused.plan import paths
from tests.helpers.error_rule import LIMITS, check_tokens, relative_error
from tests.ops.blockmix import fused_cases
from tests.ops.fused.cases import check, make, run
from tests.ops.fused.children.ragged import ANCHORED, RATIO, both

BF16 = torch.bfloat16
OPS = ("linear_attention", "hla2", "ahla", "hla3", "polynomial")


def narrow(x: np.ndarray) -> TensorHandle:
    """Round float32 to the nearest number of bfloat16, ties to even."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return TensorHandle(np.where(np.isnan(x), np.uint16(0x7FC0), rounded), tl.bfloat16)


def is_bf16(x) -> bool:
    return x.scalar == tl.bfloat16


def wide(x: TensorHandle) -> TensorHandle:
    """The same numbers in float32, unless they are not bfloat16."""
    if not is_bf16(x.dtype):
        return x
    return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def interpret_bfloat16(patch: pytest.MonkeyPatch) -> None:
    """Let the interpreter convert, add and multiply bfloat16, and take reciprocals by an instruction."""
    old = {name: getattr(InterpreterBuilder, name) for name in ("create_dot", "binary_op", "cast_impl")}
    convert = InterpreterBuilder.create_fp_to_fp

    def binary(self, a, b, op):
        if not is_bf16(a.dtype):
            return old["binary_op"](self, a, b, op)
        out = op(wide(a).data, wide(b).data)
        return TensorHandle(out, tl.int1) if out.dtype == bool else narrow(out)

    def cast(self, x, dtype):
        if is_bf16(dtype):
            return narrow(x.data.astype(np.float32))
        if is_bf16(x.dtype):
            return TensorHandle(wide(x).data.astype(_get_np_dtype(dtype)), dtype.scalar)
        return old["cast_impl"](self, x, dtype)

    def between(self, x, dtype, mode):
        return cast(self, x, dtype) if is_bf16(x.dtype) or is_bf16(dtype) else convert(self, x, dtype, mode)

    def instruction(self, code, constraints, values, *rest):
        assert code.startswith("rcp.approx"), code
        out = TensorHandle((1.0 / values[0].data).astype(np.float32), tl.float32)
        return SimpleNamespace(get_result=lambda i: out)

    def product(self, a, b, *rest):
        return old["create_dot"](self, wide(a), wide(b), *rest)

    patch.setattr(InterpreterBuilder, "get_bf16", lambda self, x: narrow(np.array([x], np.float32)), raising=False)
    for name, new in (
        ("create_dot", product), ("binary_op", binary), ("cast_impl", cast), ("create_fp_to_fp", between),
        ("create_inline_asm", instruction),
    ):  # fmt: skip
        patch.setattr(InterpreterBuilder, name, new)


@pytest.mark.parametrize("kind", ("whole", "mask"))
@pytest.mark.parametrize("options", (RATIO, ANCHORED), ids=lambda x: "-".join(x))
@pytest.mark.parametrize("op", OPS)
def test_operators_as_planned(monkeypatch, op, options, kind):
    interpret_bfloat16(monkeypatch)
    if kind == "mask":
        monkeypatch.setattr(paths, "SHORT", 0)  # linear attention by several programs per head
    tokens, grad, c = make(Spec(op), 70, 64, 64, (2, 2), BF16)
    mask = torch.rand(2, 70, generator=torch.Generator().manual_seed(1)) < 0.6 if kind == "mask" else None
    c = None if c is None else c.abs()
    found, truth = both(monkeypatch, op, options, "planned", tokens, grad, c, {"mask": mask})
    check_tokens(found[:4], truth[:4], feature_map=options.get("feature_map"))
    assert relative_error(found[-1], truth[-1]) <= LIMITS[BF16]


@pytest.mark.parametrize("d", (64, 72))
@pytest.mark.parametrize("options", ({}, RATIO, ANCHORED), ids=lambda x: "-".join(x) or "plain")
@pytest.mark.parametrize("op", OPS[1:])
def test_short_heads(monkeypatch, op, options, d):
    """One program per head, which is for bfloat16 alone, and `polynomial` by several."""
    interpret_bfloat16(monkeypatch)
    spec, path = Spec(op, **options), "split" if op == "polynomial" else "halves"
    inputs = make(spec, 70, d, d, (2, 2), BF16)
    check(spec, *inputs, run(monkeypatch, spec, *inputs, path, save=True, packed=True))


@pytest.mark.parametrize("which", (1, 2), ids=("k", "v"))
@pytest.mark.parametrize("op", OPS)
def test_channels_with_a_mean(monkeypatch, op, which):
    """Twice their deviation, which nothing subtracts."""
    interpret_bfloat16(monkeypatch)
    tokens, grad, c = make(Spec(op), 70, 64, 64, (1, 1), BF16)
    tokens[which].add_(2)
    check(Spec(op), tokens, grad, c, run(monkeypatch, Spec(op), tokens, grad, c, "split", save=True, packed=True))


@pytest.mark.parametrize("more", ({}, {"mask": True}, {"mean": 2.0, "mask": True}, {"turned": True}), ids=str)
def test_block_mixing(monkeypatch, more):
    interpret_bfloat16(monkeypatch)
    o, sizes = fused_cases.options_of((9, 8), (2, 2), 1, feature_map="elu1"), (1, 2, 32, 32)
    rotary = fused_cases.angles_of(o, sizes) if more.get("turned") else None
    tensors, grad, mask = fused_cases.make(o, sizes, BF16, **{k: x for k, x in more.items() if k != "turned"})
    found = fused_cases.triton_form(monkeypatch, o, tensors, grad, mask, rotary)
    truth = fused_cases.truth(o, tensors, grad, mask, rotary)
    check_tokens(found[:4], truth[:4])
    assert relative_error(found[4], truth[4]) <= LIMITS[BF16]
