"""The tools as a user calls them: help, error sentences, conversion, timm's scripts, the demo."""

import json
import warnings

import pytest
import torch
from safetensors.torch import load_file

from tests.forks import run_fork
from tests.helpers.runs import ROOT, tiny
from zoo import config
from zoo.data import InputSpec
from zoo.data.settings import DataSettings
from zoo.errors import nearest, unknown_name
from zoo.models.timm.model_files import load_model
from zoo.train.classification import ClassificationRun

TIMM_SCRIPT = """
import sys, torch
from argparse import Namespace
from timm.models import create_model, load_checkpoint, resume_checkpoint
from timm.optim import create_optimizer_v2
from timm.utils import CheckpointSaver, ModelEmaV2

NAME = "deit_hla2_tiny_patch16_224"
# as train.py calls it: every keyword that a user did not set is None or its neutral value
KEYWORDS = dict(pretrained=False, in_chans=3, num_classes=3, drop_rate=0.0, drop_path_rate=None, drop_block_rate=None,
    global_pool=None, bn_momentum=None, bn_eps=None, scriptable=False, checkpoint_path="", img_size=32, depth=2)


def build():
    model = create_model(NAME, **KEYWORDS)
    return model, create_optimizer_v2(model, opt="adamw", lr=1e-3), ModelEmaV2(model, decay=0.5)


def step(model, optimizer, average):
    model(images).logsumexp(1).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    average.update(model)


images = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
model, optimizer, average = build()
step(model, optimizer, average)
args = Namespace(model=NAME)
CheckpointSaver(model, optimizer, args, average, checkpoint_dir=sys.argv[1]).save_checkpoint(0, metric=1.0)
again, its_optimizer, its_average = build()
file = sys.argv[1] + "/last.pth.tar"
epoch = resume_checkpoint(again, file, optimizer=its_optimizer, log_info=False)
load_checkpoint(its_average.module, file, use_ema=True)
for parts in ((model, optimizer, average), (again, its_optimizer, its_average)):
    step(*parts)
for a, b in ((model, again), (average.module, its_average.module)):
    assert all(torch.equal(p, q) for p, q in zip(a.state_dict().values(), b.state_dict().values()))
print("resumed at epoch", epoch)
"""
TOOLS = ["train_vit", "convert", "evaluate_imagenet", "timm_run", "demo", "benchmark", "finetune_dit"]


@pytest.mark.parametrize("name", TOOLS)
def test_help(name, capsys):
    module = __import__(name)
    module.main(["--help"])
    text = capsys.readouterr().out
    assert "usage: " in text and ("python tools/" in text or "    zoo " in text)


@pytest.mark.parametrize(
    ("name", "words", "sentence"),
    [
        ("train_vit", ["optim.lrr=1"], "error: unknown configuration key 'optim.lrr'; allowed: "),
        ("train_vit", ["a.yaml", "b.yaml"], "error: expected one configuration file"),
        ("train_vit", ["model.keep_softmax=[0,", "1]"], "error: the value before '1]' contains spaces: put"),
        ("timm_run", ["no/validate.py"], "error: there is no script no/validate.py"),
    ],
)
def test_errors_are_one_sentence_and_status_two(name, words, sentence):
    status, _, err = run_fork(f"tools/{name}.py", *words)
    assert status == 2
    assert err.strip().splitlines()[-1].startswith(sentence) and "Traceback" not in err


def test_what_the_file_system_refuses_is_a_sentence(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as stopped:
        config.command_line(lambda words: (tmp_path / "file" / "folder").mkdir())
    assert stopped.value.code == 2
    assert capsys.readouterr().err == f"error: {tmp_path}/file/folder cannot be used: Not a directory\n"


@pytest.mark.parametrize(
    "take", [lambda words: torch.empty(2**60), lambda words: torch.empty(2**62, 2**62), lambda words: bytearray(2**60)]
)
def test_too_little_memory_is_a_sentence(take, capsys):
    def fail(words):
        raise RuntimeError("other")

    with pytest.raises(SystemExit) as stopped:
        config.command_line(take)
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: there is not enough memory") and error.count("\n") == 1
    with pytest.raises(RuntimeError, match="other"):
        config.command_line(fail)


def test_a_warning_is_one_line_without_code(capsys, monkeypatch):
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)  # put back afterwards
    config.command_line(lambda words: None)
    assert warnings.formatwarning("few images", UserWarning, "a.py", 1) == "warning: few images\n"


