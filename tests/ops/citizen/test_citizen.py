"""torch citizenship: opcheck, fullgraph compile and export with a dynamic number of tokens, autocast, meta tensors, no
Triton."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import hla_kernels as hk
from tests.ops.cases import CAUSAL, LINEAR, assert_same, extra, l2_error, tokens

MODES = {
    "two_sided": {},
    "two_sided_anchored": {"center": "qk", "mean_path": True, "q_scale": 0.3},
    "two_sided_scaled": {"scale": 0.2, "q_scale": 0.3},
    "causal": {"causal": True, "feature_map": "elu1", "normalize": True},
    "causal_decay": {"causal": True, "decay": 0.9},
}
CALLS = [
    pytest.param(op, options, id=f"{op}-{name}")
    for op in LINEAR
    for name, options in MODES.items()
    if not (options.get("causal") and op == "polynomial")
] + [pytest.param("softmax_attention", {"causal": c}, id=f"softmax-{c}") for c in (False, True)]
OPS = torch.ops.hla_kernels


@pytest.mark.parametrize("op", LINEAR)
def test_opcheck_two_sided(op):
    x = [t.requires_grad_() for t in tokens(11, d=4, dv=4, dtype=torch.float32)]
    c = extra(op, dtype=torch.float32)[0].requires_grad_() if op == "polynomial" else None
    torch.library.opcheck(OPS.two_sided, (*x, c, op, "elu1", True, None, False, 0.0, None, 1e-6))
    qkv = torch.randn(2, 11, 3, 4, 4, requires_grad=True)
    torch.library.opcheck(OPS.two_sided_qkvpacked, (qkv, c, op, None, False, "qk", True, 0.0, 0.1, 1e-6))


@pytest.mark.parametrize("op", CAUSAL)
def test_opcheck_causal(op):
    x = [t.requires_grad_() for t in tokens(11, d=4, dv=4, dtype=torch.float32)]
    gamma = torch.full((1, 2, 1, 1, 1), 0.9, requires_grad=True)
    torch.library.opcheck(OPS.causal, (*x, gamma, op, "elu1", True, None, False, "cascade", 0.0, None, 1e-6, 0))
    torch.library.opcheck(OPS.causal, (*x, None, op, None, False, "k", True, "cascade", 0.0, 0.1, 1e-6, 1))


@pytest.mark.parametrize(("op", "options"), CALLS)
def test_compile(op, options):
    """One full graph, forward and backward, for every number of tokens: no recompilation after the first call.

    (dynamic=True makes dynamo trace twice in that first call, because keyword floats start as symbols.)
    """
    torch._dynamo.reset()
    counts = set()
    counter = CompileCounterWithBackend("aot_eager")
    dynamic = True if {"scale", "decay"} & options.keys() else None
    f = lambda *x: getattr(hk, op)(*x, **options)  # noqa: E731
    compiled = torch.compile(f, fullgraph=True, dynamic=dynamic, backend=counter)
    for n in (50, 197, 64, 65):
        x = [t.requires_grad_() for t in tokens(n)]
        for t in x:
            torch._dynamo.mark_dynamic(t, 1)
        x += extra(op)
        a, b = compiled(*x), f(*x)
        counts.add(counter.frame_count)
        assert_same(a, b)
        for g, h in zip(*(torch.autograd.grad(y.sum(), x[:3]) for y in (a, b)), strict=True):
            assert_same(g, h)
    assert len(counts) == 1


@pytest.mark.parametrize("op", CAUSAL)
def test_compile_decode(op):
    """Decoding steps run one graph: the length of the state is a tensor."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    f, x = getattr(hk, op), tokens(14)
    whole = f(*x, causal=True, decay=0.9)
    step = torch.compile(lambda *x, state: f(*x, causal=True, decay=0.9, state=state, return_state=True),
                         fullgraph=True, backend=counter)  # fmt: skip
    _, state = f(*[t[:, :9] for t in x], causal=True, decay=0.9, return_state=True)
    for i in range(9, 14):
        y, state = step(*[t[:, i : i + 1] for t in x], state=state)
        assert_same(y, whole[:, i : i + 1])
    assert counter.frame_count == 1


