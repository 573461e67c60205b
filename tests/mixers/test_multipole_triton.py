"""Triton form of multipole attention against float64: on a CUDA device, interpreted, and compiled.

Allowed error: relative L2 against the definition in float64, at most `TIMES` the error of the definition evaluated in
float32 on the same tokens, for the output and every gradient.
"""

import json
import sys
from contextlib import nullcontext

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hla_kernels.op import why_not_triton
from hla_kernels.softmax.multipole import torch_form
from hla_kernels.softmax.multipole.call import prepare
from hla_kernels.softmax.multipole.fused import plan
from hla_kernels.softmax.multipole.fused.operator import multipole_op
from tests.mixers.multipole_cases import CASES, POOLED, grads, impl, setting
from tests.ops.cases import l2_error
from tests.ops.fused.cases import poison
from tests.ops.fused.children import check_compiled, check_interpreted

TIMES = 2
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="the Triton form needs a CUDA device: none here")


@pytest.fixture(autouse=True)
def fresh_plans():
    plan._plan.cache_clear()
    yield
    plan._plan.cache_clear()


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("size", [1.0, 3.0])
@pytest.mark.parametrize("d", [16, 64, 72, 128])
@pytest.mark.parametrize("case", [*CASES, *POOLED])
def test_error_and_bits(monkeypatch, case, d, size):
    monkeypatch.setattr(plan, "pools", lambda p: case in POOLED)
    tokens, grad, more = setting(case, d, torch.bfloat16, "cuda", size)
    with monkeypatch.context() as patch:
        poison(patch)
        first, second = (grads(tokens, grad, impl("triton", more)) for _ in range(2))
    plain = grads(tokens, grad, impl("reference", more))
    truth = grads([t.double() for t in tokens], grad, impl("reference", more))
    for a, b, c, t in zip(first, second, plain, truth, strict=True):
        assert torch.equal(a, b)
        assert l2_error(a, t) <= TIMES * l2_error(c, t)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("by_blocks", [True, False])
@pytest.mark.parametrize("degree", [0, 1, 2])
def test_the_torch_form_has_the_same_bits(monkeypatch, degree, by_blocks):
    """By blocks, where a token is read by the queries of several blocks, and by tokens."""
    monkeypatch.setattr(torch_form, "linear", lambda call: by_blocks)
    where = {"grid": (21, 4), "blocks": (2, 2), "prefix": 1, "radius": 3, "degree": degree}
    tokens = [torch.randn(1, 85, 6, d, device="cuda", dtype=torch.float16) for d in (48, 48, 64)]
    grad = torch.randn(1, 85, 6, 64, device="cuda", dtype=torch.float16)
    runs = [grads(tokens, grad, impl("torch", where)) for _ in range(8)]
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0], strict=True))


