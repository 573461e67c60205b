"""Configurations: types, unknown keys, bases, overrides, help."""

import dataclasses

import pytest
import yaml

from tests.helpers.runs import ROOT
from zoo import config
from zoo.eval.settings import EvalSettings
from zoo.mixers import MIXERS, build_mixer
from zoo.train.denoising.settings import DiffusionSettings
from zoo.train.settings import TrainSettings

CONFIGS = sorted((ROOT / "configs" / "vit").glob("*.yaml"))
CONFIGS += sorted((ROOT / "configs" / "features").glob("*.yaml"))
CONFIGS += sorted(f for f in (ROOT / "configs" / "experiments").glob("*.yaml") if not f.stem.endswith("_convert"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_every_shipped_configuration_is_valid_and_says_what_to_expect(path):
    model = config.load(DiffusionSettings if path.stem.startswith("dit_") else TrainSettings, path).model
    if model.mixer:
        layout = {"grid": (8, 8)} if MIXERS[model.mixer].defaults.needs_grid else {}
        build_mixer(model.mixer, 48, 3, 16, **layout, **model.mixer_options)
    assert path.read_text().startswith("#")


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("optim.learning_rate=1", "unknown configuration key 'optim.learning_rate'"),
        ("optm.lr=1", "Did you mean 'optim'"),
        ("optim.lrs=1", "Did you mean 'optim.lr'"),
        ("optim.lr=fast", "optim.lr must be float, got 'fast'"),
        ("schedule.epochs=1.5", "schedule.epochs must be int, got 1.5"),
        ("schedule.epochs=true", "schedule.epochs must be int, got True"),
        ("model.keep_softmax=[a]", r"model.keep_softmax\[0\] must be int, got 'a'"),
        ("model.keep_softmax=3", r"must be list\[int\] or str, got 3; write model.keep_softmax=\[3\]"),
        ("data.cache=1", "data.cache must be bool"),
        ("optim=1", "expected optim.KEY=VALUE"),
        ("optim.lr", "expected section.key=value"),
        ("optim.lr=[1", "cannot be read"),
        ("model.mixer_options={lepe:3}", r"write \{name: value\} with a space after the colon, got 'lepe:3'"),
        ("model.mixer_options={lepe=3}", r"write \{name: value\} with a space after the colon, got 'lepe=3'"),
        ("data.source=zip", "unknown data.source 'zip'; allowed: digits, folder, hf, parquet, webdataset"),
        ("run.precision=bf61", "Did you mean 'bf16'"),
        ("optim.lr=-1", "optim.lr must be a positive number, got -1.0"),
        ("augment.crop=random", "unknown augment.crop"),
        ("optim.ema=1.5", r"optim.ema must be in \[0, 1\)"),
        ("schedule.warmup_epochs=10", "schedule.warmup_epochs must be below schedule.epochs, which is 10"),
        ("distill.alpha=2", r"distill.alpha must be in \[0, 1\]"),
        ("model.kwargs={a: [1, {b: .nan}]}", r"model.kwargs.a.1.b must be a finite number, got nan"),
        ("log.trackers=csv", r"must be list\[str\], got 'csv'; write log.trackers=\[csv\]"),
        ("log.trackers=[excel]", "unknown log.trackers 'excel'"),
    ],
)
def test_wrong_words_give_one_clear_sentence(word, sentence):
    with pytest.raises(ValueError, match=sentence) as caught:
        config.load(TrainSettings, None, [word])
    assert "\n" not in str(caught.value)


def test_overrides_reach_every_type():
    words = [
        "optim.lr=1e-4",
        "optim.clip_grad_norm=null",
        "model.kwargs.depth=6",
        "model.mixer=la",
        "model.mixer_options={depthwise: v}",
        "data.train=",
    ]
    found = config.load(TrainSettings, None, [*words, "optim.betas=[0.9, 0.95]", "model.keep_softmax=every:3"])
    assert found.optim.lr == 1e-4 and found.optim.clip_grad_norm is None and found.optim.betas == [0.9, 0.95]
    assert found.model.kwargs == {"depth": 6} and found.model.mixer_options == {"depthwise": "v"}
    assert found.data.train == "" and found.model.keep_softmax == "every:3"


