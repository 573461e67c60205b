"""Inspection, predicted times, sensitivity and choice of softmax layers."""

import copy

import pytest
import torch

from tests.helpers.tiny_pairs import KINDS, inputs, pair
from zoo.conversion import cost_model
from zoo.conversion.calibrate import calibrate
from zoo.conversion.hooks import forward, layers_of
from zoo.conversion.inspection import inspect
from zoo.conversion.sensitivity import Choice, Sensitivity, choices, counts, densities, pareto, ranking, sensitivities
from zoo.models.convert import swap


@pytest.mark.parametrize(("kind", "tokens"), [("vit", 17), ("dit", 16), ("sd3", 16)])
def test_inspection_says_what_a_conversion_would_do(kind, tokens):
    model = KINDS[kind]()
    rows = inspect(model, inputs(kind)[0], "ahla", keep_softmax=[1])
    report = swap(copy.deepcopy(model), "ahla", keep_softmax=[1])
    assert [(r.layer, r.before, r.after, r.reason) for r in rows] == [
        (r.layer, r.old, r.new, r.reason) for r in report.rows
    ]
    assert {r.tokens for r in rows} == {tokens} and {r.heads for r in rows} == {2}
    assert rows[0].mixer_us > 0 and rows[0].softmax_us > 0
    assert all(not hasattr(layer, "mixer") for layer in layers_of(model).values())  # nothing was changed
    with pytest.raises(ValueError, match="matches none of the attention layers"):
        inspect(model, inputs(kind)[0], "ahla", keep_softmax="nothing.*")


def test_predicted_times_are_near_the_measured_ones_and_meet_where_they_say():
    rows = [r for r in cost_model.measured_table()["rows"] if r["pass"] == "forward" and r["op"] == "softmax_attention"]
    best = {}
    for r in rows:
        best[tuple(r["shape"])] = min(r["us"], best.get(tuple(r["shape"]), 1e30))
    for (b, h, n, d), us in best.items():
        assert 0.5 < cost_model.predict_times("ahla", {}, b, h, n, d).softmax_us / us < 2
    for mixer in ("la", "ahla", "hla2"):
        even = cost_model.predict_times(mixer, {}, 1, 1, 64, 64).break_even
        times = [cost_model.predict_times(mixer, {}, 1, 1, n, 64) for n in (even, max(1, even - 1), 16384)]
        at, before, long = (found.softmax_us / found.mixer_us for found in times)
        assert at >= 1 and (even == 1 or before < 1) and long > 20
    assert cost_model.predict_times("taylor2", {"width": 16}, 1, 1, 64, 64).mixer_us is None  # which is not measured


def test_predicted_times_of_adaptive_multipole():
    """Close to what was measured; faster than softmax from the break-even point on, and softmax with density 1."""
    table = cost_model.measured_table(cost_model.ADAPTIVE)
    for row in table["rows"] + table["channels72"]:
        b, h, n, d = row["sizes"]
        options = {name: row[name] for name in ("select", "density", "k_tile")}
        assert 0.75 < cost_model.predict_times("multipole", options, b, h, n, d).mixer_us / row["forward_us"] < 1.25
    options = {"select": "error", "k_tile": 32}
    even = cost_model.predict_times("multipole", options, 1, 1, 64, 64).break_even
    found = [cost_model.predict_times("multipole", options, 1, 1, n, 64) for n in (even, even - 1)]
    assert 1000 < even < 4000 and [x.mixer_us <= x.softmax_us for x in found] == [True, False]
    same = cost_model.predict_times("multipole", {**options, "density": 1.0}, 1, 1, 999, 64)
    assert same.mixer_us == same.softmax_us
    for other in ({"density": [0.5, 0.1]}, {"branch": "la"}, {"far": "none"}):  # none of them was measured
        assert cost_model.predict_times("multipole", {**options, **other}, 1, 1, 999, 64).mixer_us is None
    assert cost_model.predict_times("multipole", {"select": "near"}, 1, 1, 999, 64).mixer_us is None


def test_densities_go_with_the_root_of_the_distance():
    """At most 1, with the given mean."""
    rows = [Sensitivity(str(i), distance, 1.0, 1.0) for i, distance in enumerate((4.0, 1.0, 1.0, 0.0))]
    assert densities(rows, 0.21) == [0.4, 0.2, 0.2, 0.04]
    assert densities(rows[:3], 0.7) == [1.0, 0.55, 0.55]
    assert densities(rows[:2], 1.0) == [1.0, 1.0]


