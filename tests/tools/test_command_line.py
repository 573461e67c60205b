"""The tools as a user calls them: help, error sentences, conversion, timm's scripts, the demo."""

import json

import pytest
import torch
from conftest import ROOT, run_tool, tiny
from safetensors.torch import load_file

from zoo.data import InputSpec
from zoo.data.settings import DataSettings
from zoo.train.loop import Trainer
from zoo.train.model import load_model

TOOLS = ["train_vit", "convert", "evaluate_imagenet", "timm_run", "demo", "quality", "benchmark"]


@pytest.mark.parametrize("name", TOOLS)
def test_help(name, capsys):
    module = __import__(name)
    module.main(["--help"])
    text = capsys.readouterr().out
    assert "usage: " in text and "python tools/" in text


@pytest.mark.parametrize(
    ("name", "words", "sentence"),
    [
        ("train_vit", ["optim.lrr=1"], "error: unknown configuration key 'optim.lrr'; allowed: "),
        ("train_vit", ["a.yaml", "b.yaml"], "error: expected one configuration file"),
        ("timm_run", ["no/validate.py"], "error: there is no script no/validate.py"),
    ],
)
def test_errors_are_one_sentence_and_status_two(name, words, sentence):
    status, _, err = run_tool(name, *words)
    assert status == 2
    assert err.strip().splitlines()[-1].startswith(sentence) and "Traceback" not in err


@pytest.mark.parametrize(
    ("name", "words", "sentence"),
    [
        ("convert", ["model.name=vit_tiny_patch16_224", "model.mixer=ahla"], "out=FOLDER"),
        ("convert", ["model.mixer=ahla", "out=x"], "model.name is empty"),
        ("convert", ["model.name=swin_tiny_patch4_window7_224", "model.mixer=ahla", "out={tmp}"], "(?i)swin"),
        ("evaluate_imagenet", ["data.source=folder", "eval.models=[a]"], "there is no checkpoint a"),
        ("demo", ["epoch=3"], "Did you mean 'epochs'"),
    ],
)
def test_what_tools_refuse(name, words, sentence, tmp_path):
    with pytest.raises(ValueError, match=sentence):
        __import__(name).main([word.format(tmp=tmp_path) for word in words])


def test_convert_a_timm_model(tmp_path):
    import convert

    words = ["model.name=deit_tiny_patch16_224", "model.mixer=hla2", "model.keep_softmax=[0,11]", f"out={tmp_path}"]
    report = convert.main(words)
    assert json.loads((tmp_path / "report.json").read_text()) == report
    model, recipe = load_model(tmp_path)
    assert recipe.num_classes == 1000 and recipe.keep_softmax == [0, 11]
    assert InputSpec.from_recipe(recipe.input, DataSettings()) == InputSpec.of(model, None, DataSettings())
    assert sum(row["new"] == "hla2" for row in report["rows"]) == 10
    with pytest.raises(ValueError, match=r"is already converted"):
        convert.main([f"model.checkpoint={tmp_path}", "model.mixer=la", f"out={tmp_path}/again"])


def test_convert_a_run_keeps_its_weights_and_input(tmp_path):
    import convert

    Trainer(tiny(tmp_path / "run")).train()
    convert.main([f"model.checkpoint={tmp_path}/run", "model.mixer=la", f"out={tmp_path}/la"])
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("run", "la"))
    assert all(torch.equal(after[k], before[k]) for k in before)
    assert load_model(tmp_path / "la")[1].input == load_model(tmp_path / "run")[1].input


def test_timm_scripts_know_our_names(tmp_path):
    script = tmp_path / "validate.py"
    script.write_text(
        "import sys, timm\nif __name__ == '__main__':\n"
        "    print(timm.is_model('vit_ahla_tiny_patch16_224'), sys.argv[1:], sys.path[0])\n"
    )
    status, out, err = run_tool("timm_run", str(script), "--model", "x")
    assert (status, out.strip()) == (0, f"True ['--model', 'x'] {tmp_path}"), err


def test_demo_with_a_tiny_budget(tmp_path):
    import demo

    rows = demo.main([f"out={tmp_path}/demo", "epochs=1", "mixers=[ahla,poly]"])
    assert list(rows) == ["softmax", "softmax_more", "ahla_zero_shot", "ahla", "poly_zero_shot", "poly"]
    report = (tmp_path / "demo" / "report.md").read_text()
    for name, row in rows.items():
        assert f"| {row['top1']:.1f} |" in report, name
    (tmp_path / "mine.txt").touch()
    with pytest.raises(ValueError, match=r"something else than a demo"):
        demo.main([f"out={tmp_path}"])
    assert (tmp_path / "mine.txt").exists()
    assert (tmp_path / "demo" / "demo.png").stat().st_size > 30_000
    for run in ("softmax", "softmax_more", "ahla", "poly"):
        assert (tmp_path / "demo" / run / "config.yaml").exists() and (tmp_path / "demo" / run / "curves.png").exists()


def test_quality_table_and_its_continuation(tmp_path):
    import quality

    short = ["schedule.epochs=1", "schedule.warmup_epochs=0", "data.batch_size=250"]
    words = [f"{ROOT}/configs/vit/digits_softmax.yaml", f"finetune={ROOT}/configs/vit/digits_finetune.yaml", *short]
    words += ["mixers=[softmax,la]", f"out={tmp_path}", f"json={tmp_path}/quality.json", "data.train="]
    table = quality.main(words)
    assert json.loads((tmp_path / "quality.json").read_text()) == table
    assert table.keys() == {"command", "date", "hardware", "versions", "rows"} and "data.train" not in table["command"]
    kinds = [(row["source"], row["mixer"], row["seed"]) for row in table["rows"]]
    assert kinds == [("scratch", "softmax", 0), ("scratch", "la", 0), ("control", "softmax", 0), ("converted", "la", 0)]
    keys = {"experiment", "data", "mixer", "options", "source", "seed", "metric", "value", "budget", "wall_s"}
    assert all(row.keys() == keys for row in table["rows"])
    more = [words[0], *short, "mixers=[la]", f"out={tmp_path}/o", f"json={tmp_path}/o.json"]
    (row,) = quality.main([*more, "model.mixer_options.feature_map=relu"])["rows"]
    assert row["options"] == {"feature_map": "relu"}
    again = quality.main(words)
    assert [row["value"] for row in again["rows"]] == [row["value"] for row in table["rows"]]


def test_tools_are_thin():
    for file in (ROOT / "tools").glob("*.py"):
        assert len(file.read_text().splitlines()) <= 80, file
