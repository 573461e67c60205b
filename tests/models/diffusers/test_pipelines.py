"""Pipelines: converted as a whole, saved and loaded by diffusers with bit-equal images."""

import copy
import json
import os
import shutil
import subprocess
import sys

import diffusers
import pytest
import torch

import zoo
from tests.helpers.tiny_diffusers import CASES, build
from tests.helpers.tiny_pipelines import image, pipeline
from zoo.models.diffusers.convert_folder import convert_folder


@pytest.mark.parametrize("name", ["dit", "pixart", "sd3", "flux", "wan"])
def test_a_saved_pipeline_makes_the_same_image(name, tmp_path):
    pipe, arguments = pipeline(name)
    before = image(pipe, arguments)
    report = zoo.convert(pipe, "ahla", depthwise="v", keep_softmax=[1])
    parts = {row.layer.split(".")[0] for row in report.rows}
    assert parts == ({"transformer", "transformer_2"} if name == "wan" else {"transformer"})
    assert report.model == type(pipe).__name__
    made = image(pipe, arguments)
    assert made.isfinite().all() and not torch.equal(made, before)
    pipe.save_pretrained(tmp_path)
    absent = {part: None for part, value in pipe.components.items() if value is None}
    again = diffusers.DiffusionPipeline.from_pretrained(tmp_path, **absent)
    for part in sorted(parts):  # copies: weights are mapped from the file, and products round by their alignment
        assert type(getattr(again, part)) is type(getattr(pipe, part))
        setattr(again, part, copy.deepcopy(getattr(again, part)))
    assert torch.equal(image(again, arguments), made)


def test_a_pipeline_whose_transformer_was_converted_alone(tmp_path):
    pipe, arguments = pipeline("dit")
    zoo.convert(pipe.transformer, "ahla")
    pipe.save_pretrained(tmp_path, variant="fp32", max_shard_size="50KB")
    assert len(list((tmp_path / "transformer").glob("*fp32*.safetensors"))) > 1
    again = diffusers.DiffusionPipeline.from_pretrained(tmp_path, variant="fp32")
    assert isinstance(again.transformer, zoo.HLADiTTransformer2DModel)
    assert torch.equal(image(again, arguments), image(pipe, arguments))


def test_a_new_process_needs_import_zoo_alone(tmp_path):
    pipe, arguments = pipeline("dit")
    zoo.convert(pipe, "ahla", gate=True)
    pipe.save_pretrained(tmp_path)
    torch.save(image(pipe, arguments), tmp_path / "image.pt")
    code = f"""
import sys, zoo
assert "diffusers" not in sys.modules
import diffusers, torch
pipe = diffusers.DiffusionPipeline.from_pretrained({str(tmp_path)!r})
pipe.set_progress_bar_config(disable=True)
made = pipe([1], num_inference_steps=2, generator=torch.Generator().manual_seed(0), output_type="np").images
assert torch.equal(torch.as_tensor(made), torch.load({str(tmp_path / "image.pt")!r}, weights_only=True))
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_a_softmax_pipeline_takes_a_converted_transformer(tmp_path):
    pipe, arguments = pipeline("dit")
    pipe.save_pretrained(tmp_path)
    transformer = zoo.HLADiTTransformer2DModel.from_pretrained(
        tmp_path, subfolder="transformer", conversions=[{"mixer": "hla2"}]
    )
    again = diffusers.DiTPipeline.from_pretrained(tmp_path, transformer=transformer)
    zoo.convert(pipe, "hla2")
    assert torch.equal(image(again, arguments), image(pipe, arguments))
    again.save_pretrained(tmp_path / "converted")
    loaded = diffusers.AutoModel.from_pretrained(str(tmp_path / "converted"), subfolder="transformer")
    assert isinstance(loaded, zoo.HLADiTTransformer2DModel)


@pytest.mark.parametrize("kind", ["pipeline", "model"])
def test_other_denoisers_are_refused(kind):
    unet = diffusers.UNet2DModel(
        block_out_channels=(8,), norm_num_groups=4, down_block_types=("DownBlock2D",), up_block_types=("UpBlock2D",)
    )
    thing = diffusers.DDPMPipeline(unet, diffusers.DDPMScheduler()) if kind == "pipeline" else unet
    with pytest.raises(ValueError, match=r"cannot convert UNet2DModel.*Supported: .*DiTTransformer2DModel, Flux"):
        zoo.convert(thing, "la")


@pytest.mark.parametrize("kind", ["pipeline", "transformer"])
def test_folders_are_converted(kind, tmp_path):
    pipe, arguments = pipeline("dit")
    saved = pipe if kind == "pipeline" else pipe.transformer
    saved.save_pretrained(tmp_path / "softmax")
    report = convert_folder(str(tmp_path / "softmax"), tmp_path / "ahla", "ahla", keep_softmax=[0], gate=True)
    assert len(report.swapped) == 2
    zoo.convert(pipe, "ahla", keep_softmax=[0], gate=True)
    if kind == "pipeline":
        again = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "ahla")
    else:
        again = pipeline("dit")[0]
        again.register_modules(transformer=zoo.HLADiTTransformer2DModel.from_pretrained(tmp_path / "ahla"))
    assert torch.equal(image(again, arguments), image(pipe, arguments))
    more = convert_folder(str(tmp_path / "ahla"), tmp_path / "half", "la", "bf16", layers=[0])
    assert [row.new for row in more.rows] == ["la", "ahla", "ahla"]


def test_a_converted_folder_is_complete_or_as_it_was(tmp_path, monkeypatch):
    source, out = tmp_path / "softmax", tmp_path / "out"
    build(CASES["dit"]).save_pretrained(source, max_shard_size="20KB")
    diffusers.FlowMatchEulerDiscreteScheduler(shift=2.0).save_pretrained(source / "scheduler")
    convert_folder(str(source), out, "ahla")
    assert json.loads((out / "report.json").read_text())["model"] == "DiTTransformer2DModel"
    assert diffusers.FlowMatchEulerDiscreteScheduler.from_pretrained(out / "scheduler").config.shift == 2.0
    (out / "diffusion_pytorch_model-00009-of-00009.safetensors").write_bytes(b"of an earlier conversion")
    before = {f: f.read_bytes() for f in out.rglob("*") if f.is_file()}
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "copytree", lambda *names: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            convert_folder(str(source), out, "la")
    assert {f: f.read_bytes() for f in out.rglob("*") if f.is_file()} == before
    convert_folder(str(source), out, "la")
    assert [f.name for f in out.glob("*.safetensors")] == ["diffusion_pytorch_model.safetensors"]
    assert sorted(f.name for f in tmp_path.iterdir()) == ["out", "softmax"]
    for wrong, sentence in (
        (tmp_path, "holds the source, which would be lost"),
        (source / "scheduler", "holds other files than an earlier conversion"),
        (source / "config.json", "is a file: choose a folder"),
    ):
        with pytest.raises(ValueError, match=sentence):
            convert_folder(str(source), wrong, "la")


def test_folders_that_hold_no_model_are_refused(tmp_path):
    with pytest.raises(ValueError, match="there is no diffusers model"):
        convert_folder(str(tmp_path), tmp_path / "out", "ahla")
    (tmp_path / "config.json").write_text('{"_class_name": "DiTTransformer3DModel"}')
    with pytest.raises(ValueError, match=r"unknown model class 'DiTTransformer3DModel'.*mean 'DiTTransformer2DModel'"):
        convert_folder(str(tmp_path), tmp_path / "out", "ahla")