class Module(torch.nn.Module):
    def __init__(self, op, options):
        super().__init__()
        self.op, self.options = op, options
        if op == "polynomial":
            self.c = torch.nn.Parameter(extra(op)[0])

    def forward(self, q, k, v):
        more = (self.c,) if self.op == "polynomial" else ()
        return getattr(hk, self.op)(q, k, v, *more, **self.options)


@pytest.mark.parametrize(("op", "options"), CALLS)
def test_export(op, options):
    module, n = Module(op, options), torch.export.Dim("n", min=2, max=8192)
    # torch 2.11's composite softmax attention puts guards on the strides of grouped heads; equal ones export everywhere
    sizes = {"h": 4, "hk": 4, "d": 8, "dv": 8} if op == "softmax_attention" else {}
    program = torch.export.export(module, tokens(50, **sizes), dynamic_shapes=({1: n}, {1: n}, {1: n}))
    for count in (2, 64, 131):
        x = tokens(count, **sizes)
        assert_same(program.module()(*x), module(*x))


@pytest.mark.parametrize(("op", "options"), CALLS)
def test_autocast(op, options):
    """Inputs are cast on entry and nothing else changes: the same bits as the call on bfloat16 tensors."""
    x = [t.requires_grad_() for t in tokens(40, dtype=torch.float32)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = getattr(hk, op)(x[0], x[1].double().float(), x[2].bfloat16(), *extra(op, dtype=torch.float32), **options)
        assert y.dtype == torch.bfloat16
        y.float().sum().backward()  # inside autocast, as a user may do
    low = [t.detach().bfloat16().requires_grad_() for t in x]
    z = getattr(hk, op)(*low, *extra(op, dtype=torch.float32), **options)
    assert torch.equal(y, z)
    z.float().sum().backward()
    for a, b in zip(x, low, strict=True):
        assert a.grad.dtype == torch.float32 and (op == "softmax_attention" or torch.equal(a.grad.bfloat16(), b.grad))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert getattr(hk, op)(*tokens(5), *extra(op), **options).dtype == torch.float64


@pytest.mark.parametrize(("op", "options"), CALLS)
def test_meta(op, options):
    x = [t.to("meta") for t in tokens(40)]
    y = getattr(hk, op)(*x, *[c.to("meta") for c in extra(op)], **options)
    assert y.shape == (2, 40, 4, 3) and y.device.type == "meta"


@pytest.mark.parametrize(("op", "options"), CALLS)
def test_empty_batch(op, options):
    """B = 0: empty outputs and gradients, also packed and with a state; parameters get zeros."""
    packed = torch.empty(0, 70, 3, 4, 5, requires_grad=True)
    x = [t[:0].requires_grad_() for t in tokens(70, dtype=torch.float32)]
    more = [c.requires_grad_() for c in extra(op, dtype=torch.float32)]
    y = getattr(hk, op)(*x, *more, **options)
    assert y.shape == (0, 70, 4, 3)
    for t, g in zip((*x, *more), torch.autograd.grad(y.sum(), (*x, *more)), strict=True):
        assert g.shape == t.shape and not bool(g.any())
    y = getattr(hk, op + "_qkvpacked")(packed, *more, **options)
    assert y.shape == (0, 70, 4, 5) and torch.autograd.grad(y.sum(), packed)[0].shape == packed.shape
    if op != "softmax_attention":
        y, state = getattr(hk, op)(*x, *more, **options, return_state=True)
        again, _ = getattr(hk, op)(*x, *more, **options, state=state, return_state=True)
        assert again.shape == y.shape and int(state.n) == 70


@pytest.mark.parametrize(("op", "options"), [row for row in CALLS if row.values[0] != "softmax_attention"])
def test_forward_mode(op, options):
    """Never a silent zero: an error without a state, the derivative through the plain forms."""
    x, more = tokens(9, h=2), extra(op, 2)
    tangent = torch.randn_like(x[0])

    def f(q, **kind):
        y = getattr(hk, op)(q, *x[1:], *more, **options, **kind)
        return y[0] if isinstance(y, tuple) else y

    with pytest.raises(ValueError, match="no forward-mode derivative"):
        torch.func.jvp(f, (x[0],), (tangent,))
    packed, qkv = lambda qkv: getattr(hk, op + "_qkvpacked")(qkv, *more, **options), torch.stack([x[0]] * 3, 2)
    with pytest.raises(ValueError, match="no forward-mode derivative"):
        torch.func.jvp(packed, (qkv,), (qkv,))
    _, slow = torch.func.jvp(lambda q: f(q, impl="reference"), (x[0],), (tangent,))
    _, plain = torch.func.jvp(lambda q: f(q, return_state=True), (x[0],), (tangent,))
    assert_same(plain, slow, 1e-9)
    assert float(slow.abs().max()) > 0


@pytest.mark.parametrize(("op", "options"), [row for row in CALLS if row.values[0] != "softmax_attention"])
def test_double_backward(op, options):
    """torch's own error without a state; second derivatives through the plain forms."""
    x, more = [t.requires_grad_() for t in tokens(9)], extra(op)

    def second(**kind):
        y = getattr(hk, op)(*x, *more, **options, **kind)
        y = y[0] if isinstance(y, tuple) else y
        (g,) = torch.autograd.grad(y.square().sum(), x[0], create_graph=True)
        return torch.autograd.grad(g.square().sum(), x[0])[0]

    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        second()
    assert_same(second(return_state=True), second(impl="reference"), 1e-9)


@pytest.mark.parametrize("op", hk.OPS)
def test_vmap(op):
    """One call after the other, gradients too."""
    f, more = getattr(hk, op), extra(op)
    x = [torch.stack(pair).requires_grad_() for pair in zip(tokens(7), tokens(7, seed=1), strict=True)]
    y = torch.vmap(lambda *t: f(*t, *more))(*x)
    z = torch.stack([f(*(t[i] for t in x), *more) for i in range(2)])
    both = [torch.autograd.grad(o.sin().sum(), x) for o in (y, z)]
    assert_same(y, z, 1e-12)
    for a, b in zip(*both, strict=True):
        assert_same(a, b, 1e-12)


@pytest.mark.parametrize("op", hk.OPS)
def test_explain(op):
    x = (*tokens(5), *extra(op))
    chosen = hk.explain(op, *x)
    assert chosen.impl == "torch" and set(chosen.why_not) == {"reference", "triton"}
    assert "not on cpu" in chosen.why_not["triton"]
    assert hk.explain(getattr(hk, op), *x, impl="reference").impl == "reference"
    with pytest.raises(ValueError, match="run on CUDA devices"):
        getattr(hk, op)(*x, impl="triton")


@pytest.mark.parametrize("op", hk.OPS)
def test_reference_agrees(op):
    """impl="reference" upcasts and casts back like the others."""
    x = (*tokens(30, dtype=torch.bfloat16), *extra(op))
    a, b = (getattr(hk, op)(*x, impl=impl) for impl in ("auto", "reference"))
    assert a.dtype == b.dtype == torch.bfloat16
    assert l2_error(a, b) < 2 * torch.finfo(torch.bfloat16).eps


def test_imports_without_triton():
    """In a fresh process where importing Triton (or anything of the zoo's world) fails, every operator runs."""
    code = """
import sys
for name in ("triton", "numpy", "timm", "torchvision", "einops", "diffusers", "accelerate"):
    sys.modules[name] = None
import torch, hla_kernels as hk
x = [torch.randn(1, 9, 2, 4) for _ in range(3)]
for op in hk.OPS:
    more = (torch.ones(2, 4),) if op == "polynomial" else ()
    assert getattr(hk, op)(*x, *more).shape == x[0].shape
"""
    folder = Path(hk.__file__).parents[1]
    env = {"PYTHONPATH": str(folder), "PATH": ""}
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, env=env)
