"""Files of weights whose header or tensors are not those of a model: one sentence, never another model."""

import json
import math

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.helpers.runs import tiny
from zoo.data.settings import DataSettings
from zoo.data.transforms import InputSpec
from zoo.models.timm.model_files import HEADER, load_model, read_recipe
from zoo.train.classification import ClassificationRun


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    ClassificationRun(tiny(folder, data={"batch_size": 500})).train()
    return folder


def refused(file):
    with pytest.raises(ValueError) as error:
        load_model(file)
    assert "\n" not in str(error.value) and len(str(error.value)) < 700
    return str(error.value)


def with_header(run, tmp_path, change):
    source = run / "model.safetensors"
    with safe_open(source, "pt") as opened:
        header = opened.metadata()
    recipe = json.loads(header[HEADER])
    text = change(recipe)
    header[HEADER] = text if isinstance(text, str) else json.dumps(recipe)
    save_file(load_file(source), tmp_path / "x.safetensors", metadata=header)
    return tmp_path / "x.safetensors"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda r: r.update(newer=1), "'newer'"),
        (lambda r: r.pop("name") and None, "name"),
        (lambda r: r.update(name=None), "name must be str"),
        (lambda r: r.update(kwargs=[1]), "kwargs must be"),
        (lambda r: r.update(input="x"), "input must be"),
        (lambda r: r.update(input={"mean": [math.nan] * 3}), "finite"),
        (lambda r: r.update(num_classes="ten"), "num_classes must be"),
        (lambda r: "[1, 2]", "describes no model"),
        (lambda r: "null", "describes no model"),
        (lambda r: "NaN", "describes no model"),
        (lambda r: "{not", "describes no model"),
        (lambda r: r["kwargs"].update(checkpoint_path="x.pth"), "must not hold checkpoint_path"),
        (lambda r: r["kwargs"].update(depth=-1), "cannot build"),
        (lambda r: r["kwargs"].update(embed_dim=2**40), "cannot build"),
        (lambda r: r.update(mixer="banana"), "banana"),
    ],
)
def test_headers_that_describe_no_model(run, tmp_path, change, sentence):
    assert sentence in refused(with_header(run, tmp_path, change))


def test_inputs_that_lack_a_key(run, tmp_path):
    recipe = read_recipe(with_header(run, tmp_path, lambda r: r["input"].pop("mean") and None))
    with pytest.raises(ValueError, match=r"the input that a checkpoint names needs crop_mode"):
        InputSpec.from_recipe(recipe.input, DataSettings())


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda t: t + torch.inf, "values that are not finite, in head.weight"),
        (lambda t: torch.where(torch.arange(t.numel()).view_as(t) == 3, torch.nan, t), "values that are not finite"),
        (lambda t: t.long(), "head.weight of torch.int64 where the model has torch.float32"),
    ],
)
def test_tensors_that_are_no_weights(run, tmp_path, change, sentence):
    with safe_open(run / "model.safetensors", "pt") as opened:
        header = opened.metadata()
    del header["sha256"]  # as in files of earlier versions
    tensors = load_file(run / "model.safetensors")
    save_file({**tensors, "head.weight": change(tensors["head.weight"])}, tmp_path / "x.safetensors", metadata=header)
    assert sentence in refused(tmp_path / "x.safetensors")


def test_an_average_that_cannot_be_read_is_no_reason_for_the_last_weights(run, tmp_path):
    for name in ("model.safetensors", "model_ema.safetensors"):
        (tmp_path / name).write_bytes((run / "model.safetensors").read_bytes())
    load_model(tmp_path)
    (tmp_path / "model_ema.safetensors").unlink()
    (tmp_path / "model_ema.safetensors").symlink_to("nowhere")
    assert "there is no checkpoint" in refused(tmp_path)


def test_final_weights_hold_their_step_and_digest(run, tmp_path):
    file = tmp_path / "x.safetensors"
    content = bytearray((run / "model.safetensors").read_bytes())
    with safe_open(run / "model.safetensors", "pt") as opened:
        assert opened.metadata()["step"] == str(json.loads((run / "result.json").read_text())["step"])
    file.write_bytes(content)
    load_model(file)
    content[-3] ^= 0x01  # a mantissa: the value stays finite
    file.write_bytes(content)
    assert "x.safetensors is truncated or damaged: its tensors are not those that were written" in refused(file)