def test_a_beginning_suggests_the_names_that_it_begins():
    names = ["dit/digits", "vit/digits_finetune", "vit/digits_softmax"]
    assert nearest("vit/digit", names) == ["vit/digits_softmax"]
    assert nearest("VIT/digits_f", names) == ["vit/digits_finetune"]
    assert nearest("vit/digts_softmax", names) == ["vit/digits_softmax"]
    assert nearest("", names) == nearest("zzz", names) == []


def test_of_many_names_the_nearest_are_listed():
    sentence = str(unknown_name("model", "vit_42O", [f"vit_{i}" for i in range(1000)]))
    assert sentence.startswith("unknown model 'vit_42O'; allowed: 1000 names such as vit_42") and len(sentence) < 120


@pytest.mark.parametrize(
    ("name", "words", "sentence"),
    [
        ("convert", ["model.name=vit_tiny_patch16_224", "model.mixer=ahla"], "out=FOLDER"),
        ("convert", ["model.mixer=ahla", "out=x"], "model.name is empty"),
        ("convert", ["model.name=swin_tiny_patch4_window7_224", "model.mixer=ahla", "out={tmp}"], "(?i)swin"),
        ("convert", ["model.mixer=la", "out={tmp}", "precision=fp64"], "unknown precision 'fp64'"),
        ("convert", ["diffusers={tmp}", "model.mixer=la", "out={tmp}/out"], "there is no diffusers model"),
        (
            "convert",
            ["diffusers={tmp}", "model.name=a", "model.mixer=la", "out={tmp}/out"],
            "goes with mixer, mixer_options",
        ),
        ("evaluate_imagenet", ["data.source=folder", "eval.models=[a]"], "there is no checkpoint a"),
        ("evaluate_imagenet", ["eval.models=[vit_tiny_patch16_22]"], "Did you mean 'vit_tiny_patch16_224'"),
        ("demo", ["epoch=3"], "Did you mean 'epochs'"),
        ("demo", ["mixers=[la,banana]", "out={tmp}/demo"], "unknown mixer 'banana'"),
        ("extract_latents", ["images.source=digits", "images.where=banana"], "unknown images.where 'banana'"),
    ],
)
def test_what_tools_refuse(name, words, sentence, tmp_path):
    with pytest.raises(ValueError, match=sentence):
        __import__(name).main([word.format(tmp=tmp_path) for word in words])


def test_convert_a_timm_model(tmp_path, capsys):
    import convert

    words = ["model.name=deit_tiny_patch16_224", "model.mixer=hla2", "model.keep_softmax=[0]", f"out={tmp_path}"]
    words += ["model.layers=blocks.?.attn", "model.mixer_options={lepe: 3}"]
    report = convert.main(words)
    assert "the weights are random" in capsys.readouterr().out
    assert json.loads((tmp_path / "report.json").read_text()) == report
    model, recipe = load_model(tmp_path)
    assert recipe.num_classes == 1000 and recipe.keep_softmax == [0] and recipe.mixer_options["lepe"] == 3
    assert model.blocks[1].attn.mixer.config.options.lepe == 3
    assert InputSpec.from_recipe(recipe.input, DataSettings()) == InputSpec.of(model, None, DataSettings())
    assert [row["new"] == "hla2" for row in report["rows"]] == [0 < block < 10 for block in range(12)]
    with pytest.raises(ValueError, match=r"is already converted"):
        convert.main([f"model.checkpoint={tmp_path}", "model.mixer=la", f"out={tmp_path}/again"])


@pytest.mark.parametrize("source", ["model.checkpoint={0}", "model.checkpoint={0}/model.safetensors", "diffusers={0}"])
def test_convert_does_not_replace_its_source(source, tmp_path):
    import convert

    with pytest.raises(ValueError, match="is the source, whose softmax weights would be lost"):
        convert.main([source.format(tmp_path), "model.mixer=la", f"out={tmp_path}/"])