@pytest.mark.parametrize("kind", ["vit", "dit"])
def test_sensitivity_is_that_of_a_model_with_one_converted_layer(kind):
    teacher, student, batches = pair(kind, "la")
    calibrate(student, teacher, batches)
    found = {row.layer: row for row in sensitivities(student, teacher, batches)}
    for name in found:
        one = copy.deepcopy(teacher)
        swap(one, "la", layers=name, gains=True)
        weights = student.state_dict()
        one.load_state_dict({k: weights[k] for k in one.state_dict()})
        with torch.no_grad():
            pairs = [(forward(one.eval(), x), forward(teacher, x)) for x in batches]
        if kind == "vit":
            by_hand = [(y.softmax(-1) * (y.log_softmax(-1) - x.log_softmax(-1))).sum(-1).mean() for x, y in pairs]
        else:
            by_hand = [(x - y).square().sum() / y.square().sum() for x, y in pairs]
        assert found[name].distance == pytest.approx(float(sum(by_hand)) / len(by_hand), rel=1e-3)
        assert found[name].softmax_ms > 0 and found[name].mixer_ms > 0


def test_layers_are_timed_in_the_precision_of_the_runs_and_compared_in_their_own():
    teacher, student, batches = pair("vit", "la")
    seen = {name: set() for name in ("blocks.0.attn", "blocks.1.attn")}
    for name, layer in layers_of(student).items():
        layer.register_forward_hook(lambda _, __, output, name=name: seen[name].add(output.dtype))
    plain = [row.distance for row in sensitivities(student, teacher, batches)]
    assert set().union(*seen.values()) == {torch.float32}
    timed = sensitivities(student, teacher, batches, lambda: torch.autocast("cpu", torch.bfloat16))
    assert [row.distance for row in timed] == plain
    assert all(dtypes == {torch.float32, torch.bfloat16} for dtypes in seen.values())


def test_a_layer_with_outputs_that_are_not_finite_is_named():
    teacher, student, batches = pair("vit", "la")
    with torch.no_grad():
        list(layers_of(student).values())[1].proj.bias.fill_(torch.inf)
    with pytest.raises(ValueError, match=r"with only 'blocks\.1\.attn' converted has outputs that are not finite"):
        sensitivities(student, teacher, batches)


def test_choices_go_from_all_converted_to_none():
    teacher, student, batches = pair("vit", "la")
    rows = [Sensitivity("blocks.0.attn", 0.1, 2.0, 1.0), Sensitivity("blocks.1.attn", 0.3, 9.0, 1.0)]
    found = choices(student, teacher, batches, rows)
    assert [len(c.kept) for c in found] == [0, 1, 1, 2]
    assert {tuple(c.kept) for c in found if len(c.kept) == 1} == {("blocks.0.attn",), ("blocks.1.attn",)}
    assert found[-1].distance == pytest.approx(0, abs=1e-6) and found[-1].agreement == 1
    assert [c.attention_ms for c in (found[0], found[-1])] == [2.0, 11.0]
    with torch.no_grad():
        x, y = (torch.cat([forward(m, b) for b in batches]) for m in (student, teacher))
    by_hand = (y.softmax(-1) * (y.log_softmax(-1) - x.log_softmax(-1))).sum(-1).mean()
    assert found[0].distance == pytest.approx(float(by_hand), rel=1e-3)


def test_order_front_and_numbers():
    rows = [Sensitivity("a", 0.1, 2.0, 1.0), Sensitivity("b", 0.3, 9.0, 1.0), Sensitivity("c", 0.01, 1.0, 1.5)]
    assert ranking(rows) == ["c", "a", "b"]  # c saves no time; a changes more for each millisecond than b
    made = [Choice([], 0.5, None, 1.0), Choice(["a"], 0.6, None, 2.0), Choice(["b"], 0.2, None, 3.0)]
    assert [c.kept for c in pareto(made)] == [[], ["b"]]
    assert counts(5) == [0, 1, 2, 4, 5] and counts(1) == [0, 1]
