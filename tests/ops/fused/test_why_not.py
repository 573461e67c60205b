"""What the Triton forms refuse, asked without importing Triton."""

import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import hla_kernels as hk
from hla_kernels import op
from hla_kernels.dispatch import verify
from hla_kernels.hla import fused
from hla_kernels.hla.fused import Spec
from hla_kernels.hla.fused.spec import MOMENTS
from tests.helpers.fused_gpu import ANCHORED, BF16, ELU, FP16, FP32, OPS, RATIO

PAIR = {"feature_map": "softmax_pair", "normalize": True}


def test_why_not_names_what_is_missing():
    q = torch.randn(1, 4, 2, 8)
    assert "D = 8" in fused.why_not(q, q, q, Spec("hla2"))
    q = torch.randn(1, 4, 2, 32, dtype=torch.float64)
    assert "float64" in fused.why_not(q, q, q, Spec("hla2"))
    q = torch.randn(1, 4, 32, 2).transpose(2, 3)
    assert "contiguous" in fused.why_not(q, q, q, Spec("hla2"))
    q = torch.randn(1, 4, 2, 129)
    assert "D = 129" in fused.why_not(q, q, q, Spec("hla2"))
    q = torch.randn(1, 4, 2, 128, dtype=torch.bfloat16)
    assert "single centred key" in fused.why_not(*[q[:, :1]] * 3, Spec("hla2", center="k", ridge=0.1))
    for options in ({"center": "k"}, {"center": "qk", "ridge": 0.1}, {"feature_map": "elu1", "normalize": True}):
        assert fused.why_not(*[q[:, :1]] * 3, Spec("hla2", **options)) is None
    ratio = [Spec(name, "elu1", True) for name in MOMENTS]
    assert all("float16" in fused.why_not(*[q.half()] * 3, spec) for spec in ratio)


# op, options, dtype, D, words of the reason or None
WIDTHS = (
    *((op, options, BF16, 128, None) for op in OPS for options in ({}, RATIO, ANCHORED)),
    *(("linear_attention", PAIR, BF16, d, found) for d, found in ((64, None), (65, "D = 130"))),
    *(("linear_attention", {**RATIO, "feature_map": "softmax"}, dtype, 96, None) for dtype in (BF16, FP32)),
    *((op, {"feature_map": "softmax"}, BF16, 32, "a ratio of linear_attention alone") for op in OPS),
    *((op, PAIR, BF16, 32, "a ratio of linear_attention alone") for op in OPS[1:]),
    *((op, {}, FP32, d, found) for op in OPS[1:] for d, found in ((96, None), (97, "97 features in float32"))),
    ("linear_attention", {}, FP32, 128, None),
    ("linear_attention", ELU, FP32, 97, "97 features in float32"),
    ("polynomial", {}, BF16, 128, None),
    ("polynomial", {}, FP32, 16, "no Triton form in float32"),
    *(("polynomial", {}, FP16, d, found) for d, found in ((64, None), (72, "polynomial of 72 features"))),
    *(("polynomial", options, BF16, 64, None) for options in (ELU, RATIO, {**ELU, **ANCHORED})),
    *(("polynomial", options, BF16, 72, None) for options in (ELU, RATIO, ANCHORED, {"normalize": True})),
    ("polynomial", {"feature_map": "identity", "normalize": True}, BF16, 32, None),
    ("polynomial", RATIO, BF16, 80, "polynomial of 80 features"),
    *(("polynomial", {"ridge": 0.1}, BF16, d, found) for d, found in ((96, None), (128, "with a ridge"))),
    *((op, {}, BF16, 112, "beyond 96, both must be 128") for op in ("hla3", "polynomial")),
)


@pytest.mark.parametrize(("op", "options", "dtype", "d", "found"), WIDTHS, ids=str)
def test_widths(op, options, dtype, d, found):
    """In 16 bits a reason is a fault, of which auto warns."""
    q = torch.randn(1, 4, 2, d, dtype=dtype)
    reason = fused.why_not(q, q, q, Spec(op, **options))
    assert reason is None if found is None else found in reason
    assert isinstance(reason, verify.Fault) == (found is not None and dtype != FP32 and "D =" not in found)


@pytest.mark.parametrize("op", ("hla3", "polynomial"))
def test_wide_values_are_as_wide_as_features(op):
    q, v = torch.randn(1, 4, 2, 128, dtype=BF16), torch.randn(1, 4, 2, 96, dtype=BF16)
    assert "of 128 features and 96 value channels" in fused.why_not(q, q, v, Spec(op))
    assert fused.why_not(v, v, v, Spec(op)) is fused.why_not(q, q, q, Spec(op)) is None


def test_auto_warns_of_a_fault_once(monkeypatch):
    """A fault of the Triton form, not a call that it is not made for."""
    monkeypatch.setattr(verify, "WARNED", set())
    x = torch.randn(1, 4, 2, 32, dtype=torch.float16)
    for size, reason in enumerate(("another device", fused.FLOAT16_RATIO)):
        monkeypatch.setattr(op, "why_not_triton", lambda call, reason=reason: reason)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for scale in (0.25, 0.5):  # numbers that no other call of this process has: forms are remembered
                hk.linear_attention(x, x, x, scale=scale + size + 0.125)
        assert [fused.FLOAT16_RATIO in str(w.message) for w in found] == [True] * (reason is fused.FLOAT16_RATIO)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
def test_auto_says_why_16_bits_on_a_gpu_run_in_torch(monkeypatch, dtype):
    """Once, of every operator with a Triton form."""
    monkeypatch.setattr(verify, "WARNED", set())
    x = torch.randn(1, 4, 2, 32, dtype=dtype)
    calls = [
        (op.prepare("hla2", x, x, x, causal=True, center="k"), "causal calls has no center"),
        (op.prepare("hla2", x, x, x, return_state=True), "no Triton form with a state"),
        (op.PREPARE["adaptive_multipole"](x, x, x, grid=(4,), far="none"), "far='first' or 'mean'"),
        (op.delta_call.prepare(x, x, x, frame=2), "has no frames"),
        (op.PREPARE["multipole"](x, x, x, grid=(4,), blocks=(2,)), ""),
        (op.prepare("softmax_attention", x, x, x), ""),
    ]
    monkeypatch.setattr(torch.Tensor, "device", property(lambda self: torch.device("cuda")))
    for call, why in calls:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            assert op._explained(call, "auto").impl == "torch" and not found
            assert [op.choose(call, "auto") for _ in range(2)] == ["torch"] * 2
        assert [why in str(w.message) for w in found] == [True] * bool(why and dtype == torch.bfloat16)


def test_amd(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    call = op.prepare("hla2", *[torch.randn(1, 4, 2, 32)] * 3)
    monkeypatch.setattr(type(call.q), "device", property(lambda self: torch.device("cuda")))
    assert "AMD" in op.why_not_triton(call)
    monkeypatch.setattr(verify, "WARNED", set())
    with pytest.warns(UserWarning, match="AMD"):
        assert op.choose(call, "auto") == "torch"
    monkeypatch.setattr(verify, "WARNED", set())
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # there is no Triton form to lose
        assert op.choose(op.prepare("softmax_attention", *call[1:4]), "auto") == "torch"


def test_answers_without_triton():
    code = """
import sys
sys.modules["triton"] = None
import torch
from hla_kernels.hla import fused
q = torch.randn(1, 4, 2, 32)
assert fused.why_not(q, q, q, fused.Spec("hla2")) is None
"""
    env = {"PYTHONPATH": str(Path(hk.__file__).parents[1]), "PATH": ""}
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, env=env)