def test_convert_a_run_keeps_its_weights_and_input(tmp_path, capsys):
    import convert

    ClassificationRun(tiny(tmp_path / "run")).train()
    convert.main([f"model.checkpoint={tmp_path}/run", "model.mixer=la", f"out={tmp_path}/la"])
    assert "the weights are random" not in capsys.readouterr().out
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("run", "la"))
    assert all(torch.equal(after[k], before[k]) for k in before)
    assert load_model(tmp_path / "la")[1].input == load_model(tmp_path / "run")[1].input
    with pytest.raises(ValueError, match="holds a run, whose weights would be lost"):
        convert.main(["model.name=deit_tiny_patch16_224", "model.mixer=la", f"out={tmp_path}/run"])


def test_timm_scripts_know_our_names(tmp_path):
    script = tmp_path / "validate.py"
    script.write_text(
        "import sys, timm\nif __name__ == '__main__':\n"
        "    print(timm.is_model('vit_ahla_tiny_patch16_224'), sys.argv[1:], sys.path[0])\n"
    )
    status, out, err = run_fork("tools/timm_run.py", str(script), "--model", "x")
    assert (status, out.strip()) == (0, f"True ['--model', 'x'] {tmp_path}"), err


def test_timm_scripts_train_save_and_resume_our_models(tmp_path):
    """What timm's train.py does with a model, without its arguments and data."""
    script = tmp_path / "train.py"
    script.write_text(TIMM_SCRIPT)
    status, out, err = run_fork("tools/timm_run.py", str(script), str(tmp_path))
    assert (status, out.strip()) == (0, "resumed at epoch 1"), err
    script.write_text("raise ValueError('of the script')\n")
    status, _, err = run_fork("tools/timm_run.py", str(script))
    assert status == 1 and "Traceback" in err and err.strip().endswith("ValueError: of the script")


def small_configs(folder):
    """The configurations of the demo with small models."""
    for name in ("vit/digits_softmax", "vit/digits_finetune", "dit/digits", "dit/digits_finetune"):
        text = (ROOT / "configs" / f"{name}.yaml").read_text()
        text = text.replace("embed_dim: 64, depth: 4, num_heads: 4", "embed_dim: 16, depth: 2, num_heads: 2")
        text = text.replace("num_layers: 4, num_attention_heads: 4", "num_layers: 2, num_attention_heads: 2")
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.yaml").write_text(text)
    return folder


def test_demo_with_a_tiny_budget(warm_processes, tmp_path, monkeypatch):
    pytest.importorskip("torch_fidelity", reason="it comes with hla-zoo[eval]")
    import demo

    monkeypatch.setattr(demo, "CONFIGS", small_configs(tmp_path / "configs"))
    short = ["epochs=1", "mixers=[mhla,la]", "steps=4", "samples=60"]
    rows = demo.main([f"out={tmp_path}/demo", *short])
    classifiers = ["softmax", "softmax_more", "mhla_zero_shot", "mhla", "la_zero_shot", "la"]
    assert list(rows) == [*classifiers, "dit", "dit_more", "dit_zero_shot", "dit_converted"]
    report = (tmp_path / "demo" / "report.md").read_text()
    for name, row in rows.items():
        number = f"{row['top1']:.1f}" if name in classifiers else f"{row['scores']['fid']:.2f}"
        assert f"| {number} |" in report, name
        if name not in classifiers:
            assert (row["samples"]["n"], row["reference"]["n"], row["extractor"]["dim"]) == (60, 797, 16)
    (tmp_path / "mine.txt").touch()
    with pytest.raises(ValueError, match=r"files that are not from a demo"):
        demo.main([f"out={tmp_path}"])
    assert (tmp_path / "mine.txt").exists()
    assert (tmp_path / "demo" / "demo.png").stat().st_size > 30_000
    assert (tmp_path / "demo" / "demo_dit.png").stat().st_size > 30_000
    for run in ("softmax", "softmax_more", "mhla", "la", "dit", "dit_more", "dit_converted"):
        assert (tmp_path / "demo" / run / "config.yaml").exists() and (tmp_path / "demo" / run / "curves.png").exists()


