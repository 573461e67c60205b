"""Triton form of adaptive multipole attention against float64 with the same tile selection.

On a CUDA device, interpreted in a separate process, and compiled.
"""

import json
import math
import sys
from contextlib import nullcontext

import pytest
import torch

from hla_kernels.op import why_not_triton
from hla_kernels.softmax.adaptive import fused, torch_form
from hla_kernels.softmax.adaptive.call import prepare
from hla_kernels.softmax.adaptive.fused.operator import adaptive_op
from hla_kernels.softmax.adaptive.reference import reference, routing
from tests.ops.cases import l2_error
from tests.ops.fused.cases import poison
from tests.ops.fused.children import check_compiled, check_interpreted

# relative L2 errors of o, dq, dk, dv
LIMITS = {torch.bfloat16: 5e-3, torch.float16: 1e-3, torch.float32: 1e-5}
INTERPRETED = {**LIMITS, torch.float32: 2e-6}  # tensor cores cut off bits of sums
CASES = {  # grid, prefix, suffix, q_tile, k_tile, density, select, far, whether there is padding
    "square": ((16, 16), 0, 0, 64, 16, 0.2, "error", "first", False),
    "small key tiles": ((12, 12), 0, 0, 64, 4, 0.1, "error", "first", False),
    "uneven": ((9, 11), 2, 3, 64, 16, 0.3, "mean", "first", False),
    "video": ((4, 5, 6), 0, 3, 64, 8, 0.3, "near", "mean", False),
    "padded line": ((150,), 1, 17, 64, 16, 0.3, "mass", "mean", True),
    "padded": ((10, 12), 1, 0, 64, 4, 0.2, "error", "first", True),
    "one tile of queries": ((5, 6), 0, 2, 64, 16, 0.5, "error", "first", False),
    "one group": ((16, 16), 0, 0, 64, 64, 0.5, "mass", "first", False),
}
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="the Triton form needs a CUDA device: none here")


