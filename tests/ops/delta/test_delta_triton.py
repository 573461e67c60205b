"""Triton form of the delta rule against the recurrence in float64: interpreted, compiled, and on a CUDA device."""

import json
import sys
from contextlib import nullcontext
from functools import partial

import pytest
import torch

import hla_kernels as hk
from hla_kernels.delta_rule import fused
from hla_kernels.delta_rule.call import prepare
from hla_kernels.delta_rule.operator import evaluate
from tests.ops.cases import l2_error
from tests.ops.fused.cases import poison
from tests.ops.fused.children import check_compiled, check_interpreted

# n, D, Dv, rank, decay per channel, strength of the decay
CASES = [(1, 16, 16, 1, False, 1), (37, 16, 24, 1, False, 2), (50, 16, 40, 2, True, 2), (37, 24, 16, 1, True, 9),
         (33, 8, 8, 0, True, 1)]  # fmt: skip
LONG = (600, 16, 16, 1, False, 0.2)  # summed over tokens, errors of dlog_f would be larger than dlog_f
GPU_CASES = [(500, 64, 64, 2, True, 1), (1000, 128, 128, 1, False, 1), (333, 64, 128, 0, False, 2),
             (200, 72, 40, 2, False, 1)]  # fmt: skip
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="the Triton form needs a CUDA device: none here")


def setting(case, dtype, device):
    """Inputs of `delta_op`, and gradients of its outputs; transitions shrink what they read, as in the family."""
    n, d, dv, r, channels, strength = case
    g = torch.Generator().manual_seed(n)
    q, k, b = (torch.randn(2, n, 3, *x, d, generator=g) for x in ((), (1,), (r,)))
    k, b = (torch.nn.functional.normalize(x, dim=-1) for x in (k, b))
    v, grad = torch.randn(2, n, 3, 1, dv, generator=g), torch.randn(2, n, 3, dv, generator=g)
    log_f = -strength * torch.rand(2, n, 3, d if channels else 1, generator=g)
    state, grad_state = (torch.randn(2, 3, d, dv, generator=g) for _ in range(2))
    a = (0.7 / max(r, 1)) * b + 0.05 * torch.randn(b.shape, generator=g)
    tokens = [x.to(device, dtype) for x in (q, k, v)]
    tokens += [log_f.to(device), a.to(device, dtype), b.to(device, dtype), state.to(device)]
    return tokens, (grad.to(device, dtype), grad_state.to(device))


def results(f, x, grads, dtype=None):
    """Outputs and gradients of inputs that have elements."""
    x = [t.detach().to(dtype or t.dtype).requires_grad_() for t in x]
    o, last = f(*x)[:2]
    loss = (o * grads[0].to(o)).sum() + (last * grads[1].to(last)).sum()
    used = [t for t in x if t.numel()]
    return [o.detach(), last.detach(), *torch.autograd.grad(loss, used)]


def errors(case, dtype, device):
    x, grads = setting(case, dtype, device)
    found = results(lambda *y: fused.delta_walk(*y, True), x, grads)
    truth = results(lambda *y: evaluate(*y, by_token=True), x, grads, torch.float64)
    return [l2_error(a, b) for a, b in zip(found, truth, strict=True)], found


def decay_error(device):
    """Relative error of the gradient of one decay per head, in float16."""
    x, grads = setting(LONG, torch.float16, device)
    x[3] = torch.tensor([[[[-0.02], [-0.1], [-0.4]]]], device=device)

    def gradient(f, dtype=None):
        rate = x[3].to(dtype or torch.float32).requires_grad_()
        y = [t.to(dtype or t.dtype) for t in x]
        o = f(*y[:3], rate.expand(2, LONG[0], 3, 1).clone(), *y[4:])[0]
        return torch.autograd.grad((o * grads[0].to(o)).sum(), rate)[0]

    truth = gradient(lambda *y: evaluate(*y, by_token=True), torch.float64)
    return l2_error(gradient(lambda *y: fused.delta_walk(*y, True)), truth)


@pytest.mark.gpu
@needs_gpu
def test_gradient_of_a_decay_per_head():
    assert decay_error("cuda") <= 1e-3


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_error_and_bits(monkeypatch, case):
    with monkeypatch.context() as patch:
        poison(patch)
        found, first = errors(case, torch.bfloat16, "cuda")
        _, second = errors(case, torch.bfloat16, "cuda")
    assert max(found[:2]) <= 4e-3 and max(found) <= 1e-2, found
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_auto_and_compile(case):
    """`auto` uses it after its first-use check, compiled in one graph with the same bits; near the torch form."""
    q, k, v, log_f, a, b, state = setting(case, torch.bfloat16, "cuda")[0]
    log_f = log_f if case[4] else log_f.squeeze(3)
    x = [t.requires_grad_() for t in (q, k, v, log_f, *((a, b) if case[3] else ()))]
    f = partial(delta_of, state=hk.DeltaState(state))
    assert hk.explain("delta", *x[:3], log_f=log_f, **dict(zip("ab", x[4:], strict=False))).impl == "triton"
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    found = [(y := g(*x), *torch.autograd.grad(y.float().square().mean(), x)) for g in (f, compiled)]
    assert all(torch.equal(s, t) for s, t in zip(*found, strict=True))
    assert l2_error(found[0][0], f(*x, impl="torch").double()) <= 6e-3


