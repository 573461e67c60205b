"""Table of causal operators: every case runs on a CPU at small sizes; the printed table."""

import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import hla_kernels
from benchmarks import causal, rows
from benchmarks.timing import Timing
from hla_kernels import delta_rules as rules


def small(case):
    changed = {"frame": 8, "scale": 0.1, "grid": (3, 2, 4), "blocks": (1, 2, 2)}
    options = {key: changed.get(key, value) for key, value in case.options.items()}
    n = 1 if case.group == "decode" else 24
    impl = "torch" if case.impl == "triton" else case.impl
    return case._replace(sizes=(2, 3, n, 8), impl=impl, options=options)


CASES = causal.cases(causal.CausalSettings())


@pytest.mark.parametrize("group", ("softmax", *causal.GROUPS))
def test_every_case_runs_and_its_error_is_small(group):
    todo = [case for case in CASES if case.group == group]
    assert len(todo) >= 2
    for case in map(small, todo):
        for which, call in causal.make(case, 0, "cpu").items():
            out = call()
            assert len(out) >= (4 if which != "forward" else 1) and all(torch.isfinite(t).all() for t in out[:1])
        if case.impl == "torch":
            found = causal.errors(case, "cpu")
            assert set(found) == set(case.passes) and 0 < max(found.values()) < 2e-2, (case, found)


@pytest.mark.parametrize("rule", causal.FLA)
def test_another_package_is_called_as_its_rules_are(monkeypatch, rule):
    def chunk(q, k, v, *given, scale, normalize=False):
        assert scale == 1.0 and normalize is False
        if rule == "linear_attention":
            return hla_kernels.linear_attention(q, k, v, causal=True), None
        return hla_kernels.delta(q, **getattr(rules, rule)(k, v, *given)), None

    name = causal.FLA[rule]
    monkeypatch.setitem(sys.modules, f"fla.ops.{name}", SimpleNamespace(**{f"chunk_{name}": chunk}))
    (case, *_) = (c for c in causal.cases(causal.CausalSettings(["plain", "delta"], impls=["fla"])) if c.op == rule)
    assert 0 < max(causal.errors(case._replace(sizes=(2, 3, 24, 8)), "cpu").values()) < 2e-2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the package fla-core needs a CUDA device: none here")
@pytest.mark.parametrize("which", causal.PASSES)
@pytest.mark.parametrize("rule", causal.FLA)
def test_another_package_agrees(monkeypatch, rule, which):
    """With the package fla-core, whose code is independent of ours."""
    pytest.importorskip("fla.ops", reason="the optional package fla-core is not installed")
    monkeypatch.setattr(causal, "PASSES", (which,))
    try:
        # batch and heads of the table, for which fla-core compiles and tunes its kernels
        options = {"causal": True} if rule == "linear_attention" else {}
        found = causal.errors(causal.Case("plain" if options else "delta", rule, "fla", (8, 16, 200, 64), options))
    except RuntimeError as error:
        if (rule, which) != ("gated_delta_net", "forward_backward") or "upgrade Triton" not in str(error):
            raise
        pytest.skip(str(error))  # Triton 3.4 to 3.7.0 compiles this kernel of fla-core wrongly for Hopper
    assert 0 < found[which] < 2e-2


def test_errors_are_found(monkeypatch):
    case = small(next(case for case in CASES if case.group == "decay"))
    honest = causal.one_pass

    def wrong(case, x, impl, which):
        return [t * 1.1 if t.dtype == torch.bfloat16 and t.shape[0] == 2 else t for t in honest(case, x, impl, which)]

    monkeypatch.setattr(causal, "one_pass", wrong)
    assert min(causal.errors(case, "cpu").values()) > 0.09


