"""Launches of a call that the next call of its form repeats."""

import ast
import gc
import weakref
from pathlib import Path

import pytest
import torch

import hla_kernels as hk
from hla_kernels.dispatch import recording
from hla_kernels.hla.stages import operator as stages
from hla_kernels.hla.streaming.contents import STAGES
from hla_kernels.sequences import Sequences
from hla_kernels.softmax.adaptive.fused import operator as adaptive

pytest.importorskip("triton")
import triton
from triton.runtime.jit import JITFunction

OPS = torch.ops.hla_kernels
REST = (0.0, None, 1e-6, 1.0, "triton", False)
FORMS = (
    ("linear_attention", None, False, None, False), ("linear_attention", "elu1", True, None, False),
    ("hla2", None, False, None, False), ("ahla", "elu1", True, None, False), ("hla3", "relu", False, "qk", True),
    ("polynomial", None, False, None, False), ("polynomial", "relu", True, None, False),
)  # fmt: skip
SIZES = ((2, 37, 2, 64), (128, 130, 2, 64), (200, 70, 2, 72), (1, 3000, 2, 64))


class Everything:
    """Forms that were seen once: all."""

    def __contains__(self, form) -> bool:
        return True

    def discard(self, form) -> None:
        pass


class Compiled:
    """Stands in for what Triton compiled: compiled[grid](*args) is noted."""

    def __init__(self, kernel, seen):
        self.kernel, self.seen = kernel, seen

    def __getitem__(self, grid):
        return lambda *args: self.seen.append((self.kernel, grid[0], args))


@pytest.fixture
def seen(monkeypatch):
    """The launches: (kernel, programs, every argument). Nothing is computed, and no address is used twice."""
    launches: list = []
    alive: list = []
    for name in ("empty", "empty_like", "empty_strided"):
        new = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *args, new=new, **more: alive.append(new(*args, **more)) or alive[-1])
    for home, name in ((Sequences, "tables"), (adaptive, "tables"), (stages.Constants, "of")):
        new = getattr(home, name)
        monkeypatch.setattr(home, name, lambda *args, new=new: alive.append(new(*args)) or alive[-1])

    def run(kernel, grid):
        def launch(*args, **options):
            bound = kernel.signature.bind(*args, **{k: x for k, x in options.items() if k in kernel.arg_names})
            bound.apply_defaults()
            Compiled(kernel, launches)[grid](*bound.arguments.values())
            return Compiled(kernel, launches)

        return launch

    monkeypatch.setattr(JITFunction, "__getitem__", run)
    monkeypatch.setattr(recording, "RECORDINGS", {})
    monkeypatch.setattr(recording, "ONCE", Everything())
    return launches


def results(form, x, grad, coefficients, save=True):
    """Everything that a forward and a backward return."""
    if len(x) == 1:
        o, saved = OPS.two_sided_qkvpacked(*x, coefficients, *form, *REST, save)
        return o, saved, *OPS.two_sided_qkvpacked_backward(grad, saved, *x, coefficients, *form, *REST)
    o, saved = OPS.two_sided(*x, coefficients, *form, *REST, save)
    return o, saved, *OPS.two_sided_backward(grad, saved, *x, coefficients, *form, *REST)


def normal(launches, tensors):
    """Launches with addresses by their place in one of the tensors, or else by their order of appearance. Some programs
    have a heap that begins below 2^32; no other number is above 2^24."""
    others: dict = {}

    def place(at):
        for i, x in enumerate(tensors):
            if x is not None and x.data_ptr() <= at < x.data_ptr() + x.nbytes:
                return i, at - x.data_ptr()
        return "other", others.setdefault(at, len(others))

    def plain(x):
        if isinstance(x, tuple):
            return tuple(map(plain, x))
        if isinstance(x, torch.Tensor):
            return place(x.data_ptr()) if x.numel() > 0 else 0  # nothing of it is read
        return place(x) if isinstance(x, int) and x > 2**24 else x

    return [(kernel.fn.__name__, programs, *map(plain, args)) for kernel, programs, args in launches]


def inputs(form, sizes, packed, dtype=torch.bfloat16):
    b, n, h, d = sizes
    x = [torch.randn(b, n, 3, h, d).to(dtype)] if packed else [torch.randn(b, n, h, d).to(dtype) for _ in range(3)]
    coefficients = torch.ones(h, 4) if form[0] == "polynomial" else None
    return x, torch.randn(b, n, h, d).to(dtype), coefficients


