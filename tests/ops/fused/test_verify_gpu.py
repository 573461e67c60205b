"""The first-use check on a GPU: every form passes, and a corrupted one does not."""

from __future__ import annotations

import pytest
import torch

import hla_kernels as hk
from hla_kernels import op
from hla_kernels.dispatch import forms, gate, verify
from hla_kernels.features.power import power_pair
from hla_kernels.features.rms_norm import in_kernels
from tests.helpers.fused_gpu import ANCHORED, BF16, ELU, FP16, FP32, RATIO, SOFTMAX

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="the Triton forms need a CUDA device: none here"),
]
OPS = ("linear_attention", "hla2", "ahla", "hla3", "polynomial")
OPTIONS = ({}, RATIO, ANCHORED, {**ELU, "mean_path": True}, {**SOFTMAX, "normalize": True})
TOKENS = ((BF16, 64), (BF16, 72), (BF16, 128), (FP16, 64), (FP32, 40))


@pytest.fixture(autouse=True)
def empty(monkeypatch, tmp_path):
    """Nothing is verified yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(verify.SWITCH, raising=False)
    monkeypatch.setattr(verify, "VERDICTS", {})
    monkeypatch.setattr(verify, "WARNED", set())
    forms.KNOWN.clear()
    for module in (op, gate):
        monkeypatch.setattr(module, "is_shipped", lambda *_: False)


def tokens(dtype, d, n=197):
    return [torch.randn(2, n, 4, d, device="cuda", dtype=dtype) for _ in range(3)]


@pytest.mark.parametrize(("dtype", "d"), TOKENS, ids=str)
@pytest.mark.parametrize("name", OPS)
def test_what_works_passes(name, dtype, d):
    more = [torch.rand(4, 4, device="cuda")] if name == "polynomial" else []
    for options in OPTIONS:
        call = op.prepare(name, *tokens(dtype, d), *more, **options)
        if op.why_not_triton(call) is None:
            assert op.unverified(call) is None, options


def test_other_operators_pass():
    x = tokens(BF16, 64, 64)
    grid = {"grid": (8, 8), "blocks": (2, 2)}
    for call in (
        op.block_call.prepare(*x, torch.rand(4, 4, device="cuda"), **grid),
        op.block_call.prepare(*x, torch.rand(4, 4, 4, device="cuda"), **grid, order="hla2", normalize=False),
        *(op.PREPARE["adaptive_multipole"](*x, grid=(8, 8), select=s) for s in ("error", "mass", "mean", "near")),
        *(op.PREPARE["adaptive_multipole"](*x, grid=(7, 9), prefix=1, select=s) for s in ("error", "near")),
        op.delta_call.prepare(*x),
        op.delta_call.prepare(*x, log_f=-x[0].abs(), a=x[0].float().unsqueeze(3), b=x[0].unsqueeze(3)),
    ):
        assert op.why_not_triton(call) is None and op.unverified(call) is None, type(call)


def test_kernels_of_ranks_pass():
    x = tokens(BF16, 64, 64)
    for name in OPS:
        more = [torch.rand(4, 4, device="cuda")] if name == "polynomial" else []
        for options in ({}, RATIO):
            call = op.prepare(name, *x, *more, **options)
            if op.why_not_triton(call) is None:
                assert op.unverified(call, shared=True) is None, (name, options)
    for options in ({}, {"order": "hla2", "normalize": False}):
        call = op.block_call.prepare(*x, torch.rand(4, 4, 4, device="cuda"), grid=(8, 8), blocks=(2, 2), **options)
        assert op.unverified(call, shared=True) is None, options


@pytest.mark.parametrize("dtype", (BF16, FP16, FP32))
def test_functions_without_impl_pass(dtype):
    x, weight, p = tokens(dtype, 64)[0], torch.ones(64, device="cuda"), torch.full((4,), 3.0, device="cuda")
    power_pair(x, x[:, :, 1:], p, p[1:])
    norms = [(), (False, 32), (True, 32)] if dtype != FP32 else []
    assert all(in_kernels(x, weight, *more) for more in norms)
    assert [*verify.VERDICTS.values()] == [None] * (1 + len(norms))


@pytest.mark.parametrize("d", (64, 128))
@pytest.mark.parametrize("name", OPS[:-1])
def test_causal_calls_pass(name, d):
    """Also those without a backward that walk through all stages at once."""
    learned = torch.linspace(0.9, 0.99, 4, device="cuda").requires_grad_()
    for options in (
        {}, {"decay": 0.9}, {"decay": learned}, {"return_state": True}, {"decay": 0.9, "return_state": True}, RATIO,
        {"decay": 0.9, "decay_rule": "paper"},
    ):  # fmt: skip
        call = op.prepare(name, *tokens(BF16, d), causal=True, **options)
        assert op.why_not_triton(call) is None and op.unverified(call) is None, options


@pytest.mark.parametrize("compiled", (False, True))
def test_a_check_while_capturing_and_after(compiled):
    """Eager and compiled; a graph that is captured before has the torch form, with a warning."""
    x = tokens(BF16, 64)
    f = torch.compile(hk.ahla, fullgraph=True) if compiled else hk.ahla
    if not compiled:
        hk.ahla(*x, impl="torch")
        torch.cuda.synchronize()
        with pytest.warns(UserWarning, match="before the capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            hk.ahla(*x)
    with torch.autocast("cuda", torch.bfloat16):
        y = f(*x)
    assert len(verify.VERDICTS) == 1 and torch.equal(y, hk.ahla(*x, impl="triton"))
