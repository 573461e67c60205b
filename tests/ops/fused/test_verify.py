"""The first-use check of the Triton forms, with kernels that are right, wrong, unsteady or do not run."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import hla_kernels as hk
from hla_kernels import op
from hla_kernels.dispatch import trial, verify
from hla_kernels.ranks import blocks, two_sided
from hla_kernels.softmax.adaptive import fused, torch_form

RATIO = {"feature_map": "elu1", "normalize": True}


class OutOfResources(Exception):
    """What Triton raises where shared memory does not suffice."""


def right(impl):
    return [torch.ones(3, dtype=torch.bfloat16), torch.full((2,), 0.5)]


def corrupt(impl):
    return [right(impl)[0], torch.full((2,), 0.5 + 0.1 * (impl == "triton"))]


def unsteady(impl, count=iter(range(100))):  # noqa: B008  one counter for all runs
    return [torch.full((3,), 1 + 2.0**-20 * next(count))]


def too_large(impl):
    if impl == "triton":
        raise OutOfResources("out of resource: shared memory")
    return right(impl)


def unwritten(impl):
    return [torch.full((3,), float("nan") if impl == "triton" else 1.0)]


def call(**options):
    x = torch.randn(2, 5, 4, 32, dtype=torch.bfloat16)
    return op.prepare("hla2", x, x, x, **options)


def chosen(**options):
    """What auto chooses, and what it warns of."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        return op.choose(call(**options), "auto"), [str(w.message) for w in found]


def test_what_is_right_is_checked_once(machine):
    """In this process, and by the cache file in the next; another form is checked anew."""
    calls = machine(right, right)
    assert [chosen() for _ in range(2)] == [("triton", [])] * 2 and len(calls) == 1
    verify.VERDICTS.clear()
    assert chosen() == ("triton", []) and len(calls) == 1
    assert len(json.loads(verify.cache_file().read_text())) == 1
    assert chosen(**RATIO)[0] == "triton" and len(calls) == 2
    assert op.choose(call(scale=0.3), "triton") == "triton" and len(calls) == 2  # a number, not a kernel
    verify.VERDICTS.clear()
    verify.cache_file().write_text("not json")
    assert chosen() == ("triton", []) and len(calls) == 3


def test_a_call_with_a_backward_is_checked_with_it(machine, monkeypatch):
    """Also after one of the same shape without: its kernels are others."""
    calls = machine(right)
    monkeypatch.setattr(op, "_two_sided", lambda known, *rest: known)
    x = torch.randn(2, 5, 4, 32, dtype=torch.bfloat16, requires_grad=True)
    with torch.no_grad():
        hk.hla2(x, x, x, scale=0.0625)
    for _ in range(2):
        hk.hla2(x, x, x, scale=0.0625)
    assert [dict(form[3])["backward"] for form in calls] == [False, True]


@pytest.mark.parametrize(
    ("run", "why"),
    (
        (corrupt, "result 1 is"), (unsteady, "two runs differ"), (too_large, "OutOfResources: out of resource"),
        (unwritten, "two runs differ"),
    ),
)  # fmt: skip
def test_what_is_wrong_is_not_used(machine, run, why):
    """By auto, with one warning; and impl="triton" raises."""
    machine(right, run)
    assert [chosen()[0] for _ in range(2)] == ["torch"] * 2
    verify.WARNED.clear()
    (warning,) = chosen()[1] + chosen()[1]
    assert why in warning and "hla2 on a GPU with Triton 3.8.0" in warning and verify.SWITCH in warning
    with pytest.raises(ValueError, match="the check of hla2"):
        op.choose(call(), "triton")
    assert not verify.cache_file().exists()
    assert why in op.explain("hla2", *call()[1:4]).why_not["triton"]


def test_switched_off(machine, monkeypatch):
    """A GPU that no test ran on has the torch form then; impl="triton" may be tried."""
    machine(corrupt)
    monkeypatch.setenv(verify.SWITCH, "0")
    name, (warning,) = chosen()
    assert name == "torch" and "compute capability 8.9" in warning
    monkeypatch.setattr(verify, "capability", lambda index: verify.TESTED)
    assert chosen() == ("triton", [])


def test_not_while_a_graph_is_captured(machine, monkeypatch):
    calls = machine(right)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    name, (warning,) = chosen()
    assert name == "torch" and "before the capture" in warning and not calls
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert chosen()[0] == "triton"


