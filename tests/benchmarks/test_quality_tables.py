"""The tables of mixers from scratch and of conversions, against numbers worked out by hand."""

import json
import runpy

import pytest
from PIL import Image

from benchmarks import quality_plots
from tests.helpers.runs import ROOT

TABLES = runpy.run_path(str(ROOT / "docs" / "result_tables.py"))


def row(mixer, source, seed, value, metric="top1", **options):
    about = {"experiment": "e", "data": "d", "budget": "2 epochs" if metric == "top1" else "0 epochs", "wall_s": 3.0}
    return {
        "mixer": mixer,
        "source": source,
        "seed": seed,
        "value": value,
        "metric": metric,
        "options": options,
        **about,
    }


def cells(text, which):
    (line,) = [line for line in text.splitlines() if which in line]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_fidelity_of_different_approximations_is_not_averaged():
    shared = {"tokens": 64, "select": "error", "q_tile": 64, "k_tile": 16, "density": 0.25, "softmax_top1": 70.0}
    rows = [{**shared, "far": far, "seed": s, "kl": kl, "top1": 60.0} for far, s, kl in
            (("first", 0, 0.1), ("first", 1, 0.3), ("none", 0, 0.9))]  # fmt: skip
    text = TABLES["fidelity"]({"rows": rows})
    assert cells(text, "first")[2:] == ["first", "64", "16", "0.200, 60.0", "70.0", "2"]
    assert cells(text, "none")[2:] == ["none", "64", "16", "0.900, 60.0", "70.0", "1"]


def test_mixers_are_compared_with_the_softmax_of_their_seed_and_depthwise_options():
    rows = [row("softmax", "scratch", 0, 60.0), row("softmax", "scratch", 1, 64.0), row("la", "scratch", 0, 58.0)]
    rows += [row("softmax", "scratch", 0, 70.0, depthwise="v"), row("ahla", "scratch", 0, 71.0, depthwise="v")]
    rows += [row("mhla", "scratch", 0, 61.0, mixing="project"), row("mhla", "scratch", 1, 66.0, mixing="project")]
    text = TABLES["experiments"]({"rows": rows})
    assert cells(text, "mhla")[3:] == [
        "mhla mixing=project",
        "63.50 (61.00 to 66.00)",
        "1.50 (1.00 to 2.00)",
        "3.00",
        "2",
        "3",
    ]
    assert cells(text, "ahla")[3:] == ["ahla depthwise=v", "71.00", "1.00", "-", "1", "3"]


def test_recovery_is_the_mean_over_seeds_and_held_out_rows_stay_out_of_the_summary():
    rows = [row("softmax", "control", s, c) for s, c in ((0, 80.0), (1, 90.0))]
    rows += [row("la", "floor", s, f) for s, f in ((0, 60.0), (1, 50.0))]
    rows += [row("la", "converted", s, v) for s, v in ((0, 78.0), (1, 90.0))]
    rows += [row("la", "converted", 0, 20.0, "top1 after calibration")]
    found = cells(TABLES["experiments"]({"rows": rows}), "| la |")
    assert found[4:] == [
        "-",
        "20.00",
        "-",
        "84.00 (78.00 to 90.00)",
        "-1.00 (-2.00 to 0.00)",
        "55.00 (50.00 to 60.00)",
        "0.950",
        "2",
        "3",
    ]
    assert cells(TABLES["accuracy"]({"rows": rows}), "| la |")[1:] == ["84.0 (2)"]  # a column of one mixer is left out
    held_out = [each | {"data": "d, 500 held out"} for each in rows]
    assert TABLES["accuracy"]({"rows": rows + held_out}) == TABLES["accuracy"]({"rows": rows})
    assert TABLES["by_test"]({"rows": held_out}).startswith("## Held-out training images\n\n| experiment ")


def test_speeds_are_relative_to_the_best_softmax():
    place = {"model": "vit", "tokens": 64, "size": 32, "mode": "train", "weights": "float32"}
    times = ("softmax", 10.0, 0.5), ("softmax", 8.0, 0.25), ("la", 5.0, 0.1), ("la", 4.0, 0.1)
    rows = [{**place, "mixer": mixer, "ms": ms, "shares": {"attention": share}} for mixer, ms, share in times]
    assert cells(TABLES["speeds"]({"rows": rows}), "| vit |")[3:] == ["train float32", "2.00", "1.33"]


def test_the_picture_has_a_panel_for_each_experiment_and_counts_the_layers_kept(tmp_path, monkeypatch):
    rows = [row("softmax", "scratch", 0, 60.0), row("la", "scratch", 0, 58.0)]
    for keep, value in ((None, 55.0), ("auto:2", 57.0), ([0, 1, 3], 59.0)):
        options = {} if keep is None else {"keep_softmax": keep}
        rows += [row("la", "converted", 0, value, **options)]
        if keep != "auto:2":  # as of a run that was cut before its stages were evaluated
            rows += [row("la", "converted", 0, value - 9, "top1 after calibration", **options)]
    rows += [row("softmax", "control", 0, 61.0)]
    held_out = [each | {"data": "d, 9 held out", "experiment": "choices"} for each in rows]
    seen = []
    monkeypatch.setattr(quality_plots, "plain_axes", lambda axes, _: seen.append(axes))
    quality_plots.draw_quality({"rows": rows + held_out}, tmp_path / "quality.png")
    assert Image.open(tmp_path / "quality.png").format == "PNG"
    kept = seen[-1]
    assert [list(line.get_ydata()) for line in kept.lines] == [[-6.0, -4.0, -2.0], [0, 0]]
    assert list(kept.lines[0].get_xdata()) == [0, 2, 3]
    panels = [axes.get_title() for axes in kept.figure.figure.get_axes()]
    assert panels == ["e, from scratch", "e", "Softmax layers kept"]


def test_distances_are_relative_to_the_control_of_their_seed(tmp_path, monkeypatch):
    result = json.loads((ROOT / "docs" / "results" / "dit-cifar10.json").read_text())
    seen = []
    monkeypatch.setattr(quality_plots, "plain_axes", lambda axes, *_: seen.append(axes))
    quality_plots.draw_denoisers(result, tmp_path / "dit.png")
    assert Image.open(tmp_path / "dit.png").format == "PNG"
    by_space = {line.get_label(): sorted(line.get_xdata()) for line in seen[1].lines}
    assert by_space["ViT"][0] == 2.20604 / 2.23342 and len(by_space["ViT"]) == len(by_space["ResNet-18"]) == 6


def test_the_figure_of_densities_has_a_point_for_each(tmp_path, monkeypatch):
    """The mean over seeds, of the default selection and far field; a higher density is slower."""
    shared = {"tokens": 4096, "k_tile": 16, "select": "error", "far": "first"}
    rows = [{**shared, "density": d, "kl": kl} for d, kl in ((0.25, 0.1), (0.25, 0.3), (0.0625, 0.5))]
    figures = []
    monkeypatch.setattr(quality_plots, "save_figure", lambda figure, file, **options: figures.append(figure))
    quality_plots.draw_densities({"rows": [*rows, {**rows[0], "far": "mean"}]}, tmp_path / "a.png")
    (exact, sparse) = [line.get_xydata()[0] for line in figures[0].axes[0].lines]
    assert exact[0] < sparse[0] and exact[1] == pytest.approx(0.2) and sparse[1] == 0.5