def test_table(tmp_path):
    """A row is relative to the base of its group, at the same shape and pass."""
    content, file = rows.start(tmp_path / "a.json", "command", {}), tmp_path / "a.json"
    for case in CASES:
        for which in case.passes:
            rows.add(content, case.row(which) | {"us": 3000.0 if case.impl == "sdpa_cudnn" else 500.0}, rows.KERNEL_KEY,
                     file)  # fmt: skip
    assert len(content["rows"]) == len({rows.key_of(row, rows.KERNEL_KEY) for row in content["rows"]})
    assert len(content["rows"]) == sum(len(case.passes) for case in CASES)
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in causal.text(content).splitlines()[2:]]
    cells = {(*line[:2], line[2], line[3], line[4]): line[6:9] for line in lines}
    tokens = "8, 16, 4096, 64"
    assert cells[tokens, "plain", "hla3", "triton", "forward_backward"] == ["softmax", "6.00", "at least 2.2"]
    assert cells[tokens, "decay", "la", "triton", "forward_backward"] == ["softmax", "6.00", "at least 4.35"]
    frames = ("1, 12, 28080, 128", "frame, frame=1560", "hla2", "triton", "forward")
    assert cells[frames] == ["two-sided la", "1.00", "at most 1.3"]
    decoded = ("64, 16, 1, 128", "decode", "ahla", "triton", "forward")
    assert cells[decoded] == ["copy of the state", "1.00", "at most 1.3"]
    assert cells[tokens, "delta", "hdla", "torch", "forward_backward"] == ["gated_delta_net", "1.00", "at most 1.6"]


def test_run_with_replaced_timing(monkeypatch, tmp_path):
    """From the selection to the printed table; a peer without a backward pass, and one that is not installed."""

    def forward_only(q, k, v, log_f, beta, scale):
        if torch.is_grad_enabled():
            raise RuntimeError("no backward")
        return (hla_kernels.delta(q, **rules.gated_delta_net(k, v, log_f, beta)),)

    peer = SimpleNamespace(chunk_gated_delta_rule=forward_only)
    for name, module in {"gla": None, "delta_rule": None, "gated_delta_rule": peer}.items():
        monkeypatch.setitem(sys.modules, f"fla.ops.{name}", module)
    settings = causal.CausalSettings(
        ["delta", "frame_decay", "paper"], [], ["torch", "sdpa_cudnn", "fla"], json=str(tmp_path / "a.json")
    )
    todo = [small(case) for case in causal.cases(settings)]
    for name, new in {
        "need_gpu": lambda what: None, "cases": lambda s: todo, "make": partial(causal.make, device="cpu"),
    }.items():  # fmt: skip
        monkeypatch.setattr(causal, name, new)
    monkeypatch.setattr("benchmarks.adaptive.copy_rate", lambda: 4e12)
    monkeypatch.setattr("benchmarks.timing.peak_mib", lambda call: 1.0)
    monkeypatch.setattr("benchmarks.timing.measure", lambda calls: Timing(500.0, "graph", 600.0))
    content = causal.run(settings, "command")
    failed = [(row["op"], row["pass"]) for row in content["failed"]]
    assert failed == [*((op, which) for op in ("gla", "delta_net") for which in causal.PASSES),
                      ("gated_delta_net", "forward_backward")]  # fmt: skip
    assert len(content["rows"]) + len(failed) == len(causal.PASSES) * len(todo) == 2 * (1 + 4 + 3 + 4 + 1)
    table = causal.text(content)
    assert "| frame_decay, frame=8 | hla3 | torch | forward | 0.500 | softmax | 1.00 |" in table
    assert "Not timed: delta gated_delta_net fla: RuntimeError: no backward." in table


def test_bad_settings():
    with pytest.raises(ValueError, match="Did you mean 'frame'"):
        causal.CausalSettings(groups=["frames"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="measures a CUDA device: none here")
def test_rows_on_a_gpu(tmp_path):
    settings = causal.CausalSettings(groups=["plain", "decode"], shapes=["tokens4k"], json=str(tmp_path / "a.json"))
    content = causal.run(settings, "command")
    assert not content["failed"] and len(content["rows"]) == 2 + 8 + 16
    assert max(row.get("rel_err", 0.0) for row in content["rows"]) < 1e-2