@pytest.mark.parametrize(("run", "expected"), ((right, True), (corrupt, False)))
def test_kernels_of_ranks_are_checked(machine, run, expected):
    """By a trial of their own, with a backward, eager and while compiling."""
    calls, x = machine(run), torch.randn(2, 6, 4, 32, dtype=torch.bfloat16)
    mixing, options = torch.rand(4, 2, 2), {"grid": (2, 3), "blocks": (1, 2), "prefix": 0}
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        assert [two_sided.in_triton(call(**more)) for more in ({}, {}, RATIO)] == [expected] * 3
        assert blocks._prepare(x, x, x, mixing, None, "auto", options)[1] == ("triton" if expected else "torch")
    torch.compiler.reset()
    added = lambda x: x + two_sided.in_triton(op.prepare("hla2", x, x, x))  # noqa: E731
    assert torch.equal(torch.compile(added, backend="eager", fullgraph=True)(x), x + expected)
    assert [form[0] for form in calls] == ["hla2", "hla2", "mhla"]
    assert all({"shared"} == {"shared", "variant", "backward"} & {*dict(form[3])} for form in calls)
    assert ["the check of" in str(w.message) for w in found] == [True] * (0 if expected else 2)


@pytest.mark.parametrize(("run", "expected"), ((right, 1), (corrupt, 0)))
def test_while_compiling(machine, run, expected):
    """The check runs outside of tracing, as a constant; no graph break."""
    calls = machine(run)
    torch.compiler.reset()

    @torch.compile(backend="eager", fullgraph=True)
    def traced(x):
        return x + (op.choose(op.prepare("hla2", x, x, x, **RATIO), "auto") == "triton")

    x = torch.randn(2, 5, 4, 32)
    with torch.no_grad():
        assert torch.equal(traced(x), x + expected)
    assert len(calls) == 1


def test_the_caller_does_not_change_a_check(machine):
    """Neither autocast, inference mode, a transform, nor fake tensors: a check is a thread of its own."""
    seen = []

    def run(impl):
        seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")))
        x = torch.ones(2, requires_grad=True)
        assert type(x) is torch.Tensor
        return [*torch.autograd.grad((x * x).sum(), x)]

    machine(run)
    fake = torch._subclasses.FakeTensorMode()
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), fake:
        assert op.choose(op.prepare("ahla", *[torch.ones(1, 4, 2, 32)] * 3), "auto") == "triton"
    assert set(seen) == {(True, False, False)}


def calls_of_all_operators():
    """One call of each family, and of each kind of sequence."""
    q, k = torch.randn(2, 12, 4, 16, requires_grad=True), torch.randn(2, 12, 2, 16)
    mask, c = torch.ones(2, 12, dtype=torch.bool), torch.rand(4, 4)
    cu = torch.tensor([0, 12], dtype=torch.int32)
    yield op.prepare("hla3", q, k, k, ridge=0.2, center="k", key_padding_mask=mask)
    yield op.prepare("ahla", q[:1], k[:1], k[:1], **RATIO, cu_seqlens=cu, max_seqlen=12)
    yield op.prepare("polynomial", q, q, q, c.requires_grad_(), mean_path=True)
    yield op.prepare("polynomial", q, q, q, c.detach())
    yield op.prepare("hla2", q.detach(), k, k)
    grid = {"grid": (3, 4), "blocks": (1, 2)}
    mixing, turn = torch.rand(4, 2, 2), (torch.rand(12, 8), torch.rand(12, 8))
    yield op.block_call.prepare(q, k, k, mixing, **grid, order="ahla", rotary=turn, token_mask=mask)
    yield op.block_call.prepare(q, q, q, torch.rand(3, 3), grid=(11,), blocks=(2,), prefix=1)
    adaptive = op.PREPARE["adaptive_multipole"]
    yield adaptive(q, k, k, grid=(2, 5), prefix=2, k_tile=4, far="mean", key_padding_mask=mask)
    yield adaptive(q, k, k, grid=(3, 4), k_tile=16, select="mean")
    yield op.delta_call.prepare(q, q, q, log_f=-torch.rand(2, 12, 4))
    yield op.delta_call.prepare(q, q, q, log_f=-torch.rand(2, 12, 4, 16), a=q.unsqueeze(3), b=q.unsqueeze(3).double())


