"""Numbers that no option may have, wherever it lies; and keys that are looked for in the wrong section."""

import dataclasses
import math

import pytest

from benchmarks.quality import QualitySettings
from tests.helpers.runs import tiny
from zoo import config
from zoo.data.latents.settings import ExtractSettings
from zoo.data.settings import AugmentSettings
from zoo.eval.attention.probes import ProbeSettings
from zoo.eval.fid.settings import FidSettings
from zoo.eval.sample_settings import SampleSettings
from zoo.eval.settings import EvalSettings
from zoo.ranges import check_ranges
from zoo.recipes.settings import RecipeSettings
from zoo.train.classification import ClassificationRun
from zoo.train.denoising.settings import DiffusionSettings
from zoo.train.settings import TrainSettings

SCHEMAS = [
    TrainSettings, DiffusionSettings, EvalSettings, ProbeSettings, FidSettings, SampleSettings, ExtractSettings,
    RecipeSettings, QualitySettings,
]  # fmt: skip
ANY = {"data.mean", "objective.t_mean", "attention.queries"}  # may be negative
NAMED = ("layers", "keep_softmax")  # numbers of layers, which know the model


def numbers(schema):
    """(key, value with one number in the form of the key) for every number of a configuration."""
    hints = config.leaves(schema())
    for key in hints:
        owner = schema
        for part in key.split(".")[:-1]:
            owner = {f.name: f for f in dataclasses.fields(owner)}[part].type
            owner = owner if isinstance(owner, type) else None
        hint = str({f.name: f for f in dataclasses.fields(owner)}[key.split(".")[-1]].type) if owner else ""
        if ("int" in hint or "float" in hint) and "list[list" not in hint and not key.endswith(NAMED):
            yield key, ("[{}, {}]" if "list" in hint else "{}"), "float" in hint


HUGE = ("1.0e300", "-1.0e300")  # beyond every range
CASES = [
    pytest.param(schema, f"{key}={form.format(*[value] * 2)}", key, id=f"{schema.__name__}-{key}={value}")
    for schema in SCHEMAS
    for key, form, real in numbers(schema)
    for value in ((".nan", ".inf", "-.inf", "1e400", "-1.5", *HUGE) if real else ("-1", "1" + 20 * "0"))
    if not (value == "-1.5" and key in ANY)
]


@pytest.mark.parametrize(("schema", "word", "key"), CASES)
def test_no_number_is_negative_or_not_finite_or_huge(schema, word, key):
    with pytest.raises(ValueError, match=rf"^{key}") as error:
        config.load(schema, None, [word])
    assert "\n" not in str(error.value) and len(str(error.value)) < 300


def test_settings_made_in_python_are_checked_too():
    for value in (math.nan, math.inf, -1.0, 2.0):
        with pytest.raises(ValueError, match=r"augment.hflip must be in \[0, 1\]"):
            AugmentSettings(hflip=value)


@pytest.mark.parametrize(
    ("interval", "inside", "outside", "words"),
    [
        ("(0, inf)", [1e-300, 1e18, None], [0, -1, math.inf, math.nan], "a positive number"),
        ("[0, 1)", [0, 0.999], [1, -1e-9, math.nan], r"in \[0, 1\)"),
        ("(0, 1]", [1, 1e-9], [0, 1.001], r"in \(0, 1\]"),
        ("[1, inf)", [1, 10**18], [0, math.inf], "1 or more"),
        ("(-inf, inf)", [-1e18, 0], [math.nan, -math.inf, math.inf], "finite"),
        ("[0, inf)", [0, 1e18], [2e18, 10**400, -(10**400)], r"at most 1e\+18 in size"),
    ],
)
def test_intervals(interval, inside, outside, words):
    @dataclasses.dataclass
    class Settings:
        number: object

    for value in inside:
        check_ranges("a", Settings(value), number=interval)
        check_ranges("a", Settings([value, value]), number=interval)
    for value in outside:
        with pytest.raises(ValueError, match=rf"^a\.number must be {words}, got "):
            check_ranges("a", Settings(value), number=interval)
        with pytest.raises(ValueError, match=rf"^number\[1\] must be {words}, got "):
            check_ranges("", Settings([inside[0], value]), number=interval)


