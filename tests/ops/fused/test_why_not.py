"""What the Triton forms refuse, asked without importing Triton."""

import subprocess
import sys
import warnings
from pathlib import Path

import torch

import hla_kernels as hk
from hla_kernels import op
from hla_kernels.dispatch import faults
from hla_kernels.hla import fused
from hla_kernels.hla.fused import Spec
from hla_kernels.hla.fused.spec import ORDERS


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
    for options in ({}, {"feature_map": "softmax_pair", "center": "k"}, {"feature_map": "elu1", "mean_path": True}):
        for x in (q, q.half(), q.float()):
            assert all(fused.why_not(x, x, x, Spec(name, **options)) is None for name in ORDERS)
    ratio = [Spec(name, "elu1", True) for name in ORDERS]
    assert all("float16" in fused.why_not(*[q.half()] * 3, spec) for spec in ratio)
    assert all(fused.why_not(*[x] * 3, spec) is None for x in (q, q.float()) for spec in ratio)


def test_auto_warns_of_a_fault_once(monkeypatch):
    """A fault of the Triton form, not a call that it is not made for."""
    monkeypatch.setattr(faults, "WARNED", set())
    x = torch.randn(1, 4, 2, 32, dtype=torch.float16)
    for size, reason in enumerate(("another device", fused.FLOAT16_RATIO)):
        monkeypatch.setattr(op, "why_not_triton", lambda call, reason=reason: reason)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for scale in (0.25, 0.5):  # numbers that no other call of this process has: forms are remembered
                hk.linear_attention(x, x, x, scale=scale + size + 0.125)
        assert [fused.FLOAT16_RATIO in str(w.message) for w in found] == [True] * (reason is fused.FLOAT16_RATIO)


def test_amd(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    call = op.prepare("hla2", *[torch.randn(1, 4, 2, 32)] * 3)
    monkeypatch.setattr(type(call.q), "device", property(lambda self: torch.device("cuda")))
    assert "AMD" in op.why_not_triton(call)


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