def replayed(monkeypatch, seen, call) -> list:
    """Check that call() -> (outputs, inputs) is replayed with the launches of a plain run; return its recordings."""
    call()
    first = len(seen)
    with monkeypatch.context() as patch:
        patch.setattr(recording, "_record", None)  # only repeated
        got, given = call()
    repeated = normal(seen[first:], [*given, *got])
    found = list(recording.RECORDINGS.values())
    recording.RECORDINGS.clear()
    seen.clear()
    want, given = call()
    assert repeated == normal(seen, [*given, *want]) and len(seen) == first
    assert [(x.shape, x.stride(), x.dtype) for x in got] == [(x.shape, x.stride(), x.dtype) for x in want]
    recording.RECORDINGS.clear()
    seen.clear()
    return found


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("form", FORMS, ids=lambda f: f"{f[0]}-{f[1]}")
def test_the_same_launches(monkeypatch, seen, form, sizes):
    def call(packed):
        x, *rest = inputs(form, sizes, packed)
        return results(form, x, *rest), [*x, *rest]

    assert all(replayed(monkeypatch, seen, lambda: call(True)) + replayed(monkeypatch, seen, lambda: call(False)))


def test_fixed_coefficients_are_another_form(monkeypatch, seen):
    x, names = inputs(("polynomial",), (32, 197, 4, 64), True), []
    for fixed in (False, True, False, True):
        monkeypatch.setitem(globals(), "REST", (*REST[:-1], fixed))
        found = results(("polynomial", None, False, None, False), *x)
        assert found[-1].shape == ((0,) if fixed else (4, 4))
        names.append([kernel.fn.__name__ for kernel, *_ in seen])
        seen.clear()
    assert names[:2] == names[2:] and names[0] == [*names[1], "hla_sum_coefficients"]


def blocks(order, normalize, grid, cut, packed, sizes):
    """Everything that a forward and a backward of `mhla` return, and its inputs."""
    (b, h, d), n = sizes, grid[0] * grid[1]
    x, grad, _ = inputs(("",), (b, n, h, d), packed)
    m = cut[0] * cut[1]
    mixing = torch.ones(m, m) / m
    rest = (order, [*grid], [*cut], 0, "relu", normalize, False, None, 1.0, 1e-6, False, "bfloat16", "triton")
    forward, backward = (OPS.mhla_qkvpacked, OPS.mhla_qkvpacked_backward) if packed else (OPS.mhla, OPS.mhla_backward)
    o, saved = forward(*x, mixing, None, None, None, *rest, True)
    return (o, saved, *backward(grad, saved, *x, mixing, None, None, None, *rest)), [*x, grad, mixing]


@pytest.mark.parametrize("order", ("la", "ahla", "hla2"))
@pytest.mark.parametrize("normalize", (False, True))
@pytest.mark.parametrize(("grid", "cut"), (((32, 32), (4, 4)), ((9, 9), (5, 5)), ((64, 64), (8, 16))), ids=str)
def test_the_same_launches_of_blocks(monkeypatch, seen, order, normalize, grid, cut):
    for packed in (True, False):
        replayed(monkeypatch, seen, lambda packed=packed: blocks(order, normalize, grid, cut, packed, (2, 2, 64)))


def tiles(select, far, masked, dtype):
    """Everything that a forward and a backward of `adaptive_multipole` return, and its inputs."""
    x, grad, _ = inputs(("",), (2, 150, 2, 64), False, dtype)
    mask = torch.arange(150) < torch.tensor([[150], [120]]) if masked else None
    rest = ([12, 12], 2, 4, 64, 16, 2, select, far, 0.125)
    o, *saved = OPS.adaptive_multipole(*x, mask, *rest)
    return (o, *saved, *OPS.adaptive_multipole_backward([grad], [o, *saved], *x, mask, *rest)), [*x, grad]


@pytest.mark.parametrize("select", ("error", "mass", "mean", "near"))
@pytest.mark.parametrize("far", ("first", "mean"))
@pytest.mark.parametrize("masked", (False, True))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
def test_the_same_launches_of_tiles(monkeypatch, seen, select, far, masked, dtype):
    found = replayed(monkeypatch, seen, lambda: tiles(select, far, masked, dtype))
    assert len(found) == 2 and all(found)


CALLS = (
    ("linear_attention", None, False, 0), ("ahla", "identity", False, 0), ("hla3", "relu", False, 0),
    ("hla2", "relu", True, 0), ("linear_attention", "elu1", True, 16), ("hla2", None, False, 16),
)  # fmt: skip