@pytest.mark.parametrize("checked", [*calls_of_all_operators()], ids=lambda c: type(c).__name__)
def test_trials_are_calls_of_the_operator(monkeypatch, checked):
    """A form is constants; the torch form agrees with the definition on every trial, of which none repeats another."""
    monkeypatch.setattr(trial, "DEVICE", "cpu")
    monkeypatch.setattr(trial, "N", 20)
    monkeypatch.setattr(trial, "HEADS", 8)
    form = trial.trial_of(checked)
    assert hash(form) == hash(trial.trial_of(checked)) and getattr(hk, form[0])
    runs = list(trial.runs(form))
    assert runs
    for run in runs:
        first, second, truth = run("torch"), run("torch"), run("reference")
        assert all(torch.equal(x, y) and x.abs().max() > 0 for x, y in zip(first, second, strict=True))
        assert all((x - y).norm() <= 1e-3 * y.norm() for x, y in zip(first, truth, strict=True))
        assert (len(first) > 1) == (checked.q.requires_grad or not isinstance(checked, op.Call))


@pytest.mark.parametrize("select", ("error", "mass", "mean", "near"))
def test_a_wrong_selection_is_noticed(monkeypatch, select):
    """Of tiles that differ from the right ones in the lowest score only, also if all else is right."""
    monkeypatch.setattr(trial, "DEVICE", "cpu")
    q = torch.randn(1, 16, 2, 16, dtype=torch.bfloat16)
    form = trial.trial_of(op.PREPARE["adaptive_multipole"](q, q, q, grid=(4, 4), select=select))
    for wrong in (False, True):

        def chosen(call, wrong=wrong):
            found, tiles = torch_form.selection(call)
            order = found.argsort(dim=-1, descending=True, stable=True)
            return torch.cat([tiles[..., 1:], order[..., -1:]], -1) if wrong else tiles

        monkeypatch.setattr(fused, "chosen", chosen)
        monkeypatch.setattr(fused, "evaluate", lambda call, chosen=chosen: torch_form.evaluate(call, chosen(call)))
        (run,) = trial.runs(form)
        assert ("result 1 is" in (verify.failure(run) or "")) == wrong


def test_another_source_is_another_package(monkeypatch):
    """What passed its check is not known of kernels that changed since: any file of the package may."""
    before, read = verify.package.__wrapped__(), Path.read_bytes
    assert before == verify.package.__wrapped__()
    for name in ("hla/fused/tiles.py", "blockmix/fused/plan.py", "api/__init__.py"):
        file = Path(hk.__file__).parent / name
        monkeypatch.setattr(Path, "read_bytes", lambda self, file=file: read(self) + b" " * (self == file))
        assert verify.package.__wrapped__() != before


