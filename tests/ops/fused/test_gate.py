"""Functions without `impl`: their kernels run after a first-use check, and the torch form where it fails."""

import warnings

import pytest
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from hla_kernels.dispatch import forms, gate, trial, verify
from hla_kernels.features import power, rms_norm


def right(impl):
    return [torch.ones(3)]


def wrong(impl):
    return [torch.full((3,), 1.0 + (impl == "triton"))]


@pytest.fixture
def on_gpu(machine, monkeypatch):
    """The machine, where tensors seem to be on CUDA."""
    on_cuda = gate.why_no_kernels
    monkeypatch.setattr(gate, "why_no_kernels", lambda device: on_cuda(torch.device("cuda")))
    monkeypatch.setattr(gate, "HAS_TRITON", True)
    monkeypatch.setattr(gate, "KNOWN", forms.KNOWN)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
    monkeypatch.setattr(trial, "DEVICE", "cpu")
    return machine


def broken(*args, **options):
    raise RuntimeError("PTX is not for this GPU")


X, WEIGHT, EXPONENTS = torch.randn(2, 5, 4, 32, dtype=torch.bfloat16), 1 + torch.rand(32), torch.full((4,), 2.0)
FUNCTIONS = {
    "power_pair": lambda: torch.cat(power.power_pair(X, X[:, :3], EXPONENTS, EXPONENTS), 1),
    "power": lambda: power.power(X, EXPONENTS),
    "rms_norm": lambda: rms_norm.rms_norm(X, WEIGHT, 1e-6),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("fault", ("AMD", "PTX", "differ", "result 0 is", "before the capture", "capability 8.9"))
def test_functions_without_impl(on_gpu, monkeypatch, name, fault):
    """What is wrong with their kernels, or not known, makes torch run, with one warning; nothing raises."""
    pytest.importorskip("triton")
    from hla_kernels.features import power_kernels

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "is_cuda", property(lambda self: False))
        expected = FUNCTIONS[name]()
    new = torch.zeros_like if fault == "result 0 is" else lambda x, **_: torch.full_like(x, torch.nan)
    monkeypatch.setattr(torch, "empty", lambda *size, **options: new(torch.zeros(*size, **options)))
    monkeypatch.setattr(torch, "empty_like", new)
    launch = broken if fault == "PTX" else lambda *args, **options: None
    for module in (power_kernels, rms_norm):
        monkeypatch.setattr(module, "launch", launch)
    if fault == "AMD":
        monkeypatch.setattr(torch.version, "hip", "6.4")
    if fault == "before the capture":
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    if fault == "capability 8.9":
        monkeypatch.setenv(verify.SWITCH, "0")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        assert all(torch.equal(FUNCTIONS[name](), expected) for _ in range(2))
    assert [fault in str(w.message) for w in found] == [True]
    assert len(forms.KNOWN) == (fault != "before the capture")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_kernels_of_functions_run_after_one_check(on_gpu, monkeypatch, name):
    """Later calls look the result up; another dtype is another form."""
    calls, launched = on_gpu(right), []
    operator = "rms_norm" if name == "rms_norm" else "power_pair"
    seen = lambda *given: launched.append(given) or (given[0], given[1])  # noqa: E731
    monkeypatch.setattr(torch.ops.hla_kernels, operator, seen)
    FUNCTIONS[name]()
    with monkeypatch.context() as patch:
        patch.setattr(gate, "_reason", None)
        FUNCTIONS[name]()
    assert len(calls) == 1 and len(launched) == 2
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "X", X.half())
        FUNCTIONS[name]()
    assert len(calls) == 2 and calls[0][0] == operator


@pytest.mark.parametrize(("run", "expected"), ((right, 1), (wrong, 0)))
def test_functions_while_compiling(on_gpu, run, expected):
    """One graph, for any sizes; the cache is neither read nor written."""
    calls = on_gpu(run)
    torch.compiler.reset()

    @torch.compile(backend="eager", fullgraph=True, dynamic=True)
    def traced(x):
        return x + gate.trusted("power_pair", x.device, (x.dtype,), (x.shape[2], x.shape[3]))

    assert torch.equal(traced(X), X + expected)
    assert calls == [("power_pair", (X.dtype,), (4, 32))] and not forms.KNOWN


def test_the_kernels_of_fake_tensors_with_symbolic_sizes(on_gpu):
    calls = on_gpu(right)
    mode = torch._subclasses.FakeTensorMode(shape_env=ShapeEnv())
    x = mode.from_tensor(torch.empty(3, 50, 4, 64), static_shapes=False)
    assert gate.trusted("power_pair", x.device, (x.dtype,), (x.shape[2], x.shape[3]))
    assert calls == [("power_pair", (torch.float32,), (4, 64))]


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32))
@pytest.mark.parametrize(
    ("name", "sizes"), (("power_pair", (3, 2, 24)), ("rms_norm", (24, False, 0)), ("rms_norm", (24, True, 4)))
)
def test_trials_of_functions(monkeypatch, name, sizes, dtype):
    """They have gradients of all inputs; the torch form agrees with itself in float64."""
    monkeypatch.setattr(trial, "DEVICE", "cpu")
    monkeypatch.setattr(rms_norm, "PROGRAMS", 6)
    count = 2 if name == "power_pair" else 1
    kinds = ((x,) * count + (torch.float32,) * count for x in (dtype, torch.float64))
    first, exact = (next(trial.runs((name, x, sizes)))("torch") for x in kinds)
    assert len(first) == 3 * count
    assert all((x - y).norm() <= verify.LIMITS[dtype] * y.norm() for x, y in zip(first, exact, strict=True))
