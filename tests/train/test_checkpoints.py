"""Checkpoints that are damaged, of another run or of an old format are refused in one sentence or continued exactly."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.runs import tiny
from zoo.train.checkpoint import MANIFEST, list_checkpoints, write_manifest
from zoo.train.classification import ClassificationRun
from zoo.train.metrics_log import read_rows

FILES = ("model.safetensors", "ema.safetensors", "state.pt")
SETTINGS = {"optim": {"ema": 0.9}, "schedule": {"epochs": 1}}  # 10 steps


def settings(folder: Path, resume: bool | int = True, **sections):
    run = {"checkpoint_steps": 2, "keep_checkpoints": 3, "resume": resume}
    return tiny(folder, **{**SETTINGS, **sections}, run=run)


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    """The folder of a run with the checkpoints of the steps 6, 8 and 10."""
    folder = tmp_path_factory.mktemp("original") / "run"
    ClassificationRun(settings(folder, False)).train()
    return folder


@pytest.fixture
def run(original, tmp_path) -> Path:
    """A copy of it that may be damaged."""
    return Path(shutil.copytree(original, tmp_path / "run"))


def checkpoints(run: Path) -> dict[int, Path]:
    return {int(path.name[-8:]): path for path in list_checkpoints(run / "checkpoints")}


def refused(folder: Path, **sections) -> str:
    """The sentence with which a run refuses to continue."""
    with pytest.raises(ValueError) as caught:
        ClassificationRun(settings(folder, **sections))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def earlier_format(checkpoint: Path) -> None:
    """Make a checkpoint what was written before there were manifests."""
    (checkpoint / MANIFEST).unlink()
    state = torch.load(checkpoint / "state.pt", weights_only=True)
    del state["format"], state["settings"]
    for key in ("parameters", "layout"):
        del state["optimizer"][key]
    torch.save(state, checkpoint / "state.pt")


def sign(checkpoint: Path) -> None:
    """Write a manifest that agrees with the files as they are now."""
    (checkpoint / MANIFEST).unlink()
    write_manifest(checkpoint, int(checkpoint.name[-8:]))


@pytest.mark.parametrize("name", [*FILES, MANIFEST])
def test_a_flipped_byte_anywhere_is_noticed_and_an_older_checkpoint_offered(run, name):
    file = checkpoints(run)[10] / name
    content = bytearray(file.read_bytes())
    content[len(content) * 3 // 4] ^= 4  # in the data of tensors, or in a digest
    file.write_bytes(content)
    assert "run.resume=8 continues" in refused(run)
    file.unlink()
    said = refused(run)
    assert f"{name} is missing" in said and "run.resume=8 continues" in said


def test_a_step_is_chosen_and_newer_ones_are_set_aside(run, original, capsys):
    (checkpoints(run)[10] / "state.pt").write_bytes(b"")
    (checkpoints(run)[8] / "ema.safetensors").unlink()
    assert "run.resume=6 continues" in refused(run)
    ClassificationRun(settings(run, 6)).train()
    assert "set aside as" in capsys.readouterr().out
    assert sorted(p.name for p in (run / "checkpoints").glob("aside-*")) == [
        "aside-step-00000008",
        "aside-step-00000010",
    ]
    assert list(checkpoints(run)) == [6, 8, 10]
    for name in FILES[:2]:
        whole, again = (load_file(checkpoints(folder)[10] / name) for folder in (original, run))
        assert all(torch.equal(whole[k], again[k]) for k in whole)
    losses = [[r.get("loss") for r in read_rows(folder / "metrics.jsonl")] for folder in (original, run)]
    assert losses[0] == losses[1]


def test_a_step_without_a_checkpoint_is_refused_with_those_there_are(run, tmp_path):
    with pytest.raises(ValueError, match=r"no checkpoint of that step; steps with one: 6, 8, 10"):
        ClassificationRun(settings(run, 7))
    with pytest.raises(ValueError, match=r"steps with one: none"):
        ClassificationRun(settings(tmp_path / "new", 7))


def test_without_an_intact_checkpoint_the_sentence_says_so(run):
    for path in checkpoints(run).values():
        (path / "state.pt").write_bytes(b"")
    assert "no other checkpoint before it is intact" in refused(run)


@pytest.mark.parametrize("name", FILES[:2])
def test_a_file_of_another_step_is_refused(run, name):
    found = checkpoints(run)
    shutil.copy(found[8] / name, found[10] / name)
    assert f"{name} is truncated or damaged, or of another checkpoint" in refused(run)


@pytest.mark.parametrize("width", [8, 32])
@pytest.mark.parametrize("earlier", [False, True])
def test_the_optimiser_state_of_another_model_is_refused(run, tmp_path, width, earlier):
    """torch's fused AdamW reads and writes beyond the end of moments that are too small."""
    ClassificationRun(settings(tmp_path / "other", False, model={"kwargs": {"embed_dim": width}})).train()
    mine, other = (checkpoints(folder)[10] for folder in (run, tmp_path / "other"))
    shutil.copy(other / "state.pt", mine / "state.pt")
    earlier_format(mine) if earlier else sign(mine)
    said = refused(run)
    assert f"{width}" in said and "16" in said and "run.resume=8 continues" in said


def test_a_whole_checkpoint_of_another_run_is_refused(run, tmp_path):
    other = tmp_path / "other"
    ClassificationRun(settings(other, False, optim={"ema": 0.9, "lr": 0.1})).train()
    shutil.rmtree(checkpoints(run)[10])
    shutil.copytree(checkpoints(other)[10], run / "checkpoints" / "step-00000010")
    said = refused(run)
    assert "of a run with another configuration; they differ in optim.lr" in said and "run.resume=8 continues" in said


def test_moments_of_another_shape_are_refused(run):
    path = checkpoints(run)[10]
    state = torch.load(path / "state.pt", weights_only=True)
    state["optimizer"]["state"][0]["exp_avg"] = torch.ones(3)
    torch.save(state, path / "state.pt")
    sign(path)
    assert "exp_avg of [3]" in refused(run)


def test_checkpoints_of_the_earlier_format_continue_exactly(run, original):
    shutil.rmtree(checkpoints(run)[10])
    shutil.rmtree(checkpoints(run)[8])
    earlier_format(checkpoints(run)[6])
    for name in FILES[:2]:  # whose headers had no step
        save_file(load_file(checkpoints(run)[6] / name), checkpoints(run)[6] / name, {"format": "pt"})
    ClassificationRun(settings(run)).train()
    whole, again = (load_file(folder / "model.safetensors") for folder in (original, run))
    assert all(torch.equal(whole[k], again[k]) for k in whole)


def test_the_manifest_names_every_file_and_its_digest(run):
    import hashlib

    path = checkpoints(run)[10]
    content = json.loads((path / MANIFEST).read_text())
    assert content["step"] == 10
    assert content["sha256"] == {name: hashlib.sha256((path / name).read_bytes()).hexdigest() for name in sorted(FILES)}