@pytest.mark.gpu
@needs_gpu
def test_opcheck_compile_and_capture(monkeypatch):
    """Pooled: a full graph and a replay have the bits of the plain call."""
    monkeypatch.setattr(plan, "pools", lambda p: True)
    tokens, grad, more = setting("far", 64, torch.bfloat16, "cuda")
    run = impl("triton", more)
    expected = grads(tokens, grad, run)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert all(torch.equal(a, b) for a, b in zip(grads(tokens, grad, compiled), expected, strict=True))
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        grads(tokens, grad, run)
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        found = grads(tokens, grad, run)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    x = [t.repeat_interleave(4 // t.shape[2], 2).requires_grad_() for t in tokens]
    where = ([1, *more["grid"]], [1, *more["blocks"]], [more["prefix"], more["suffix"]], more["radius"], 0.125)
    torch.library.opcheck(torch.ops.hla_kernels.multipole, (*x, *where), rtol=2e-2, atol=2e-2)


@pytest.mark.kernels
def test_interpreted():
    """The same in float32, and once in float16 by the rule of the error: this file as a program."""
    pytest.importorskip("triton")
    check_interpreted(__file__, "interpreted")


@pytest.mark.kernels
def test_spills(tmp_path):
    """What a call with heads of 64 launches, compiled for sm_90a."""
    pytest.importorskip("triton")
    check_compiled(0, 6, tmp_path, __file__, ("compiled",))


def compiled() -> None:
    from hla_kernels.softmax.multipole.fused import launch, operator
    from tests.ops.fused.offline.gate import Recorder
    from tests.ops.fused.offline.judge import compile_call

    torch.cuda.device_of = lambda x: nullcontext()  # what is compiled for is not here
    plan.pools = lambda p: True
    for name, kernel in vars(launch).copy().items():
        if hasattr(kernel, "arg_names"):
            setattr(launch, name, Recorder(kernel))
    q = torch.empty(2, 256, 3, 64, dtype=torch.bfloat16, device="meta")
    where = ([1, 16, 16], [1, 8, 8], [0, 0], 2, 0.125)
    outputs = operator.multipole_op.function(q, q, q, *where)
    operator.multipole_backward.function(q, q, q, q, *outputs, *where)
    for fn, *call in Recorder.calls:
        print(json.dumps(compile_call(fn, *call)))


def interpreted() -> None:
    from hla_kernels.softmax.multipole import fused
    from tests.ops.fused.children.quicker import interpret_quicker

    interpret_quicker()

    for case in ("far line", "far cube", "uneven", "line"):
        plan.pools = lambda p, pooled=case in POOLED: pooled
        tokens, grad, more = setting(case, 16, torch.float32, "cpu")
        tokens, grad = [t[:1, :, : t.shape[2] // 2] for t in tokens], grad[:1, :, :2]
        found = grads(tokens, grad, lambda *x, m=more: fused.evaluate(prepare(*x, **m)))
        truth = grads([t.double() for t in tokens], grad, impl("reference", more))
        for a, t in zip(found, truth, strict=True):
            assert l2_error(a, t) < 1e-6, (case, l2_error(a, t))
    tokens, grad, more = setting("line", 16, torch.float16, "cpu", 3.0)
    tokens, grad = [t[:1, :, : t.shape[2] // 2] for t in tokens], grad[:1, :, :2]
    found = grads(tokens, grad, lambda *x: fused.evaluate(prepare(*x, **more)))
    plain, truth = (grads([t.to(d) for t in tokens], grad, impl("reference", more)) for d in (torch.half, torch.double))
    for a, c, t in zip(found, plain, truth, strict=True):
        assert l2_error(a, t) <= TIMES * l2_error(c, t)


def test_operations_and_shapes_are_known_without_a_device():
    """All pairs, three products forward and eleven backward: blocks so few that none is pooled. Or pooled: those that
    queries in patches of 64 and 32 read one by one, counted here from their definition, and the blocks."""
    for n, m, radius, pooled in ((50, 3, 20, False), (4000, 20, 5, True)):
        d = 16
        x = [torch.empty(2, n, 3, d, dtype=torch.bfloat16, device="meta", requires_grad=True) for _ in range(3)]
        with FlopCounterMode(display=False) as counter:
            o, top, means, *_ = multipole_op(*x, [1, 1, n], [1, 1, m], [0, 0], radius, 0.25)
            forward = counter.get_total_flops()
            found = torch.autograd.grad(o.sum(), x)
        assert [t.shape for t in (o, *found)] == [x[0].shape] * 4 and top.shape == (2, 3, n)
        assert means.shape == (2, 2, 3, m, d)
        wide, narrow = (read_one_by_one(n, m, radius, patch) if pooled else n * n for patch in (64, 32))
        far = pooled * n * m
        products = 3 * wide + 3 * far, 5 * wide + 6 * narrow + 10 * far
        assert (forward, counter.get_total_flops()) == (12 * d * products[0], 12 * d * sum(products))


def read_one_by_one(n, m, radius, patch):
    """Pairs of a query of a line and a key in a block that something near to the query's patch lies in."""
    block = [next(b for b in range(m) if (b + 1) * n // m > j) for j in range(n)]
    pairs = 0
    for first in range(0, n, patch):
        queries = range(first, min(first + patch, n))
        near = {block[j] for j in range(max(first - radius, 0), min(queries[-1] + radius + 1, n))}
        pairs += len(queries) * sum(b in near for b in block)
    return pairs


def test_what_triton_does_not_have():
    """Every reason is reported, on a device that supports the form."""
    from hla_kernels.softmax.multipole.fused import why_not

    (q, k, v), _, more = setting("square", 16, torch.bfloat16, "cpu")
    assert why_not(prepare(q, k, v, **more)) is None and "CUDA" in why_not_triton(prepare(q, k, v, **more))
    assert "degree 0" in why_not(prepare(q, k, v, **{**more, "degree": 1}))
    assert "bfloat16" in why_not(prepare(q.float(), k.float(), v.float(), **more))
    assert "multiple of 8" in why_not(prepare(q[..., :9], k[..., :9], v[..., :9], **more))
    many = [x.new_zeros(1).expand(2**14, *x.shape[1:]) for x in (q, k, v)]
    assert "fewer than 65536 heads" in why_not(prepare(*many, **more))
    line = [x.new_zeros(1).expand(1, 2**15, 1, 16) for x in (q, k, v)]
    assert "positions times blocks" in why_not(prepare(*line, grid=(2**15,), blocks=(2**7,), degree=0))
    mask = torch.ones(q.shape[:2], dtype=torch.bool)
    assert "key_padding_mask" in why_not(prepare(q, k, v, **more, key_padding_mask=mask))


@pytest.mark.parametrize(("version", "refused"), [("3.6.0", False), ("3.7.0", True), ("3.7.1", True), ("3.8.0", False)])
def test_versions_of_triton_that_miscompile_it(monkeypatch, version, refused):
    from hla_kernels.softmax.multipole import fused

    monkeypatch.setattr(fused, "TRITON_VERSION", version)
    (q, k, v), _, more = setting("square", 16, torch.bfloat16, "cpu")
    reason = fused.why_not(prepare(q, k, v, **more))
    assert (reason is not None and "Triton 3.7" in reason) == refused


@pytest.mark.filterwarnings("error")
def test_torch_compile_traces_the_refusals():
    """Without the search for installed packages, which the tracer of torch 2.11 refuses and a later one warns of."""
    from hla_kernels.softmax.multipole.fused import why_not

    (q, k, v), _, more = setting("square", 16, torch.bfloat16, "cpu")

    @torch.compile(backend="eager", fullgraph=True)
    def form(q, k, v):
        return q + 1 if why_not(prepare(q, k, v, **more)) is None else q

    assert torch.equal(form(q, k, v), q + 1)


if __name__ == "__main__":
    {"interpreted": interpreted, "compiled": compiled}[sys.argv[1]]()