def test_quality_table_and_its_continuation(tmp_path):
    from benchmark import quality

    short = ["schedule.epochs=1", "schedule.warmup_epochs=0", "data.batch_size=250", "model.img_size=8"]
    short += [f"model.kwargs.{word}" for word in ("embed_dim=16", "depth=2", "num_heads=2")]
    words = [f"{ROOT}/configs/vit/digits_softmax.yaml", *short, f"out={tmp_path}", "data.train="]
    scratch = [*words, "mixers=[softmax,softmax depthwise=v]", f"json={tmp_path}/quality.json"]
    table = quality(scratch)
    assert json.loads((tmp_path / "quality.json").read_text()) == table
    assert table.keys() == {"command", "date", "hardware", "versions", "rows"} and "data.train" not in table["command"]
    assert [(r["mixer"], r["options"]) for r in table["rows"]] == [("softmax", {}), ("softmax", {"depthwise": "v"})]
    keys = {"experiment", "data", "mixer", "options", "source", "seed", "metric", "value", "budget", "wall_s"}
    assert all(row.keys() == keys and row["source"] == "scratch" for row in table["rows"])
    again = quality(scratch)
    assert [row["value"] for row in again["rows"]] == [row["value"] for row in table["rows"]]
    recipe = tmp_path / "recipe.yaml"
    finetune = f"{ROOT}/configs/vit/digits_finetune.yaml"
    recipe.write_text(f"{{source: x, finetune: {finetune}, inputs: 50, transfer: 0.0}}")
    converted = [*words, f"recipe={recipe}", "mixers=[la keep_softmax=auto:1]", f"json={tmp_path}/converted.json"]
    rows = quality(converted)["rows"]
    assert rows[0]["value"] == table["rows"][0]["value"], "the source is the softmax run of the seed"
    kinds = ["teacher", "converted", "converted", "converted", "control", "floor"]
    assert [row["source"] for row in rows] == kinds and all(row.keys() == keys for row in rows)
    assert [row["metric"] for row in rows if row["budget"] == "1 epochs"] == ["top1"] * 3
    more = [words[0], *short, "mixers=[la]", f"out={tmp_path}/o", f"json={tmp_path}/o.json"]
    (row,) = quality([*more, "model.mixer_options.feature_map=relu"])["rows"]
    assert row["options"] == {"feature_map": "relu"}
    with pytest.raises(ValueError, match=r"such as 'mhla mixing=project'"):
        quality([words[0], "mixers=[mhla project]"])


def test_quality_files_of_several_processes_are_joined(tmp_path):
    from benchmark import quality

    def write(name, seed, mixer, value, **changes):
        row = {"experiment": "e", "data": "d", "mixer": mixer, "options": {}, "source": "scratch", "seed": seed}
        row |= {"metric": "top1", "value": value, "budget": "1 epochs", "wall_s": 2.0}
        command = f"python tools/benchmark.py quality e.yaml 'mixers=[{mixer}]' 'seeds=[{seed}]' out=o"
        file = {"command": command, "date": f"2026-01-0{seed + 1}", "hardware": "h", "versions": {"torch": "2"}}
        (tmp_path / name).write_text(json.dumps({**file, "rows": [row], **changes}))

    def merge(*names):
        files = ",".join(str(tmp_path / name) for name in names)
        return quality([f"merge=[{files}]", f"json={tmp_path}/all.json"])

    write("a.json", 0, "la", 50.0)
    write("b.json", 1, "la", 51.0)
    write("c.json", 0, "hla2", 52.0)
    table = merge("a.json", "b.json", "c.json", "a.json")
    assert json.loads((tmp_path / "all.json").read_text()) == table and table["date"] == "2026-01-02"
    assert [(r["mixer"], r["seed"], r["value"]) for r in table["rows"]] == [
        ("la", 0, 50),
        ("la", 1, 51),
        ("hla2", 0, 52),
    ]
    assert table["command"] == "python tools/benchmark.py quality e.yaml 'mixers=[la]|[hla2]' 'seeds=[0]|[1]' out=o"
    write("d.json", 0, "la", 49.0)
    write("e.json", 3, "la", 49.0, hardware="other")
    (tmp_path / "f.json").write_text('{"rows": [')
    (tmp_path / "g.json").write_text("[1]")
    write("h.json", 3, "la", 49.0, rows=[1])
    for names, sentence in (
        (("a.json", "d.json"), "different results for the run"),
        (("a.json", "e.json"), "their hardware differ"),
        (("a.json", "f.json"), "f.json is damaged"),
        (("g.json",), "g.json is not a quality table"),
        (("a.json", "h.json"), "h.json is not a quality table"),
        (("none.json",), "there is no result file"),
    ):
        with pytest.raises(ValueError, match=sentence):
            merge(*names)


def test_tools_are_thin():
    for file in (ROOT / "tools").glob("*.py"):
        assert len(file.read_text().splitlines()) <= 80, file
