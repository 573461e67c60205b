"""Hand-written and recomputed backwards against autograd through the definition, and gradcheck."""

import pytest
import torch

import hla_kernels as hk
from tests.ops.cases import (
    BOTH_MODES,
    CAUSAL,
    DECAYS,
    LINEAR,
    OPTIONS,
    Constant,
    assert_same,
    coefficients,
    defined,
    extra,
    literal,
    table,
    tokens,
)


def gradients(form, op, inputs, options):
    y = form(op, *inputs[: 4 if op == "polynomial" else 3], **options)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(3), dtype=y.dtype)
    return torch.autograd.grad(y, inputs, weights)


def public(op, *args, **options):
    return getattr(hk, op)(*args, **options)


def leaves(op, options, n=23, **sizes):
    """(q, k, v, coefficients of polynomial, decay tensor), all requiring gradients, and options with that decay."""
    inputs = [x.requires_grad_() for x in tokens(n, **sizes)]
    if op == "polynomial":
        inputs.append(coefficients().requires_grad_())
    decay = options.get("decay")
    if isinstance(decay, torch.Tensor):
        decay = decay.clone().requires_grad_()
        inputs.append(decay)
    return inputs, {**options, **({} if decay is None else {"decay": decay})}


@pytest.mark.parametrize(("op", "options"), table(causal=False) + table(causal=True))
def test_gradients(op, options):
    inputs, options = leaves(op, options)
    ours = gradients(public, op, inputs, options)
    for a, b in zip(ours, gradients(literal, op, inputs, options), strict=True):
        assert_same(a, b, 1e-9)


@pytest.mark.parametrize("n", [1, 65, 130])
@pytest.mark.parametrize("op", CAUSAL)
def test_gradients_across_chunks(op, n):
    inputs, options = leaves(op, {"causal": True, "scale": 0.1, **DECAYS["heads"]}, n=n, b=1)
    ours = gradients(public, op, inputs, options)
    for a, b in zip(ours, gradients(literal, op, inputs, options), strict=True):
        assert_same(a, b, 1e-9)


CHECKED = [
    (op, causal, name)
    for op, causal in BOTH_MODES
    for name in ("plain", "ratio_softmax", "anchored_qk", "ridge_all")
    if defined(op, OPTIONS[name])
]


@pytest.mark.parametrize(("op", "causal", "name"), CHECKED)
def test_gradcheck(op, causal, name):
    options = {**OPTIONS[name], "causal": causal, **(DECAYS["key_heads"] if causal else {})}
    inputs, options = leaves(op, options, n=4, b=1, h=4 if op == "polynomial" or causal else 2, hk=2, d=2, dv=2)

    def f(*xs):
        given = {**options, **({"decay": xs[-1]} if causal else {})}
        return public(op, *xs[: 4 if op == "polynomial" else 3], **given)

    assert torch.autograd.gradcheck(f, inputs)


@pytest.mark.parametrize(("op", "options"), table(causal=False, names=("plain", "ratio_elu1", "anchored_qk", "ridge")))
def test_packed(op, options):
    """The packed gradient equals the three gradients, and is one contiguous tensor."""
    qkv = torch.randn(2, 19, 3, 4, 6, dtype=torch.float64, requires_grad=True)
    more = (coefficients().requires_grad_(),) if op == "polynomial" else ()
    packed = getattr(hk, op + "_qkvpacked")(qkv, *more, **options)
    plain = getattr(hk, op)(*qkv.unbind(2), *more, **options)
    assert_same(packed, plain)
    weights = torch.randn_like(plain)
    ours = torch.autograd.grad(packed, (qkv, *more), weights)
    assert ours[0].is_contiguous() and ours[0].shape == qkv.shape
    for a, b in zip(ours, torch.autograd.grad(plain, (qkv, *more), weights), strict=True):
        assert_same(a, b)


@pytest.mark.parametrize("op", [*CAUSAL, "softmax_attention"])
def test_packed_causal_and_state(op):
    qkv = torch.randn(2, 19, 3, 4, 6, dtype=torch.float64, requires_grad=True)
    f = getattr(hk, op + "_qkvpacked")
    plain = getattr(hk, op)(*qkv.unbind(2), causal=True)
    packed = f(qkv, causal=True)
    assert_same(packed, plain)
    grad = torch.autograd.grad(packed.sum(), qkv)[0]
    assert grad.is_contiguous()
    assert_same(grad, torch.autograd.grad(plain.sum(), qkv)[0])
    if op != "softmax_attention":
        y, state = f(qkv, causal=True, return_state=True)
        assert_same(y, plain)
        assert int(state.n) == 19


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("op", CAUSAL)
def test_gradients_through_state(op, causal):
    """Back-propagation through a state from one segment to the next equals that through the whole."""
    inputs = [x.requires_grad_() for x in tokens(75)]
    f = getattr(hk, op)
    options = {"causal": causal, "feature_map": "elu1", "normalize": True}
    whole = f(*inputs, **options)[:, 70:]
    _, state = f(*[x[:, :70] for x in inputs], **options, return_state=True)
    last = f(*[x[:, 70:] for x in inputs], **options, state=state)
    assert_same(last, whole)
    ours, truth = (torch.autograd.grad(y.square().sum(), inputs) for y in (last, whole))
    for a, b in zip(ours, truth, strict=True):
        assert_same(a, b)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("op", LINEAR)