def test_base_files_and_round_trip(tmp_path):
    base = "optim: {lr: 0.5, clip_grad_norm: 3}\nmodel: {kwargs: {depth: 3, num_heads: 2}}\n"
    (tmp_path / "base.yaml").write_text(base)
    (tmp_path / "child.yaml").write_text("base: base.yaml\noptim: {lr: 0.25}\nmodel: {kwargs: {depth: 4}}\n")
    found = config.load(TrainSettings, tmp_path / "child.yaml")
    assert found.optim.lr == 0.25 and found.optim.clip_grad_norm == 3.0
    assert found.model.kwargs == {"depth": 4, "num_heads": 2}
    config.save(found, tmp_path / "saved.yaml")
    assert config.load(TrainSettings, tmp_path / "saved.yaml") == found


def test_an_empty_dict_takes_the_place_of_a_full_one(tmp_path):
    """On the command line and in a file with a base; words after it fill it again."""
    (tmp_path / "base.yaml").write_text("model: {mixer: mhla, mixer_options: {blocks: [4, 4], lepe: 5}}\n")
    (tmp_path / "child.yaml").write_text("base: base.yaml\nmodel: {mixer_options: {}}\n")

    def found(*words, file="base.yaml"):
        return config.load(TrainSettings, tmp_path / file, list(words)).model

    assert found("model.mixer_options={lepe: 3}").mixer_options == {"blocks": [4, 4], "lepe": 3}
    assert found("model.mixer_options={}") == found(file="child.yaml")
    assert found("model.mixer_options={}").mixer_options == {} and found("model.mixer_options={}").mixer == "mhla"
    assert found("model.mixer_options={}", "model.mixer_options.lepe=3").mixer_options == {"lepe": 3}


def test_bad_files(tmp_path):
    file = tmp_path / "x.yaml"
    with pytest.raises(ValueError, match=r"no configuration file"):
        config.load(TrainSettings, file)
    for text, sentence in [
        ("a: [", "not valid YAML"),
        ("- 1", "must hold sections"),
        ("base: x.yaml", "names itself as its base"),
        ("optim: 3", "optim is a section"),
    ]:
        file.write_text(text)
        with pytest.raises(ValueError, match=sentence):
            config.load(TrainSettings, file)


def test_differences_name_the_keys():
    a = config.load(TrainSettings, None)
    b = config.load(TrainSettings, None, ["optim.lr=0.5", "log.every=7", "model.kwargs.depth=2"])
    assert config.differences(a, b) == ["log.every", "model.kwargs", "model.kwargs.depth", "optim.lr"]
    assert config.differences(a, b, ignore=("log", "model")) == ["optim.lr"]


@pytest.mark.parametrize("schema", [TrainSettings, EvalSettings])
def test_help_documents_every_key(schema):
    text = config.describe(schema)
    for field in dataclasses.fields(schema):
        section = getattr(schema(), field.name)
        if dataclasses.is_dataclass(section):
            docs = config.field_docs(type(section))
            for key in dataclasses.fields(section):
                assert f"{field.name}.{key.name} (" in text
                assert len(docs[key.name]) > 8
            assert docs.keys() == {key.name for key in dataclasses.fields(section)}


def test_shipped_configurations_hold_no_paths_of_a_machine():
    for path in CONFIGS:
        data = yaml.safe_load(path.read_text()).get("data", {})
        assert not data.get("train") and not data.get("val"), path


def test_former_keys_are_accepted_with_a_warning(tmp_path):
    (tmp_path / "base.yaml").write_text("optim: {clip: 0.5, accumulate: 2}\naugment: {smoothing: 0.2}\n")
    (tmp_path / "run.yaml").write_text("base: base.yaml\noptim: {clip_grad_norm: 0.25}\n")
    with pytest.warns(FutureWarning, match=r"optim\.accumulate is now called optim\.grad_accum_steps"):
        found = config.load(TrainSettings, tmp_path / "run.yaml", ["run.keep=7", "augment.smoothing=0.3"])
    assert (found.optim.clip_grad_norm, found.optim.grad_accum_steps) == (0.25, 2)
    assert (found.run.keep_checkpoints, found.augment.label_smoothing) == (7, 0.3)
    with pytest.warns(FutureWarning, match=r"model\.part is now called model\.subfolder"):
        stored = config.from_tree(DiffusionSettings, {"model": {"part": "transformer_2"}, "data": {"drop": 0.4}})
    assert (stored.model.subfolder, stored.data.cond_dropout) == ("transformer_2", 0.4)
    with pytest.raises(ValueError, match=r"augment\.label_smoothing must be in"), pytest.warns(FutureWarning):
        config.load(TrainSettings, None, ["augment.smoothing=3"])
