"""Benchmark timing on a GPU: agreement with the copy rate, and attribution of kernels to operators.

Run with `pytest -m gpu tests/benchmarks/test_speed_gpu.py`.
"""

import pytest
import torch

import hla_kernels
from benchmarks import check, operators, peers
from benchmarks.profile import shares
from benchmarks.timing import copy_rate, measure, peak_mib

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: times are not checked here"),
]
BYTES = 2**28


@pytest.fixture
def copies():
    """Three copies of 256 MiB between buffers of their own."""
    buffers = [torch.randint(0, 255, (2, BYTES), dtype=torch.uint8, device="cuda") for _ in range(3)]
    return [lambda pair=pair: pair[1].copy_(pair[0]) for pair in buffers]


def test_times_are_those_of_the_copy_rate(copies):
    for call in copies:
        call()
    us = 2 * BYTES / copy_rate() * 1e6
    graph = measure(copies)
    assert graph.timer == "graph" and 0.85 * us < graph.us < 1.25 * us and graph.launched_us > 0.85 * us
    events = measure([lambda call=call: call()[0].item() for call in copies])  # waits for the host: no capture
    assert events.timer == "events" and 0.85 * us < events.us < 3 * us


def test_after_a_failed_capture_others_succeed(copies):
    assert measure([lambda call=call: call()[0].item() for call in copies]).timer == "events"
    assert measure(copies).timer == "graph"


def test_peak_memory():
    def call():
        x = torch.empty(2**20, 100, dtype=torch.uint8, device="cuda")
        del x
        return torch.empty(2**20, 40, dtype=torch.uint8, device="cuda")

    assert peak_mib(call) == pytest.approx(100, abs=2)


def test_shares_of_a_step():
    x = torch.randn(4, 8, 512, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    tokens, w = (torch.randn(n, 64, device="cuda", dtype=torch.bfloat16) for n in (4096, 64))

    def attention():
        torch.nn.functional.scaled_dot_product_attention(x, x, x).backward(torch.ones_like(x))

    def products():
        return tokens @ w

    def ours():
        qkv = torch.randn(4, 512, 3, 8, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        o = peers.make(peers.Case("vit224", "ahla", "ours"))(qkv, None)
        o.backward(torch.ones_like(o))

    for step, part in ((attention, "attention"), (products, "matmul"), (ours, "attention")):
        step()
        ms, found = shares(step)
        assert ms > 0 and sum(found.values()) == pytest.approx(1) and found[part] > 0.2, (part, found)


def test_shares_of_a_compiled_step():
    """Where an operator is a call within a call of the same name."""
    tokens = [torch.randn(4, 2048, 8, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    call = torch.compile(hla_kernels.ahla)

    def step():
        call(*tokens).sum().backward()

    step()
    _, found = shares(step)
    assert found["attention"] > 0.2, found


def test_a_named_region_adds_no_time():
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)

    def named():
        with torch.profiler.record_function("region"):
            return x @ x

    named()
    alone, inside = (min(shares(step)[0] for _ in range(3)) for step in (lambda: x @ x, named))
    assert 0.7 < inside / alone < 1.5


@pytest.mark.parametrize("impl", ["ours", "sdpa_cudnn", "sdpa_flash", "eager"])
def test_a_case_is_right_and_timed(impl):
    (case, *_) = peers.cases(["vit224"], ["ahla"], [impl], ["identity"])
    found = check.check(case)
    assert found.problem is None and max(found.rel_err.values()) < 1e-2
    (forward, both) = (values for _, values in operators.timed([case]))
    assert 0 < forward["us"] < both["us"] and forward["timer"] == "graph" and forward["warm_us"] > 0