def causal(op, feature_map, normalize, frame, decay, save):
    """Everything that a causal forward and, with `save`, its backward return, and its inputs."""
    x, grad, _ = inputs(("",), (2, 160, 2, 64), False)
    gamma = torch.full((1, 2, 1, 1, 1), 0.9) if decay else None
    o, *saved = OPS.causal_stages(*x, gamma, None, op, feature_map, normalize, 0.5, frame, 1e-6, save, False)
    if not save:
        return (o, *saved), x
    rest = (None, None, [o, *saved], False, op, feature_map, normalize, 0.5, frame)
    return (o, *saved, *OPS.causal_stages_backward(grad, *x, gamma, *rest)), [*x, grad]


@pytest.mark.parametrize("call", CALLS, ids=str)
@pytest.mark.parametrize("decay", (False, True))
@pytest.mark.parametrize("save", (False, True))
def test_the_same_launches_of_causal_calls(monkeypatch, seen, call, decay, save):
    found = replayed(monkeypatch, seen, lambda: causal(*call, decay, save))
    wide = save and call[2] and call[0] != "linear_attention"  # torch casts to and from float32
    assert len(found) == 1 + save and all((x is None) == wide for x in found)


@pytest.mark.parametrize("op", ("linear_attention", "ahla", "hla2", "hla3"))
@pytest.mark.parametrize("decay", (False, True))
def test_the_same_launches_of_a_decoded_token(monkeypatch, seen, op, decay):
    def call():
        x, _, _ = inputs(("",), (1, 1, 2, 64), True)
        gamma = torch.full((1, 2, 1, 1, 1), 0.9) if decay else None
        state = [torch.randn(1, 2, 1, 64, 64) for _ in STAGES[op]]
        tokens = x[0].unbind(2)
        return OPS.causal_step(*tokens, gamma, state, op, None, False, None, 1e-6), [*tokens, *state]

    assert all(replayed(monkeypatch, seen, call))


def test_large_causal_calls_are_not_recorded(monkeypatch, seen):
    monkeypatch.setattr(stages, "MOST", 2 * 160 * 2 * 64)
    causal("hla2", None, False, 16, False, True)  # states of ten frames, 64 x 64 each
    assert seen and not recording.RECORDINGS
    causal("hla2", None, False, 0, False, True)
    assert len(recording.RECORDINGS) == 2
    recording.RECORDINGS.clear()
    monkeypatch.setattr(stages, "MOST", 1000)
    causal("hla2", None, False, 0, False, True)
    assert not recording.RECORDINGS


def recorded() -> int:
    return len(recording.RECORDINGS)


def test_what_a_form_is(seen):
    """Sizes, strides, dtype, alignment, options, plans and shared memory: each its own recording."""
    form = FORMS[2]
    x, grad, _ = inputs(form, SIZES[0], False)

    def known(*x, form=form, save=True) -> bool:
        before = recorded()
        results(form, x, grad.to(x[0].dtype), None, save)
        return recorded() == before

    assert not known(*x) and known(*x) and known(*[t.clone() for t in x])
    assert not known(*[t.half() for t in x])
    assert not known(*[t[:1] for t in x]) or x[0].shape[0] == 1
    wide = torch.randn(2, 37, 2, 72).bfloat16()
    assert not known(wide[..., :64], *x[1:])
    assert not known(torch.randn(2 * 37 * 2 * 64 + 1).bfloat16()[1:].view_as(x[0]), *x[1:])  # two bytes further
    assert not known(*x, form=("hla2", None, False, None, True))
    assert not known(x[0], x[0], x[2]) and known(x[1], x[1], x[2])  # one tensor twice
    qkv = torch.randn(2, 37, 3, 2, 64).bfloat16()
    assert not known(*qkv.unbind(2)) and known(*qkv.clone().unbind(2))
    assert not known(*torch.randn(2, 37, 3, 2, 64).bfloat16().unbind(2)[::-1])
    pair = torch.randn(2, *x[0].shape).bfloat16()
    assert not known(x[0], *pair) and not known(pair[0], x[1], pair[1])  # values beside keys, or beside queries
    hk.set_batch_invariant(True)
    try:
        assert not known(*x)
    finally:
        hk.set_batch_invariant(False)
    assert known(*x)


