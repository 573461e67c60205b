"""First calls: the kernels of a call, and of the backward that will follow, are compiled side by side."""

import itertools
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from hla_kernels.dispatch import recording

pytest.importorskip("triton")
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import jit

OPS = torch.ops.hla_kernels
REST = (0.0, None, 1e-6, 1.0, "triton", False)
FORMS = (
    ("linear_attention", None, False, None, False), ("ahla", "elu1", True, None, False),
    ("hla3", "relu", False, "k", True), ("polynomial", None, False, None, False),
)  # fmt: skip
DEVICES = itertools.count(1000)


class Kernel:
    """Stands in for what was compiled."""

    function = packed_metadata = src = metadata = None

    def __init__(self, run) -> None:
        self.run = run

    def launch_metadata(self, *args) -> None:
        pass

    def __getitem__(self, grid):
        return self.run


class Compiler:
    """Stands in for Triton's: notes what is compiled and what runs, the first one waits until another has begun."""

    def __init__(self) -> None:
        self.compiled: list[str] = []
        self.ran: list[str] = []
        self.launchers = 0
        self.broken: set[str] = set()
        self.two = threading.Event()
        self.together = False

    def __call__(self, src, target=None, options=None, _env_vars=None):
        name = src.fn.__name__
        if name in self.broken:
            raise NotImplementedError(name)
        self.compiled.append(name)
        if len(self.compiled) > 1:
            self.two.set()
        if threading.current_thread() is not threading.main_thread():
            warnings.simplefilter("error")  # as Triton's does for a while
            self.together |= self.two.wait(20)
        return Kernel(lambda *args: self.ran.append(name))

    def launcher(self, src, metadata) -> None:
        """What Triton calls for a function that launches a kernel."""
        self.launchers += 1


@pytest.fixture
def compiler(monkeypatch):
    """No kernel was ever compiled, and none runs."""
    found, device = Compiler(), next(DEVICES)
    active = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_device=lambda: device,
        get_current_stream=lambda device: 0, launcher_cls=found.launcher,
    )  # fmt: skip
    monkeypatch.setattr(jit, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr("triton.runtime.driver", SimpleNamespace(active=active))
    monkeypatch.setattr("triton.compiler.compile", found)
    monkeypatch.setattr(recording, "RECORDINGS", {})
    monkeypatch.setattr(recording, "ONCE", set())
    return found


def tokens(n=37, h=2):
    return torch.randn(2, n, 3, h, 64).bfloat16()


def forward(form, qkv, save=True):
    c = torch.ones(qkv.shape[3], 4) if form[0] == "polynomial" else None
    return OPS.two_sided_qkvpacked(qkv, c, *form, *REST, save)


def backward(form, qkv, o, saved):
    c = torch.ones(qkv.shape[3], 4) if form[0] == "polynomial" else None
    return OPS.two_sided_qkvpacked_backward(torch.ones_like(o), saved, qkv, c, *form, *REST)


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f[0])
def test_a_forward_compiles_what_its_backward_needs(compiler, form):
    before, qkv = threading.active_count(), tokens()
    o, saved = forward(form, qkv)
    assert compiler.together and threading.active_count() == before
    assert ("error", None, Warning, None, 0) not in warnings.filters
    read, wanted = list(compiler.ran), sorted(compiler.compiled)
    assert read and set(read) < set(wanted) and compiler.launchers == len(wanted)
    backward(form, qkv, o, saved)
    assert sorted(compiler.compiled) == wanted and set(compiler.ran) == set(wanted)
    assert len(set(wanted)) == len(wanted)  # none twice
    other = tokens(90)
    backward(form, other, *forward(form, other))
    assert sorted(compiler.compiled) == wanted and compiler.ran == 2 * compiler.ran[: len(compiler.ran) // 2]


def test_without_a_gradient_the_kernels_of_a_forward_alone(compiler):
    forward(FORMS[1], tokens(), save=False)
    assert compiler.together and sorted(compiler.compiled) == sorted(compiler.ran)


def test_an_error_is_raised_by_the_call_that_launches(compiler):
    form, qkv = FORMS[1], tokens()
    compiler.broken = {"apply_grads"}
    o, saved = forward(form, qkv)
    with pytest.raises(NotImplementedError, match="apply_grads"):
        backward(form, qkv, o, saved)
    compiler.broken = set()
    backward(form, qkv, o, saved)
    assert compiler.compiled.count("apply_grads") == 1 and compiler.ran[-1] == "apply_grads"
    compiler.broken = {"middle"}
    with pytest.raises(NotImplementedError, match="middle"):
        forward(FORMS[2], qkv)


def test_memory_for_a_forward_alone(compiler, monkeypatch):
    """A backward that would not fit is compiled when it comes."""

    def full(*args, **kwargs):
        raise torch.OutOfMemoryError

    form, qkv = FORMS[1], tokens()
    with monkeypatch.context() as patch:
        patch.setattr("hla_kernels.hla.fused.backward", full)
        o, saved = forward(form, qkv)
    assert sorted(compiler.compiled) == sorted(compiler.ran)
    backward(form, qkv, o, saved)
    assert set(compiler.ran) == set(compiler.compiled) > {"middle", "apply"}


def test_in_a_pool_of_the_caller(compiler):
    with ThreadPoolExecutor() as pool, triton.AsyncCompileMode(pool):
        compiler.two.set()
        forward(FORMS[1], tokens())
    assert sorted(compiler.compiled) == sorted(compiler.ran)


def test_block_mixing(compiler):
    qkv, mixing = tokens(64), torch.ones(4, 4) / 4
    rest = ("ahla", [8, 8], [2, 2], 0, "relu", True, False, None, 1.0, 1e-6, False, "bfloat16", "triton")
    o, saved = OPS.mhla_qkvpacked(qkv, mixing, None, None, None, *rest, True)
    assert compiler.together
    wanted = sorted(compiler.compiled)
    OPS.mhla_qkvpacked_backward(torch.ones_like(o), saved, qkv, mixing, None, None, None, *rest)
    assert sorted(compiler.compiled) == wanted and set(compiler.ran) == set(wanted)
