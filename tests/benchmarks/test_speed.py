"""Speed: floors in closed form, the plain formulas against the definitions, rows, refusals."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

import hla_kernels
from benchmarks import check as checking
from benchmarks import formulas, models, operators, peers, report, rows, timing
from benchmarks.profile import part_of, times
from benchmarks.shapes import ALL_SHAPES, OPS, PASSES, SHAPES, floor_bytes, floor_us
from hla_kernels.features.power import power_pair
from tests.forks import run_fork

RATE = 4.27e12  # bytes per second of a copy; the floors below were worked out by hand for it


@pytest.mark.parametrize(
    ("name", "forward", "both"),
    [
        ("vit224", 36, 100),
        ("vit512", 47, 130),
        ("dit256", 35, 97),
        ("dit512", 71, 194),
        ("tokens16k", 126, 346),
        ("wan480p", 189, 519),
    ],
)
def test_floor_of_the_first_order(name, forward, both):
    shape = SHAPES[name]
    assert round(floor_us(shape, "linear_attention", "forward", RATE)) == forward
    assert round(floor_us(shape, "linear_attention", "forward_backward", RATE)) == both


def test_higher_orders_read_twice_where_heads_are_long():
    for shape in SHAPES.values():
        t = shape.b * shape.h * shape.n * shape.d * 2
        for op in ("hla2", "ahla", "hla3", "polynomial"):
            assert floor_bytes(shape, op, "forward") == (5 if shape.n >= 16384 else 4) * t
            assert floor_bytes(shape, op, "forward_backward") == (14 if shape.n >= 16384 else 11) * t
        assert floor_bytes(shape, "softmax_attention", "forward_backward") == 11 * t


@pytest.mark.parametrize("options", peers.OPTIONS.values(), ids=peers.OPTIONS)
@pytest.mark.parametrize("op", OPS)
def test_plain_formulas_are_the_definitions(op, options):
    q, k, v = torch.randn(3, 2, 7, 3, 5, dtype=torch.float64)
    c = torch.rand(3, 4, dtype=torch.float64) if op == "polynomial" else None
    features = (q, k)
    if options.get("feature_map") == "power":
        features = power_pair(q, k, *torch.full((2, 3), formulas.POWER))
    given = (*features, v) if c is None else (*features, v, c)
    wanted = getattr(hla_kernels, op)(*given, impl="reference", **peers.of_operator(options, q))
    found = formulas.plain(op, *(x.transpose(1, 2) for x in (q, k, v)), c, **options).transpose(1, 2)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("options", peers.MIXED_OPTIONS.values(), ids=peers.MIXED_OPTIONS)
@pytest.mark.parametrize(("grid", "blocks"), [((4, 6), (2, 3)), ((3, 5, 4), (2, 2, 3))], ids=["even", "odd"])
def test_mixed_formula_is_the_definition(grid, blocks, options):
    q, k, v = torch.randn(3, 2, math.prod(grid), 3, 6, dtype=torch.float64)
    mixing = formulas.locality(blocks).double()
    torch.testing.assert_close(mixing.sum(1), torch.ones(math.prod(blocks), dtype=torch.float64))
    options = options | {"grid": grid, "blocks": blocks}
    given = peers.of_operator(options, torch.stack((q, k, v), 2))
    wanted = hla_kernels.mhla(q, k, v, mixing, impl="reference", **given)
    found = formulas.mixed(*(x.transpose(1, 2) for x in (q, k, v)), mixing, **options).transpose(1, 2)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("degree", [0, 1, 2])
@pytest.mark.parametrize(("grid", "blocks", "radius"), [((5, 7), (2, 3), 1), ((3, 4, 3), (2, 2, 2), 0)])
def test_multipole_formula_is_the_definition(grid, blocks, radius, degree, monkeypatch):
    monkeypatch.setattr(formulas, "CHUNK", 8)
    q, k, v = torch.randn(3, 2, math.prod(grid), 3, 5, dtype=torch.float64)
    options = {"grid": grid, "blocks": blocks, "radius": radius, "degree": degree}
    wanted = hla_kernels.multipole(q, k, v, q_scale=5**-0.5, impl="reference", **options)
    found = formulas.multipole(*(x.transpose(1, 2) for x in (q, k, v)), **options).transpose(1, 2)
    torch.testing.assert_close(found, wanted)


def test_taylor_formula_is_the_definition(monkeypatch):
    monkeypatch.setattr(formulas, "CHUNK", 4)
    q, k, v = torch.randn(3, 2, 7, 3, 5, dtype=torch.float64)
    c = torch.rand(3, 2, dtype=torch.float64)
    wanted = hla_kernels.taylor2(q, k, v, c, q_scale=5**-0.5, impl="reference")
    found = formulas.taylor(*(x.transpose(1, 2) for x in (q, k, v)), c).transpose(1, 2)
    torch.testing.assert_close(found, wanted)


def test_plain_softmax_and_causal_sums(monkeypatch):
    monkeypatch.setattr(formulas, "CHUNK", 4)
    q, k, v = torch.randn(3, 1, 2, 10, 3, dtype=torch.float64).requires_grad_()
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(formulas.softmax(q, k, v), wanted)
    ours, theirs = (torch.autograd.grad(o.square().sum(), (q, k, v)) for o in (formulas.softmax(q, k, v), wanted))
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(formulas.causal(q, k, v), (q @ k.mT).tril() @ v)


@pytest.fixture
def small(monkeypatch):
    """One shape small enough for a CPU."""
    monkeypatch.setitem(ALL_SHAPES, "vit224", SHAPES["vit224"]._replace(b=2, h=2, n=9, d=8))


@pytest.mark.parametrize("impl", ["ours", "eager"])
@pytest.mark.parametrize(
    ("op", "options"), [*((op, name) for op in OPS for name in ("elu1_ratio", "power_ratio")), ("taylor2", "identity")]
)
def test_a_case_is_compared_with_float64(op, options, impl, small):
    options = peers.OPTIONS[options]
    case = peers.Case("vit224", op, impl, tuple(options.items()))
    found = checking.check(case, "cpu")
    assert found.problem is None and found.ran == ("torch" if impl == "ours" else None)
    assert 1e-4 < found.rel_err["forward"] < 1e-2 and 1e-4 < found.rel_err["forward_backward"] < 0.2, found


def test_fixed_coefficients_are_compared_with_float64(small):
    found = checking.check(peers.Case("vit224", "polynomial", "ours", (("fixed", True),)), "cpu")
    assert found.problem is None and 1e-4 < found.rel_err["forward_backward"] < 0.02, found


@pytest.mark.parametrize("impl", ["ours", "eager"])
def test_a_case_on_a_grid_is_compared_with_float64(impl, small):
    options = {"grid": (3, 3), "blocks": (2, 1), "radius": 0, "degree": 1}
    found = checking.check(peers.Case("vit224", "multipole", impl, tuple(options.items())), "cpu")
    assert found.problem is None and found.ran == ("torch" if impl == "ours" else None)
    assert 1e-4 < found.rel_err["forward"] < 1e-2 and 1e-4 < found.rel_err["forward_backward"] < 1e-2, found


def test_a_wrong_case_is_not_timed(small, monkeypatch):
    monkeypatch.setitem(peers.MAKERS, "eager", lambda op, options: lambda qkv, c: 1.1 * qkv[:, :, 2])
    found = checking.check(peers.Case("vit224", "ahla", "eager"), "cpu")
    assert found.problem is not None and found.problem.startswith("wrong: relative error")
    monkeypatch.setitem(peers.MAKERS, "eager", lambda op, options: lambda qkv, c: qkv[:, :, 2] * float("nan"))
    assert checking.check(peers.Case("vit224", "ahla", "eager"), "cpu").problem is not None


def test_one_head_in_many_is_enough_to_fail(small):
    """The last head of the last image is among those compared: where offsets overflow, it is the one that is wrong."""
    case = peers.Case("vit224", "ahla", "eager")
    qkv, grad = checking.inputs("vit224", 0, "cpu")
    o = peers.make(case)(qkv, None)
    (found,) = torch.autograd.grad(o, qkv, grad)
    with torch.no_grad():
        found[-1, :, 1, -1] = 0
    forward, backward = checking.errors(case, qkv, o, grad, found, None)
    assert forward < 2e-2 and backward > 0.3


class Clock:
    """Stands for a GPU: a call takes 100 us in a graph and 130 us launched by the host."""

    def __init__(self, monkeypatch, capture):
        self.restored = False
        random = type("Random", (), {"clone_state": lambda _: "before", "graphsafe_set_state": self.restore})()
        for name, value in {"default_generators": [random], "current_device": lambda: 0, "synchronize": int}.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(timing, "_event_times", self.times)
        monkeypatch.setattr(timing, "_capture", capture)

    def restore(self, state):
        self.restored = state == "before"

    def times(self, calls, kept=None):
        return [130.0 if kept is not None else 100.0 * call() for call in calls]


def test_a_call_is_a_part_of_a_replay(monkeypatch):
    def capture(calls, rounds, kept):
        return type("Graph", (), {"replay": staticmethod(lambda: rounds * len(calls))})

    clock = Clock(monkeypatch, capture)
    assert timing.measure([lambda: 1] * 3) == (100.0, "graph", 130.0) and not clock.restored


def test_a_call_that_cannot_be_captured_is_timed_by_events(monkeypatch):
    def capture(calls, rounds, kept):
        raise RuntimeError("no capture")

    clock = Clock(monkeypatch, capture)
    assert timing.measure([lambda: 1] * 3) == (130.0, "events", 130.0) and clock.restored


def test_selection_of_cases():
    found = peers.cases(["vit224"], ["ahla", "hla2"], ["ours", "sdpa_cudnn", "compiled", "fla"], peers.OPTIONS)
    count = [sum(case.impl == impl for case in found) for impl in ("ours", "sdpa_cudnn", "compiled", "fla")]
    assert count == [14, 1, 2, 1]
    found = peers.cases(["vit224"], ["polynomial", "ahla"], ["ours", "eager"], ["fixed"])
    assert found == [peers.Case("vit224", "polynomial", "ours", (("fixed", True),))]
    assert peers.coefficients(found[0], "cpu").requires_grad is False
    found = peers.cases(["vit224", "wan800"], ["mhla"], ["ours", "eager"], ["identity", "relu"])
    assert [(case.shape, case.impl, dict(case.options)["blocks"]) for case in found] == [
        ("wan800", impl, blocks) for impl in ("ours", "eager") for blocks in ((7, 3, 5), (3, 5, 10))
    ]
    assert peers.cases(["dits512"], ["taylor2"], ["ours"], peers.OPTIONS) == [peers.Case("dits512", "taylor2", "ours")]
    found = peers.cases(["vit224", "dits512"], ["multipole"], ["ours", "eager"], ["relu", "degree0", "degree1"])
    assert [(case.shape, case.impl, dict(case.options)["degree"]) for case in found] == [
        ("dits512", impl, degree) for impl in ("ours", "eager") for degree in (0, 1)
    ]


def test_absent_packages_are_one_line(monkeypatch):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    assert peers.why_unavailable("fla") == "fla: the package fla is not installed"
    assert peers.why_unavailable("flash_bla").endswith("checkout of fla-org/flash-bidirectional-linear-attention)")
    assert peers.why_unavailable("ours") is None


def test_parts_of_a_step():
    assert part_of(["aten::bmm", "hla_kernels::two_sided", "MlpBlock"]) == "attention"
    assert part_of(["aten::_flash_attention_backward", "ScaledDotProductFlashAttentionBackward0"]) == "attention"
    assert part_of(["aten::addmm", "aten::linear"]) == "matmul"
    assert part_of(["aten::mul"]) == "rest"


def test_a_kernel_counts_once_for_the_operator_that_launched_it():
    """Also within a call of the same name; neither for a call of the driver of the same number, nor as a named region's
    span on the device."""

    def record(number, name="", start=0, end=0, linked=0, region=False, device=DeviceType.CPU):
        values = {"correlation_id": number, "name": name, "linked_correlation_id": linked, "start_thread_id": 1}
        values |= {"start_ns": start, "end_ns": end, "duration_ns": end - start, "is_user_annotation": region}
        return SimpleNamespace(**{k: lambda v=v: v for k, v in {**values, "device_type": device}.items()})

    def work(linked, us, region=False):
        return record(900, "kernel", 0, us * 1000, linked, region, DeviceType.CUDA)

    calls = [
        record(1, "Torch-Compiled Region", 0, 900, region=True),
        record(2, "CompiledFunction", 10, 800),
        record(3, "aten::convolution", 20, 100),
        record(4, "aten::cudnn_convolution", 30, 100),
        record(5, "hla_kernels::two_sided", 200, 300),
        record(6, "hla_kernels::two_sided", 210, 290),
        record(6, "cudaLaunchKernel", 850, 860),
        record(7, "cuLaunchKernelEx", 220, 230, linked=6),
        record(8, "Optimizer.step", 1000, 2000, region=True),
    ]
    operators = [work(2, 1), work(4, 2), work(6, 4), work(0, 8), work(8, 50, region=True)]
    assert times([*operators, *calls]) == {"matmul": 2.0, "attention": 4.0, "rest": 9.0}


def test_rows_of_two_runs_are_merged(tmp_path):
    file = tmp_path / "r.json"
    row = {"op": "ahla", "impl": "ours", "shape": [1, 2, 3, 4], "options": {}, "pass": "forward", "us": 1.0}
    other = row | {"pass": "forward_backward", "us": 3.0}
    first = rows.start(file, "first", {"triton": "1"})
    for each in (row, other):
        rows.add(first, each, rows.KERNEL_KEY, file)
    file.write_text(json.dumps(first | {"note": ["other work beside it"]}))
    second = rows.start(file, "second", {"triton": "1", "diffusers": "2"})
    rows.add(second, row | {"us": 2.0}, rows.KERNEL_KEY, file)
    found = json.loads(file.read_text())
    assert [r["us"] for r in found["rows"]] == [2.0, 3.0] and found["command"] == "first; second"
    assert found["note"] == ["other work beside it"]
    assert found["versions"]["diffusers"] == "2" and [p.name for p in tmp_path.iterdir()] == ["r.json"]
    failure = {name: row[name] for name in ("op", "impl", "shape", "options")} | {"reason": "broken"}
    rows.add(second, failure, rows.KERNEL_KEY, file)
    assert json.loads(file.read_text())["rows"] == [] and "broken" in report.failures(second)
    rows.add(second, row, rows.KERNEL_KEY, file)
    assert json.loads(file.read_text())["failed"] == []
    with pytest.raises(ValueError, match=r"was made with triton 1, not 2; name another"):
        rows.start(file, "third", {"triton": "2"})
    file.write_text("[]")
    with pytest.raises(ValueError, match="is not a result file"):
        rows.start(file, "third", {})


def test_row_form():
    case = peers.Case("vit224", "ahla", "ours", tuple(peers.OPTIONS["elu1_ratio"].items()))
    checked = checking.Checked({"forward": 0.0012345, "forward_backward": 0.002}, dict.fromkeys(PASSES, 1.5), "triton")
    measured = {"pass": "forward", "us": 50.0, "timer": "graph", "peak_mib": 3.0}
    row = operators.case_row(case) | operators.kernel_values(case, checked, 4.27e12, measured)
    assert {"op", "impl", "shape", "options", "pass", "us", "floor_us", "rel_err"} <= row.keys()
    assert row["shape"] == [256, 6, 197, 64] and row["options"] == {"feature_map": "elu1", "normalize": True}
    assert row["floor_us"] == 36.28 and row["rel_err"] == 0.00123 and row["ran"] == "triton"


def test_command_leaves_out_where_results_are_kept():
    words = ["kernels", "shapes=[vit224]", "json=/somewhere/a.json", "picture=a.png"]
    assert rows.command_of(words) == "python tools/benchmark.py kernels 'shapes=[vit224]'"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["kernels"], "kernels measures a CUDA GPU, and torch sees none here"),
        (["models"], "models measures a CUDA GPU, and torch sees none here"),
        (["kernels", "shapes=[vit22]"], "unknown shape 'vit22'"),
        (["models", "sizes=[100]"], "sizes must be among .*, got 100"),
        (["kernel"], "allowed: adaptive, .*kernels, .*Did you mean 'kernels'"),
    ],
)
def test_what_is_refused(words, sentence, monkeypatch):
    import benchmark

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=sentence):
        benchmark.main(words)


def test_without_a_gpu_it_says_so_in_one_sentence():
    status, _, err = run_fork("tools/benchmark.py", "kernels")
    assert status == 2 and err.strip() == "error: kernels measures a CUDA GPU, and torch sees none here"


def test_settings_are_checked():
    with pytest.raises(ValueError, match="workers must be 1 or more, got 0"):
        replace(operators.KernelSettings(), workers=0)
    with pytest.raises(ValueError, match="unknown mixer 'alha'"):
        models.ModelSettings(mixers=["alha"])
