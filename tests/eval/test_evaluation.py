"""Evaluation: accuracies against independent computations, labels of ImageNet, intervals, result files."""

import csv
import json

import numpy as np
import pytest
import timm
import torch
from timm.models import save_for_hf

import zoo
from tests.helpers.runs import TINY, tiny
from zoo import config
from zoo.data import Batch
from zoo.eval import compare as compare_module
from zoo.eval.accuracy import Predictions, predict
from zoo.eval.compare import compare
from zoo.eval.imagenet_labels import load_real_labels, numeric_classes, real_accuracy
from zoo.eval.paired import paired_difference
from zoo.eval.settings import EvalSettings
from zoo.train.classification import ClassificationRun

SMALL = {"img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 7}


def small_vit(**changes):
    torch.manual_seed(0)
    return timm.create_model("vit_tiny_patch16_224", **{**SMALL, **changes}).eval()


def test_accuracy_equals_an_independent_computation():
    model, rng = small_vit(), torch.Generator().manual_seed(1)
    images, labels = torch.randn(23, 3, 16, 16, generator=rng), torch.randint(0, 7, (23,), generator=rng)
    index = torch.arange(23)
    read = index.clone()
    read[5] = 6  # image 5 could not be read
    model.train()
    found = predict(model, [Batch(images[a:b], labels[a:b], index[a:b], read[a:b]) for a, b in ((0, 10), (10, 23))])
    assert model.training, "the mode is restored"
    with torch.no_grad():
        logits = model.eval()(images).numpy()
    keep = [i for i in range(23) if i != 5]
    rank = [int((logits[i] > logits[i, labels[i]]).sum()) for i in keep]
    summary = found.summary()
    assert summary["top1"] == pytest.approx(100 * np.mean([r < 1 for r in rank]))
    assert summary["top5"] == pytest.approx(100 * np.mean([r < 5 for r in rank]))
    log_p = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    assert summary["loss"] == pytest.approx(-np.mean([log_p[i, labels[i]] for i in keep]), abs=1e-5)
    assert summary["images"] == 22 and summary["unreadable"] == 1 and list(found.index) == keep
    with pytest.raises(ValueError, match=r"no images to evaluate"):
        predict(model, [])


def test_paired_interval_against_the_closed_form_and_the_bootstrap():
    rng = np.random.default_rng(0)
    a = rng.random(2000) < 0.8
    b = np.where(rng.random(2000) < 0.1, ~a, a)
    found = paired_difference(a, b)
    assert found.difference == pytest.approx(100 * (b.mean() - a.mean()))
    d = b.astype(float) - a  # Wald's interval, from the textbook variance of the differences
    half = 1.96 * d.std() / np.sqrt(2000)
    assert (found.low, found.high) == pytest.approx((100 * (d.mean() - half), 100 * (d.mean() + half)), abs=0.05)
    means = [d[rng.integers(0, 2000, 2000)].mean() for _ in range(4000)]
    low, high = 100 * np.quantile(means, [0.025, 0.975])
    assert (found.low, found.high) == pytest.approx((low, high), abs=0.15)


def test_paired_interval_covers_what_it_says():
    rng = np.random.default_rng(1)
    inside = 0
    for _ in range(600):
        a = rng.random(300) < 0.9
        b = np.where(rng.random(300) < 0.08, rng.random(300) < 0.5, a)
        true = 100 * 0.08 * (0.5 - 0.9)
        found = paired_difference(a, b)
        inside += found.low <= true <= found.high
    assert 0.93 <= inside / 600 <= 0.98
    same = paired_difference(a, a)
    assert same.difference == 0 and same.low < 0 < same.high
    with pytest.raises(ValueError, match=r"the same images"):
        paired_difference(a, a[1:])


def test_real_labels():
    labels = load_real_labels()
    assert len(labels) == 50000 and max(map(max, filter(None, labels))) == 999
    names = [
        "val/n01440764/ILSVRC2012_val_00000003.JPEG",
        "ILSVRC2012_val_00000001.JPEG",
        "ILSVRC2012_val_00000002.JPEG",
    ]
    top = np.array([[5, 1], [2, 3], [9, 9]])
    assert real_accuracy(top, names, [[2, 7], [], [5]]) == 100.0
    assert real_accuracy(top, names, [[3], [], [1, 5]]) == 50.0
    with pytest.raises(ValueError, match=r"not an ImageNet validation image"):
        real_accuracy(top[:1], ["cat.png"], labels)
    with pytest.raises(ValueError, match=r"none of the images has ReaL labels"):
        real_accuracy(top[2:], names[2:], [[1], [], [1]])


def test_real_labels_from_a_file(tmp_path):
    (tmp_path / "real.json").write_text("[[1], [2, 3]]")
    assert load_real_labels(str(tmp_path / "real.json")) == [[1], [2, 3]]
    (tmp_path / "real.json").write_text('{"a": 1}')
    with pytest.raises(ValueError, match=r"must be a list"):
        load_real_labels(str(tmp_path / "real.json"))
    with pytest.raises(ValueError, match=r"cannot be read"):
        load_real_labels(str(tmp_path / "none.json"))


def test_numbered_folders_are_sorted_as_numbers(make_folder):
    root = make_folder(dict.fromkeys(("0", "1", "2", "10", "11", "100"), 1))
    numbers = numeric_classes(str(root))
    assert numbers == {"0": 0, "1": 1, "2": 2, "10": 10, "11": 11, "100": 100}
    assert numeric_classes(str(make_folder({"cat": 1, "7": 1}))) is None
    from zoo.data import open_source

    source = open_source("folder", str(root), train=False, class_map=numbers)
    assert {source.name(i).split("/")[0]: source.read(i)[1] for i in range(6)} == numbers
    assert len(source.classes) == 101


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    ClassificationRun(tiny(folder / "softmax", schedule={"epochs": 4}, optim={"lr": 1e-2})).train()
    change = {"model": {"checkpoint": str(folder / "softmax"), "mixer": "ahla"}}
    ClassificationRun(tiny(folder / "ahla", **change)).train()
    return folder


def evaluate(models, out, **sections):
    tree = {"data": {"source": "digits", "workers": 0}, "eval": {"models": [str(m) for m in models]}, "out": str(out)}
    return compare(config.from_tree(EvalSettings, config.merge(tree, sections)))


def test_models_side_by_side_agree_with_training(two_runs, tmp_path):
    rows, found, names = evaluate([two_runs / "softmax", two_runs / "ahla"], tmp_path)
    for row, run in zip(rows, ("softmax", "ahla"), strict=True):
        result = json.loads((two_runs / run / "result.json").read_text())
        assert row["top1"] == pytest.approx(result["top1"], abs=1e-3)
        assert row["top1"] + row["top1_err"] == pytest.approx(100) and row["mixer"] == run
    first, second = (p.correct() for p in found.values())
    assert rows[1]["top1_diff"] == pytest.approx(100 * (second.mean() - first.mean()), abs=1e-3)
    assert rows[1]["diff_low"] < rows[1]["top1_diff"] < rows[1]["diff_high"]
    assert len(names) == 797 and names[0].startswith("digit-")


def test_result_files(two_runs, tmp_path, capsys):
    import evaluate_imagenet

    words = [
        "data.source=digits",
        "data.workers=0",
        f"eval.models=[{two_runs}/softmax,{two_runs}/ahla]",
        f"out={tmp_path}",
    ]
    rows = evaluate_imagenet.main(words)
    softmax, ahla, _ = capsys.readouterr().out.splitlines()[-3:]
    assert "against" not in softmax and f"against the first {rows[1]['top1_diff']:+.2f} [" in ahla
    with (tmp_path / "results.csv").open() as opened:
        table = list(csv.DictReader(opened))
    assert [float(r["top1"]) for r in table] == [r["top1"] for r in rows]
    timm_columns = "model img_size top1 top1_err top5 top5_err param_count crop_pct interpolation"
    assert list(table[0])[:9] == timm_columns.split()
    with (tmp_path / "predictions.csv").open() as opened:
        lines = list(csv.reader(opened))
    assert len(lines) == 798 and len(lines[0]) == 2 + 10
    right = np.mean([line[1] == line[2] for line in lines[1:]])
    assert 100 * right == pytest.approx(rows[0]["top1"], abs=1e-3)


def test_what_an_evaluation_refuses(two_runs, tmp_path, make_folder, monkeypatch):
    with pytest.raises(ValueError, match=r"missing required option eval.models"):
        evaluate([], tmp_path)
    with pytest.raises(ValueError, match=r"there is no checkpoint"):
        evaluate([tmp_path / "none"], tmp_path)
    images = str(make_folder({"a": 2, "b": 2}))
    with pytest.raises(ValueError, match=r"has the sub-folder 'a', which is none of the classes of the model"):
        evaluate([two_runs / "ahla"], tmp_path, data={"source": "folder", "val": images})
    with pytest.raises(ValueError, match=r"there is no checkpoint .*none"):  # before the first model is run
        evaluate([two_runs / "ahla", tmp_path / "none"], tmp_path)
    with pytest.raises(ValueError, match=r"not an ImageNet validation image"), monkeypatch.context() as patched:
        patched.setattr(compare_module, "evaluate_candidate", None)  # before the first model is run
        evaluate([two_runs / "ahla"], tmp_path, eval={"real_labels": "timm"})


def test_folders_are_matched_with_the_classes_of_the_model_by_name(tmp_path, make_folder):
    train, val = make_folder({"1": 6, "2": 6, "3": 6}), make_folder({"2": 4, "3": 4})
    data = {"source": "folder", "train": str(train), "val": str(train), "batch_size": 6}
    ClassificationRun(tiny(tmp_path / "run", data=data)).train()
    rows, found, _ = evaluate([tmp_path / "run"], tmp_path, data={"source": "folder", "val": str(val)})
    assert rows[0]["images"] == 8 and sorted(set(found[str(tmp_path / "run")].labels)) == [1, 2]


def test_predictions_with_fewer_than_five_classes():
    found = Predictions(np.array([[0, 1], [1, 0]]), np.array([1, 1]), np.arange(2), np.zeros(2), 0)
    assert found.summary()["top1"] == 50.0 and found.summary()["top5"] == 100.0


@pytest.mark.parametrize("safe", [True, False])
def test_folders_of_timm_are_evaluated(two_runs, tmp_path, safe):
    """The same model as a run folder and as `save_for_hf` writes it."""
    model = zoo.load(two_runs / "ahla")
    arguments = {**TINY["model"]["kwargs"], "img_size": 8, "num_classes": 10, **model.hla_args}
    model.pretrained_cfg.update(input_size=(3, 8, 8), crop_pct=1.0)
    save_for_hf(model, tmp_path / "timm", model_args=arguments, safe_serialization=safe)
    names = [two_runs / "ahla", tmp_path / "timm", f"local-dir:{tmp_path}/timm"]
    rows, _, _ = evaluate(names, tmp_path)
    assert rows[0]["top1"] == rows[1]["top1"] == rows[2]["top1"] and rows[2]["mixer"] == "ahla"
    (tmp_path / "timm" / "config.json").write_text("{}")
    for name in names[1:]:
        with pytest.raises(ValueError, match=r"timm cannot be read as a folder of timm's save_for_hf") as error:
            evaluate([name], tmp_path)
        assert "\n" not in str(error.value)


def test_run_folders_open_in_python(two_runs):
    model = zoo.load(two_runs / "softmax")
    assert not model.training and model(torch.zeros(1, 3, 8, 8)).shape == (1, 10)
    with pytest.raises(ValueError, match="there is no checkpoint"):
        zoo.load(two_runs / "none")