def test_what_ran_on_a_gpu_is_not_checked(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(verify, "SHIPPED", {"mhla": (64, 72), "features": ()})
    for triton, ptxas, capability, known in (
        ("3.6.0", "12.8", (9, 0), True), ("3.8.0", "12.9", (9, 0), False), ("3.6.0", "13.4", (9, 0), False),
        ("3.6.0", "12.8", (8, 0), False),
    ):  # fmt: skip
        machine = verify.Machine("a GPU", capability, triton, ptxas)
        monkeypatch.setattr(verify, "machine", lambda index, machine=machine: machine)
        assert verify.is_shipped("mhla", 0, 64, 64) == known and not verify.is_shipped("causal", 0, 64, 64)
    monkeypatch.setattr(verify, "machine", lambda index: verify.Machine("a GPU", (9, 0), "3.6.0", "12.8"))
    assert verify.is_shipped("mhla", 0, 72, 72)
    assert verify.is_shipped("features", 0) and not verify.is_shipped("delta", 0)
    assert not any(verify.is_shipped("mhla", 0, *channels) for channels in ((64, 72), (96, 96)))


def test_calls_have_the_families_that_are_shipped():
    q = torch.randn(1, 16, 2, 16)
    calls = {
        "two-sided": op.prepare("hla2", q, q, q), "causal": op.prepare("hla2", q, q, q, causal=True),
        "delta": op.delta_call.prepare(q, q, q),
        "adaptive_multipole": op.PREPARE["adaptive_multipole"](q, q, q, grid=(4, 4)),
        "mhla": op.block_call.prepare(q, q, q, torch.ones(4, 4), grid=(4, 4), blocks=(2, 2)),
    }  # fmt: skip
    assert [op._family(call) for call in calls.values()] == list(calls)
    assert set(verify.SHIPPED) == {*calls, "features"}


@pytest.mark.parametrize("feature_map", (None, "relu", "elu1"))
@pytest.mark.parametrize("name", ("linear_attention", "hla2", "ahla", "hla3", "polynomial"))
def test_the_trial_of_a_form_is_finite(monkeypatch, name, feature_map):
    """In float16 too, whose numbers end at 65504; ratios of the identity have no negative features."""
    monkeypatch.setattr(trial, "DEVICE", "cpu")
    for dtype, normalize in ((torch.float16, False), (torch.bfloat16, False), (torch.bfloat16, True)):
        options = {"feature_map": feature_map or "identity", "normalize": normalize, "mean_path": not normalize}
        run = trial._run(name, dtype, (4, 4, 64, 64), options, 1, 197)
        got, exact = run("torch"), run("reference")
        assert all(bool(x.isfinite().all()) for x in (*got, *exact))
        for x, y in zip(got, exact, strict=True):
            assert (x.double() - y.double()).norm() <= 2e-2 * y.double().norm()


def test_the_trial_of_a_stream_decodes_a_token(monkeypatch):
    """Another kernel computes a single token, which no call with a backward runs."""
    monkeypatch.setattr(trial, "DEVICE", "cpu")
    options = {"causal": True, "frame": 0, "scale": 0.02, "decay_heads": 2, "streams": True, "normalize": False}
    run = trial._run("hla2", torch.bfloat16, (2, 2, 8, 8), dict(options), 1, 60)
    whole, token, plain, after, last, *grads = run("torch")
    torch.testing.assert_close(plain, whole, rtol=2e-2, atol=1e-2)
    assert len(grads) == 4 and torch.equal(after, last)  # with and without a state after the tokens
    assert token.shape == (1, 1, 2, 8)
    torch.testing.assert_close(token, whole[:, 10:11], rtol=2e-2, atol=1e-2)
    whole = trial._run("hla2", torch.bfloat16, (2, 2, 8, 8), {**options, "streams": False}, 1, 60)("torch")
    assert len(whole) == 6 and torch.equal(*whole[:2])  # with and without gradients, of q, k, v and the decay


@pytest.mark.parametrize(("name", "options"), (("hla3", {}), ("ahla", {"decay": 0.9}), ("hla2", {"decay": 0.9})))
def test_a_walk_through_all_stages_is_checked(name, options):
    """A call of many heads without a backward has a kernel that calls of few heads do not have."""
    x = torch.empty(8, 4096, 16, 64, dtype=torch.bfloat16, device="meta")
    forms = [trial.trial_of(op.prepare(name, x, x, x, causal=True, **options, **more)) for more in ({}, RATIO)]
    assert [len(trial.sizes(form)) for form in forms] == [3, 2]
    batch, n = trial.sizes(forms[0])[2]
    assert trial.walks(name, torch.bfloat16, (batch * 16, n, 64, 64), bool(options), False, 0, False)
    paper = trial.trial_of(op.prepare("hla2", x, x, x, causal=True, decay=0.9, decay_rule="paper"))
    assert len(trial.sizes(paper)) == 2


def test_symbolic_sizes_have_forms():
    """Outside of torch.compile, too."""
    mode = torch._subclasses.FakeTensorMode(shape_env=ShapeEnv())
    x = mode.from_tensor(torch.empty(3, 50, 4, 64), static_shapes=False)
    for causal in (False, True):
        assert "variant" not in dict(trial.trial_of(op.prepare("hla2", x, x, x, causal=causal))[3])


def test_dynamic_shapes_have_constant_forms():
    """While torch.compile traces, widths are symbols."""
    seen = []

    @verify.traced_as_constant
    def note(form):
        seen.append(form)
        return len(seen)

    def call(q):
        return q * note(trial.trial_of(op.prepare("hla2", q, q, q)))

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="eager")
    for n in (17, 33):
        compiled(torch.ones(2, n, 4, 64))
    assert [form[2] for form in seen] == [(4, 4, 64, 64)]