def setting(case, d, dtype, device, mean=0.0):
    """(q, k, v), gradient of the output, options; k and v with a common mean."""
    grid, prefix, suffix, q_tile, k_tile, density, select, far, padded = CASES[case]
    g, n = torch.Generator("cpu").manual_seed(0), math.prod(grid) + prefix + suffix
    q, k, v, grad = (torch.randn(2, n, heads, d, generator=g, device="cpu") for heads in (4, 2, 2, 4))
    mask = torch.arange(n) < torch.tensor([[n], [n // 2 + 3]]) if padded else None
    options = {
        "grid": grid, "prefix": prefix, "suffix": suffix, "q_tile": q_tile, "k_tile": k_tile, "density": density,
        "select": select, "far": far, "q_scale": d**-0.5,
        "key_padding_mask": None if mask is None else mask.to(device),
    }  # fmt: skip
    return [x.to(device, dtype) for x in (q, k + mean, v + mean)], grad.to(device), options


def grads(tokens, grad, run):
    x = [t.detach().clone().requires_grad_() for t in tokens]
    y = run(*x)
    return [y.detach(), *torch.autograd.grad((y * grad.to(y)).sum(), x)]


def choice(tokens, options):
    """What the Triton form chooses, [B, H, U, T] bool."""
    call = prepare(*tokens, **options)
    q, k, v, field, select, _, far, scale, mask = call
    where = (mask, list(field.grid), *field[1:], call.exact, select, far, scale)
    chosen = adaptive_op(q, k, v, *where)[7].bool()
    assert chosen.sum(-1).eq(call.exact).all()
    return chosen.expand(q.shape[0] * q.shape[2], -1, -1).unflatten(0, (q.shape[0], q.shape[2])), call


def errors(tokens, grad, options):
    """Of o and the gradients, against the definition in float64 with the same routing; what was found, and `choice`."""
    chosen, call = choice(tokens, options)
    found = grads(tokens, grad, lambda *x: fused.evaluate(prepare(*x, **options)))
    truth = grads(
        [t.double() for t in tokens], grad,
        lambda *x: reference(*x, chosen, call.field, call.far, call.q_scale, call.mask),
    )  # fmt: skip
    return [l2_error(a, b) for a, b in zip(found, truth, strict=True)], found, (chosen, call)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("mean", [0.0, 2.0])
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize(
    ("case", "d"), [*((case, d) for case in CASES for d in (32, 64, 128)), *(("square", d) for d in (72, 80, 96))]
)
def test_error_and_bits(monkeypatch, case, dtype, d, mean):
    tokens, grad, options = setting(case, d, dtype, "cuda", mean)
    with monkeypatch.context() as patch:
        poison(patch)
        found, first, _ = errors(tokens, grad, options)
        second = grads(tokens, grad, lambda *x: fused.evaluate(prepare(*x, **options)))
    # dq misses the 5e-3 of the rule where keys have a mean: mean keys are rounded to bfloat16, and their common part
    # cancels, but not its rounding errors
    limit = 6.5e-3 if mean and dtype == torch.bfloat16 else LIMITS[dtype]
    assert found[1] <= limit and max(found[0], *found[2:]) <= LIMITS[dtype], found
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.gpu
@needs_gpu
def test_auto_compile_and_opcheck():
    tokens, grad, options = setting("square", 64, torch.bfloat16, "cuda")
    plain = lambda *x: fused.evaluate(prepare(*x, **options))  # noqa: E731
    run = torch.compile(plain, fullgraph=True)
    found, wanted = grads(tokens, grad, run), grads(tokens, grad, plain)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.kernels
def test_interpreted():
    """This file as a program, in float32 and float16."""
    pytest.importorskip("triton")
    check_interpreted(__file__, "interpreted")


@pytest.mark.kernels
def test_no_spills(tmp_path):
    """What calls and their backward launch, compiled for sm_90a. First operands of products are in registers in passes
    over query tiles alone, without a fault of a compiler (`judged`)."""
    pytest.importorskip("triton")
    sizes = ((64, 16, 32), (64, 4, 32), (128, 64, 32), (72, 32, 32), (80, 16, 32), (96, 32, 32), (128, 16, 8))
    check_compiled(0, 9, tmp_path, __file__, *((*x, "bfloat16") for x in sizes))


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("stack", "sizes"), [(0, ((32, 64), (64, 16), (64, 4), (128, 64), (128, 16))), (24, ((72, 4), (80, 16), (96, 16)))]
)
def test_no_spills_in_float32(tmp_path, stack, sizes):
    """Operands in registers have no fault of a compiler (`judged`). Triton 3.6 spills up to 24 bytes of
    `adaptive_for_keys` outside of loops with 72, 80 and 96 channels."""
    pytest.importorskip("triton")
    check_compiled(stack, 9, tmp_path, __file__, *((*x, 32, "float32") for x in sizes))


def test_what_triton_does_not_have():
    tokens, _, options = setting("square", 16, torch.bfloat16, "cpu")
    assert fused.why_not(prepare(*tokens, **options)) is None
    assert "CUDA" in why_not_triton(prepare(*tokens, **options))
    for more, sentence in (({"q_tile": 32}, "q_tile"), ({"k_tile": 2}, "k_tile"), ({"far": "variance"}, "far='first'")):
        assert sentence in fused.why_not(prepare(*tokens, **{**options, **more}))
    assert "multiple of 8" in fused.why_not(prepare(*(x[..., :9] for x in tokens), **options))
    assert fused.why_not(prepare(*(x.float() for x in tokens), **options)) is None
    assert "float64" in fused.why_not(prepare(*(x.double() for x in tokens), **options))
    many = [x.new_zeros(1).expand(2**14, *x.shape[1:]) for x in tokens]
    assert "fewer than 65536 heads" in fused.why_not(prepare(*many, **options))
    line = [x.new_zeros(1).expand(1, 2**17, 1, 16) for x in tokens]
    assert "key tiles" in fused.why_not(prepare(*line, grid=(2**17,), k_tile=4))


def test_shapes_are_known_without_a_device():
    tokens, _, options = setting("uneven", 16, torch.bfloat16, "meta")
    x = [t.requires_grad_() for t in tokens]
    y = fused.evaluate(prepare(*x, **options))
    assert [t.shape for t in (y, *torch.autograd.grad(y.sum(), x))] == [x[0].shape, *(t.shape for t in x)]


def interpreted() -> None:
    from tests.ops.fused.children.quicker import cut_operands, interpret_quicker

    interpret_quicker()
    torch.cuda.device_of = lambda x: nullcontext()
    for case, d, dtype in [
        ("square", 16, torch.float32), ("uneven", 16, torch.float32), ("video", 16, torch.float32),
        ("padded line", 24, torch.float32), ("padded", 16, torch.float32), ("small key tiles", 16, torch.float16),
        *(("one tile of queries", d, torch.float32) for d in (16, 80, 96)), ("one group", 72, torch.float32),
    ]:  # fmt: skip
        tokens, grad, options = setting(case, d, dtype, "cpu", 0.5)
        tokens, grad = [t[:, :, : t.shape[2] // 2] for t in tokens], grad[:, :, :2]
        with pytest.MonkeyPatch.context() as patch:
            cut_operands(patch)
            poison(patch)
            found, _, (chosen, call) = errors(tokens, grad, options)
        assert max(found) <= INTERPRETED[dtype], (case, found)
        q, k = (t.double() for t in tokens[:2])
        own = routing(q, k, call.field, call.select, call.exact, call.q_scale, call.mask)
        if dtype == torch.float32:
            assert torch.equal(chosen, own), case
            assert torch.equal(fused.chosen(call), torch_form.selection(call)[1]), case


def compiled(at: int, d: str, k_tile: str, side: str, dtype: str) -> None:
    from hla_kernels.softmax.adaptive.fused import launch, operator
    from tests.ops.fused.offline.gate import Recorder
    from tests.ops.fused.offline.judge import compile_call

    torch.cuda.device_of = lambda x: nullcontext()  # what is compiled for is not here
    Recorder.calls = []
    for name, kernel in vars(launch).copy().items():
        if hasattr(kernel, "arg_names"):
            setattr(launch, name, Recorder(kernel))
    q = torch.empty(2, int(side) ** 2, 3, int(d), dtype=getattr(torch, dtype), device="meta")
    for select in ("error", "mean"):
        where = (None, [int(side)] * 2, 0, 0, 64, int(k_tile), 2, select, "first", 0.125)
        outputs = operator.adaptive_op.function(q, q, q, *where)
        operator.adaptive_backward.function([q], list(outputs), q, q, q, *where)
    done = set()
    for fn, *call in Recorder.calls:
        if fn.__name__ not in done:
            found = compile_call(fn, *call)
            print(json.dumps({"call": at, **found}), flush=True)
            reads = fn.__name__ in ("adaptive_output", "adaptive_for_queries")
            assert found["from_registers"] == 0 or dtype == "float32" or reads, found
            assert found["in_loops"] == 0, found
            done.add(fn.__name__)


if __name__ == "__main__":
    if sys.argv[1] == "interpreted":
        interpreted()
    else:
        from tests.ops.fused.offline.gate import calls_of

        for i, words in enumerate(calls_of(sys.argv[1:])):
            compiled(i, *words)