@pytest.mark.parametrize(
    ("schema", "word", "sentence"),
    [
        (TrainSettings, "optim.betas=[0.9]", r"optim.betas is two numbers"),
        (TrainSettings, "optim.betas=[]", r"optim.betas is two numbers"),
        (TrainSettings, "data.std=[0,0,0]", r"data.std\[0\] must be a positive number, got 0.0"),
        (TrainSettings, "data.crop_pct=0", r"data.crop_pct must be in \[0.01, 1\]"),
        (TrainSettings, "data.crop_pct=1.0e-300", r"data.crop_pct must be in \[0.01, 1\]"),
        (TrainSettings, "augment.pad=100000000000000000000", r"augment.pad must be at most 1e\+18 in size"),
        (TrainSettings, "augment.pad=100000", r"augment.pad must be in \[0, 65536\]"),
        (DiffusionSettings, "objective.shift=1.0e300", r"objective.shift must be at most 1e\+18 in size"),
        (DiffusionSettings, "objective.shift=1.0e+16", r"objective.shift must be in \[0.001, 1000\]"),
        (DiffusionSettings, "objective.shift=1.0e-300", r"objective.shift must be in \[0.001, 1000\]"),
        (DiffusionSettings, "objective.t_mean=-100", r"objective.t_mean must be in \[-20, 20\]"),
        (DiffusionSettings, "lora.rank=100000000000000000000", r"lora.rank must be at most 1e\+18 in size"),
        (DiffusionSettings, "sample.steps=9223372036854775807", r"sample.steps must be at most 1e\+18 in size"),
        (TrainSettings, "augment.scale=[1, 0.5]", r"augment.scale is two numbers, smallest and largest"),
        (TrainSettings, "augment.auto_augment=garbage", r"augment.auto_augment='garbage' is no policy"),
        (TrainSettings, "augment.auto_augment=rand-mX", r"augment.auto_augment='rand-mX' is no policy"),
        (TrainSettings, "optim.layer_decay=0", r"optim.layer_decay must be in \(0, 1\]"),
        (TrainSettings, "run.folder=", r"run.folder is empty"),
        (TrainSettings, "optim.lr=" + "9" * 5000, r"the value of optim.lr cannot be read"),
        (TrainSettings, "model.kwargs=" + "[" * 3000, r"the value of model.kwargs cannot be read"),
        (TrainSettings, "data.workers=" + "x" * 5000, r"data.workers must be int, got 'x+\.\.\.'$"),
        (EvalSettings, "eval.device=foo", r"eval.device must be a torch device .* got 'foo'"),
        (EvalSettings, "out=", r"out is empty"),
        (DiffusionSettings, "data.img_size=1000000000000", r"data.img_size must be in \[1, 65536\]"),
        (ExtractSettings, "images.width=1000000000000", r"images.width must be in \[1, 65536\]"),
        (EvalSettings, "eval.device=meta", r"eval.device=meta holds no values"),
        (EvalSettings, "eval.device=cuda:99", r"eval.device=cuda:99 does not exist"),
        (SampleSettings, "sample.device=foo", r"sample.device must be a torch device"),
        # B8: the right key lies in another section
        (DiffusionSettings, "optim.steps=60", r"Did you mean 'schedule.steps' or 'sample.steps'\?"),
        (TrainSettings, "optim.epochs=60", r"Did you mean 'schedule.epochs'\?"),
        (TrainSettings, "workers=1", r"unknown configuration section 'workers'.*Did you mean 'data.workers'\?"),
        (TrainSettings, "lr=1", r"Did you mean 'optim.lr'\?"),
        (TrainSettings, "train.lr=1", r"unknown configuration section 'train'.*Did you mean 'optim.lr'\?"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_wrong_options_are_one_sentence(schema, word, sentence):
    with pytest.raises(ValueError, match=sentence) as error:
        config.load(schema, None, [word])
    assert "\n" not in str(error.value) and len(str(error.value)) < 700


def test_policies_of_timm_are_known():
    from timm.data import create_transform

    words = ["rand-m9-mstd0.5-inc1", "rand-m9-n3-p0.5-mmax12", "rand-mstd101-tweights", "augmix-m5-w4-d2", "v0r", "3a"]
    for word in [*words, "original-mstd0.5", "rand", "augmix", "originalr", "v0", "rand-t3a"]:
        create_transform(32, is_training=True, auto_augment=AugmentSettings(auto_augment=word).auto_augment)


BOMB = "model:\n  kwargs:\n    a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"    {b}: &{b} [{','.join(['*' + a] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"optim: {lr: \xff\xfe}", r"x\.yaml is not text in UTF-8"),
        (BOMB.encode(), r"x\.yaml is not valid YAML: it holds more than 100000 values"),
        (b"a: " + b"[" * 3000, r"x\.yaml is not valid YAML"),
        (b"a: &a [*a]", r"x\.yaml is not valid YAML"),
        (b"a: 2001-99-99", r"x\.yaml is not valid YAML: month must be"),
        (b"a: !!python/object/apply:os.system [ls]", r"x\.yaml is not valid YAML"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_files_that_cannot_be_read(tmp_path, content, sentence):
    (tmp_path / "x.yaml").write_bytes(content)
    with pytest.raises(ValueError, match=sentence) as error:
        config.load(TrainSettings, tmp_path / "x.yaml")
    assert "\n" not in str(error.value) and len(str(error.value)) < 700


def test_a_link_to_itself_is_no_file(tmp_path):
    (tmp_path / "x.yaml").symlink_to("x.yaml")
    with pytest.raises(ValueError, match=r"there is no configuration file"):
        config.load(TrainSettings, tmp_path / "x.yaml")


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ({"kwargs": {"embed_dim": 33}}, r"timm cannot build vit_tiny_patch16_224 with .*'embed_dim': 33"),
        ({"kwargs": {"num_heads": 0}}, r"timm cannot build vit_tiny_patch16_224 with .*'num_heads': 0"),
        ({"kwargs": {"patch_size": 0}}, r"timm cannot build vit_tiny_patch16_224 with .*'patch_size': 0"),
        ({"kwargs": {"patch_size": 16}}, r"inputs of 8 x 8 pixels are not whole patches of 16 x 16"),
        ({"kwargs": {"depth": 0}}, r"vit_tiny_patch16_224 with .* has no blocks"),
        ({"kwargs": {"depth": -1}}, r"timm cannot build vit_tiny_patch16_224 with .*'depth': -1"),
        ({"kwargs": {"global_pool": "foo"}}, r"timm cannot build vit_tiny_patch16_224 with .*'foo'"),
        ({"kwargs": {"embed_dim": 10**12}}, r"timm cannot build vit_tiny_patch16_224 with "),
        ({"kwargs": {"drop_path_rate": 2.0}}, r"model.kwargs.drop_path_rate must be in \[0, 1\), got 2.0"),
        ({"kwargs": {"in_chans": 1}}, r"model.kwargs.in_chans must be 3"),
        ({"img_size": 9}, r"inputs of 9 x 9 pixels are not whole patches of 2 x 2"),
    ],
)
def test_models_that_cannot_be(tmp_path, model, sentence):
    with pytest.raises(ValueError, match=sentence) as error:
        ClassificationRun(tiny(tmp_path / "run", model=model))
    assert "\n" not in str(error.value) and len(str(error.value)) < 700