def test_an_output_without_gradient(op, causal):
    """Nothing flows back, no error, and what flows on other ways arrives."""
    if causal and op == "polynomial":
        return
    x = [t.requires_grad_() for t in tokens(9)]
    y = Constant.apply(getattr(hk, op)(*x, *extra(op), causal=causal))
    (y.sum() + 3 * x[0].sum()).backward()
    assert bool((x[0].grad == 3).all()) and all(t.grad is None or not bool(t.grad.any()) for t in x[1:])


RECOMPUTED = {  # in the torch form, whose backward differentiates a function again
    "linear_attention": {},
    "polynomial": {"coefficients": torch.ones(2, 4)},
    "hla2": {"causal": True},
    "mhla": {"mixing": torch.full((4, 4), 0.25), "grid": (4, 4), "blocks": (2, 2)},
    "taylor2": {"coefficients": torch.ones(2, 2)},
    "delta": {},
}


@pytest.mark.parametrize("op", RECOMPUTED)
def test_a_backward_under_hooks_of_saved_tensors(op):
    """The hooks see the arguments of the operator, and nothing of what its backward computes again."""
    inputs = [torch.randn(1, 16, 2, 8, requires_grad=True) for _ in range(3)]
    f, seen = getattr(hk, op), []
    expected = torch.autograd.grad(f(*inputs, **RECOMPUTED[op]).square().sum(), inputs)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        y = f(*inputs, **RECOMPUTED[op]).square().sum()
        with torch.autograd.graph.saved_tensors_hooks(lambda x: seen.append(x) or x, lambda x: x):
            found = torch.autograd.grad(y, inputs)
    assert not seen
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def test_arguments_without_effect():
    """Columns of rank 0 alone need a gradient."""
    q, k, v = torch.randn(3, 1, 5, 2, 8).unbind()
    a = torch.zeros(1, 5, 2, 0, 8, requires_grad=True)
    (found,) = torch.autograd.grad(hk.delta(q, k, v, a=a, b=a.detach()).sum(), a)
    assert found.shape == a.shape


@pytest.mark.parametrize("packed", (False, True))
def test_fixed_coefficients(packed):
    """Frozen or not, compiled or not: the same gradients of the tokens, and none of frozen coefficients."""
    qkv, grad = torch.randn(2, 9, 3, 4, 8, dtype=torch.double), torch.randn(2, 9, 4, 8, dtype=torch.double)
    c = torch.randn(4, 4, dtype=torch.double)

    def run(call, frozen):
        x = [qkv.clone().requires_grad_()] if packed else [t.clone().requires_grad_() for t in qkv.unbind(2)]
        own = c.clone().requires_grad_(not frozen)
        assert hk.explain("polynomial", *x, own).fixed == frozen
        with torch.no_grad():
            assert hk.explain("polynomial", *x, own).fixed
        call(*x, own).backward(grad)
        assert (own.grad is None) == frozen
        return [t.grad for t in x]

    op = hk.polynomial_qkvpacked if packed else hk.polynomial
    expected = run(op, False)
    compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
    for call, frozen in ((op, True), (compiled, True), (compiled, False), (compiled, True)):
        assert all(torch.equal(a, b) for a, b in zip(run(call, frozen), expected, strict=True))
    assert not hk.explain("hla2", *qkv.unbind(2)).fixed


@pytest.mark.parametrize("grad", (True, False))
@pytest.mark.parametrize("frozen", (True, False))
def test_fixed_coefficients_of_an_exported_program(frozen, grad):
    """Whether they are is a property of the parameter, not of the mode in which the program was exported."""

    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.c = torch.nn.Parameter(torch.randn(4, 4, dtype=torch.double), not frozen)

        def forward(self, q, k, v):
            return hk.polynomial(q, k, v, self.c)

    module, n = Module(), torch.export.Dim("n", min=2, max=8192)
    x = [torch.randn(2, 9, 4, 8, dtype=torch.double) for _ in range(3)]
    with torch.set_grad_enabled(grad):
        program = torch.export.export(module, tuple(x), dynamic_shapes=({1: n},) * 3).module()
    x = [torch.randn(2, 13, 4, 8, dtype=torch.double, requires_grad=True) for _ in range(3)]
    grads = []
    for call in (program, module):
        own = [] if frozen else [dict(call.named_parameters())["c"]]
        grads.append(torch.autograd.grad(call(*x).square().sum(), x + own))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