def test_noted_when_seen_again(monkeypatch, seen):
    monkeypatch.setattr(recording, "ONCE", set())
    monkeypatch.setattr(recording, "MOST", 4)
    for n in (20, 21, 22, 23, 24):
        results(FORMS[2], *inputs(FORMS[2], (1, n, 2, 32), True))
        assert 0 < len(recording.ONCE) <= 4 and recorded() == 0
    results(FORMS[2], *inputs(FORMS[2], (1, 24, 2, 32), True))
    assert recorded() == 2
    count = len(seen)
    monkeypatch.setattr(recording, "_record", None)
    results(FORMS[2], *inputs(FORMS[2], (1, 24, 2, 32), True))
    assert recorded() == 2 and len(seen) > count


def test_bounded_and_without_tensors(monkeypatch, seen):
    form = FORMS[3]
    monkeypatch.setattr(recording, "MOST", 3)
    for n in range(20, 30):
        (qkv,), grad, _ = inputs(form, (1, n, 2, 32), True)
        results(form, (qkv,), grad, None)
        assert recorded() <= 3
    kept = [weakref.ref(qkv), weakref.ref(grad)]
    seen.clear()
    del qkv, grad
    gc.collect()
    assert all(x() is None for x in kept)


@pytest.mark.parametrize("kind", ("mask", "cu_seqlens"))
@pytest.mark.parametrize("form", FORMS, ids=lambda f: f"{f[0]}-{f[1]}")
def test_ragged_calls(seen, form, kind):
    """Their tables are new tensors in every call, in a tuple among the arguments; outputs of a mask start as zeros."""
    (qkv,), grad, c = inputs(form, (1, 37, 2, 64), True, torch.float16)
    mask, cu = torch.ones(1, 37, dtype=torch.bool), torch.tensor([0, 7, 37], dtype=torch.int32)
    ragged = (mask, None, 0) if kind == "mask" else (None, cu, 30)
    runs = []
    for _ in range(2):
        seen.clear()
        o, saved = OPS.two_sided_qkvpacked(qkv, c, *form, *REST, True, *ragged)
        got = (o, saved, *OPS.two_sided_qkvpacked_backward(grad, saved, qkv, c, *form, *REST, *ragged))
        runs.append(([(x.shape, x.stride()) for x in got], normal(flat(seen), [qkv, grad, c, *got])))
        assert kind == "cu_seqlens" or not (o.any() or got[2].any())
        assert all(recording.RECORDINGS.values()) and recorded() == 2
    assert runs[0] == runs[1]


def flat(launches):
    """Launches with the elements of tuples that hold addresses as arguments."""
    for kernel, programs, args in launches:
        found: list = []
        for x in args:
            tensors = isinstance(x, tuple) and isinstance(x[0], float)
            found += x if tensors else [x]
        yield kernel, programs, tuple(found)


@triton.jit
def nothing(a, b, c, d):
    pass


def test_tensors_without_elements(seen):
    """They have no address, wherever the memory is that they are a view of."""

    def call(base):
        none = base[3:3]

        def work():
            out = torch.empty(64)
            recording.launch(nothing, 1, base[8:], out[5:5], none, out)
            return (out,)

        return recording.repeated(("none",), (none, base), work)[0]

    call(torch.ones(64))
    moved = torch.ones(64)
    out = call(moved)
    assert all(recording.RECORDINGS.values()) and recorded() == 1
    assert seen[1] == (nothing, 1, (moved[8:].data_ptr(), 0, 0, out.data_ptr()))


def test_every_launch_is_noted():
    """None is made as kernel[grid](...), past the recording."""
    package = Path(hk.__file__).parent
    folders = ("hla/fused", "hla/stages", "blockmix/fused", "softmax/adaptive/fused")
    for path in (path for folder in folders for path in package.glob(f"{folder}/**/*.py")):
        calls = [x.func for x in ast.walk(ast.parse(path.read_text())) if isinstance(x, ast.Call)]
        found = [ast.unparse(x) for x in calls if isinstance(x, ast.Subscript)]
        assert not [x for x in found if not x.startswith("dict[")], path


def test_what_is_more_than_launches_runs_every_time(seen):
    """An expanded gradient is copied: such calls are planned each time, with the same launches."""
    (qkv,), _, _ = inputs(FORMS[2], SIZES[0], True)
    for _ in range(2):
        seen.clear()
        o, saved = OPS.two_sided_qkvpacked(qkv, None, *FORMS[2], *REST, True)
        OPS.two_sided_qkvpacked_backward(torch.ones(()).bfloat16().expand(o.shape), saved, qkv, None, *FORMS[2], *REST)
        counts = len(seen)
        assert list(recording.RECORDINGS.values()).count(None) == 1
    assert counts == len(seen) > 3
