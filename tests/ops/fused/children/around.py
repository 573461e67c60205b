"""What is around a call of the Triton forms, in Triton's interpreter: operators of torch, batches, tuned tiles, the
kernels of norms. Not collected: `test_interpreter` runs it."""

from __future__ import annotations

import json

import pytest
import torch

from hla_kernels.features.rms_norm import prepared
from hla_kernels.hla import fused
from hla_kernels.hla.fused import Spec, plan
from hla_kernels.hla.fused.plan import tuning
from tests.helpers import rms_norms as norms
from tests.ops.fused.cases import FULL, HALF, TOLERANCE, check, make, poison, relative_error, run, truth


@pytest.mark.parametrize("save", (False, True))
def test_through_the_custom_operators(monkeypatch, save):
    """q, k, v and packed give the same bits, with gradients, from an expanded gradient; no rows."""
    ops = torch.ops.hla_kernels
    rest = ("ahla", None, False, "k", True, 0.0, None, 1e-6, 1.0, "triton", False, save)
    spec = Spec("ahla", center="k", mean_path=True)
    qkv = torch.randn(2, 33, 3, 2, 16, requires_grad=True)
    tokens = [x.detach().requires_grad_() for x in qkv.unbind(2)]
    with monkeypatch.context() as patch:
        poison(patch)
        y, z = ops.two_sided(*tokens, None, *rest)[0], ops.two_sided_qkvpacked(qkv, None, *rest)[0]
        y.sum().backward()
        z.sum().backward()
    assert torch.equal(y, z) and torch.equal(torch.stack([x.grad for x in tokens], 2), qkv.grad)
    got = [y, *(x.grad for x in tokens)]
    check(got, truth(spec, tokens, torch.ones_like(y), None), TOLERANCE[FULL])
    assert ops.two_sided(*[x[:0] for x in tokens], None, *rest)[0].shape == (0, 33, 2, 16)


def test_opcheck_with_saved_state():
    rest = ("hla2", "elu1", True, None, False, 0.0, None, 1e-6, 1.0, "triton", False, True)
    x = [torch.randn(1, 5, 1, 16, requires_grad=True) for _ in range(3)]
    torch.library.opcheck(torch.ops.hla_kernels.two_sided, (*x, None, *rest))
    qkv = torch.randn(1, 5, 3, 1, 16, requires_grad=True)
    torch.library.opcheck(torch.ops.hla_kernels.two_sided_qkvpacked, (qkv, None, *rest))


@pytest.mark.parametrize("on", (True, False))
def test_a_sample_does_not_see_the_batch(monkeypatch, on):
    """With a plan that depends on B * H: the same bits alone and in a batch if and only if it was asked for."""
    monkeypatch.setattr(plan, "reduce_parts", lambda heads, n, bn: (2, 64) if heads % 2 == 0 else (4, 32))
    spec = Spec("ahla", center="k", mean_path=True)
    tokens, grad, _ = make(spec, 100, 16, 16, (1, 1), FULL, "contiguous")
    results = []
    plan.set_batch_invariant(on)
    try:
        for rows in (slice(0, 2), slice(1, 2)):
            x = [t[rows] for t in tokens]
            outs = tuple(torch.empty_like(t) for t in x)
            o, saved = fused.forward(*x, None, spec, save=True)
            fused.backward(grad[rows], *x, None, spec, outs, saved)
            results.append(torch.stack([t[-1] for t in (o, *outs)]))
    finally:
        plan.set_batch_invariant(False)
    assert torch.equal(*results) == on


def test_batch_invariance_is_true_or_false():
    with pytest.raises(ValueError, match="takes True or False, got 1"):
        plan.set_batch_invariant(1)


def test_tuning(monkeypatch, tmp_path):
    """The fastest tiles by the timer are kept and used again; those that fail, or give other results, are not."""
    spec, file = Spec("ahla"), tmp_path / "tuned.json"
    inputs = make(spec, 40, 16, 16, (1, 1), FULL)
    expected, used = truth(spec, *inputs), []

    def entry(direction, spec, w, dtype):  # a table of three entries, by width
        return {"BN": {16: 32, 64: 16, 128: 64}.get(w["F1"], 32), "BO": 32, "num_warps": 4, "num_stages": 2}

    def work():
        used.clear()
        return run(monkeypatch, spec, *inputs, "heads", True, False)

    def launched(kernel, *args, tiles=tuning.STATE.choose):
        config = tiles(kernel, *args)
        used.append((kernel, config["BN"]))
        if config["BN"] == 64:
            raise RuntimeError("does not fit")
        return config

    monkeypatch.setattr(plan, "head_config", entry)
    monkeypatch.setattr(tuning.STATE, "choose", launched)
    tuning.set_tuning(file)
    try:
        found = tuning.search(work, timer=lambda f: 1.0 if ("head_forward", 16) in used else 2.0)
        assert (found.before_ms, found.after_ms) == (2.0, 1.0)
        assert {kernel: c["BN"] for kernel, c in found.changed.items()} == {"head_forward": 16}
        check(work(), expected, TOLERANCE[FULL])
        assert used == [("head_forward", 16), ("head_backward", 32)]
        ((name, kernels),) = json.loads(file.read_text()).items()
        assert "cpu, triton" in name and "N <= 64, heads <= 2" in name
        file.write_text(json.dumps({name.replace("cpu,", "another,"): kernels}))  # tiles of another device
        tuning.set_tuning(file)
        work()
        assert used[0] == ("head_forward", 32)
        kernels["head_forward"]["BN"] = 8  # no shipped configuration
        file.write_text(json.dumps({name: kernels}))
        tuning.set_tuning(file)
        work()
        assert used[0] == ("head_forward", 32)
        tuning.set_tuning(None)
        work()
        assert used[0] == ("head_forward", 32)
        monkeypatch.setattr(tuning, "_close", lambda x, y: False)
        tuning.set_tuning(file)
        assert not tuning.search(work, timer=lambda f: float(len(used))).changed
    finally:
        tuning.set_tuning(None)


@pytest.mark.parametrize("channels", [48, 100])
def test_rms_norm(monkeypatch, channels):
    """float16 tokens that are rows of a wider tensor, float32 weights."""
    x, weight, grad = norms.inputs(HALF, channels)
    exact = norms.results(norms.by_hand, *(t.double() for t in (x, weight, grad)))
    with monkeypatch.context() as patch:
        poison(patch)
        got = norms.results(lambda *t: torch.ops.hla_kernels.rms_norm(*t, 1e-6)[0], x, weight, grad)
    assert [t.dtype for t in got] == [HALF, HALF, FULL]
    assert all(relative_error(a, b) <= 4e-4 for a, b in zip(got, exact, strict=True))  # measured 2.1e-4


@pytest.mark.parametrize(("channels", "width", "relu"), [(48, 16, True), (120, 40, False)])
def test_prepared_queries(monkeypatch, channels, width, relu):
    """The same, then the positive part and the rotation."""
    x, weight, grad = norms.inputs(HALF, channels)
    turns = norms.tables(x, width)
    both = [t.double() for t in turns]
    exact = norms.results(
        lambda x, w: norms.prepared_by_hand(x, w, relu, *both), *(t.double() for t in (x, weight, grad))
    )
    with monkeypatch.context() as patch:
        poison(patch)
        got = norms.results(lambda *t: prepared(*t, 1e-6, relu, *turns), x, weight, grad)
    assert all(relative_error(a, b) <= 4e-4 for a, b in zip(got, exact, strict=True))