def delta_of(q, k, v, log_f, a=None, b=None, **options):
    return hk.delta(q, k, v, log_f=log_f, a=a, b=b, **options)


@pytest.mark.kernels
def test_interpreted():
    """This file as a program, in float32; and torch.library.opcheck."""
    pytest.importorskip("triton")
    check_interpreted(__file__, "interpreted")


@pytest.mark.kernels
def test_few_spills_and_no_operand_in_registers(tmp_path):
    pytest.importorskip("triton")
    check_compiled(80, 26, tmp_path, __file__, ("compiled",))  # 80 bytes: rank 2, 128 channels


def test_what_triton_does_not_have():
    q, k, v, log_f, a, b, _ = setting(CASES[1], torch.bfloat16, "cpu")[0]
    log_f = log_f.squeeze(3)
    call = prepare(q, k, v, log_f=log_f, a=a, b=b)
    assert fused.why_not(call) is None
    three, wide = [torch.cat([x, x, x], 3) for x in (k, v)], q.repeat(1, 1, 1, 9)
    for changes, words in (
        ({"q": q.float()}, "float32"), ({"a": a.repeat(1, 1, 1, 3, 1)}, "got 3 and 1"),
        ({"k": three[0], "v": three[1]}, "got 1 and 3"), ({"q": wide}, "got 144 and 24"),
    ):  # fmt: skip
        assert words in fused.why_not(call._replace(**changes))
    with pytest.raises(ValueError, match="cannot run here: the Triton forms run on CUDA devices, not on cpu"):
        hk.delta(q, k, v, log_f=log_f, a=a, b=b, impl="triton")
    found = hk.explain("delta", q, k, v, log_f=log_f, a=a, b=b)
    assert found.impl == "torch" and "CUDA" in found.why_not["triton"]
    with pytest.raises(ValueError, match="did you mean 'log_f'"):
        hk.explain("delta", q, k, v, log_g=log_f)


def interpreted() -> None:
    from hla_kernels.delta_rule import tiles
    from tests.ops.fused.children.quicker import cut_operands, interpret_quicker

    interpret_quicker()
    torch.cuda.device_of = lambda x: nullcontext()
    with pytest.MonkeyPatch.context() as patch:
        cut_operands(patch)
        assert decay_error("cpu") <= 1e-3
    tiles.rounded = lambda x: x  # products are exact here
    empty = [t[:0] for t in setting(CASES[1], torch.float32, "cpu")[0]]
    assert [t.shape[0] for t in fused.delta_walk(*empty, True)[:2]] == [0, 0]
    for case in CASES:
        with pytest.MonkeyPatch.context() as patch:
            poison(patch)
            found, _ = errors(case, torch.float32, "cpu")
        assert max(found) <= 1e-5, (case, found)
    x = setting(CASES[1], torch.float32, "cpu")[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "SEGMENT", fused.CHUNK)
        pieces = fused.delta_walk(*x, False)
    assert all(torch.equal(s, t) for s, t in zip(pieces[:2], fused.delta_walk(*x, True)[:2], strict=True))
    x = [t.requires_grad_() for t in x]
    torch.library.opcheck(torch.ops.hla_kernels.delta_walk, (*x, True))


def compiled() -> None:
    from hla_kernels.delta_rule import gradients, walk
    from tests.ops.causal.offline import compiled_call
    from tests.ops.fused.offline.gate import Recorder

    torch.cuda.device_of = torch.autocast = lambda *a, **more: nullcontext()  # what is compiled for is not here
    for module, name in ((walk, "solve"), (walk, "walk"), (walk, "read"), (gradients, "gradients")):
        name = f"delta_rule_{name}"
        setattr(module, name, Recorder(getattr(module, name)))
    for d, r, channels in ((64, 0, False), (64, 1, False), (64, 2, True), (128, 2, True)):
        x, grads = ([t.to("meta") for t in y] for y in setting((64, d, d, r, channels, 1), torch.bfloat16, "cpu"))
        fused.delta_walk_backward.function(grads, fused.delta_walk.function(*x, True)[2:], *x, True)
    for fn, args, kwargs in Recorder.calls:
        print(json.dumps(compiled_call(fn, args, kwargs, set())[1]), flush=True)


if __name__ == "__main__":
    {"interpreted": interpreted, "compiled": compiled}[sys.argv[1]](*sys.argv[2:])
