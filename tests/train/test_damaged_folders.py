"""Damaged folders of runs: one sentence each, which says what to do, and nothing that is accepted unseen."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.runs import tiny
from zoo.train.checkpoint import MANIFEST, list_checkpoints, write_manifest
from zoo.train.classification import ClassificationRun


def settings(folder: Path, resume: bool = True):
    return tiny(folder, run={"checkpoint_steps": 5, "resume": resume})


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    """The folder of a run with the checkpoints of the steps 5 and 10."""
    folder = tmp_path_factory.mktemp("original") / "run"
    ClassificationRun(settings(folder, False)).train()
    return folder


@pytest.fixture
def run(original, tmp_path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "run"))


def refused(run: Path) -> str:
    """The sentence with which the run does not go on."""
    with pytest.raises(ValueError) as caught:
        ClassificationRun(settings(run)).train()
    said = str(caught.value)
    assert "\n" not in said and len(said) < 500
    return said


def change_state(run: Path, change: Callable[[Any], Any], signed: bool) -> None:
    """Damage the state of the newest checkpoint, with a manifest that agrees or as before there were any."""
    checkpoint = list_checkpoints(run / "checkpoints")[-1]
    state = torch.load(checkpoint / "state.pt", weights_only=True)
    (checkpoint / MANIFEST).unlink()
    if not signed:
        del state["format"]
    torch.save(change(state), checkpoint / "state.pt")
    if signed:
        write_manifest(checkpoint, 10)


STATES: dict[str, Callable[[Any], Any]] = {
    "a list": lambda state: [state],
    "no counts": lambda state: {k: v for k, v in state.items() if k != "counts"},
    "counts of text": lambda state: {**state, "counts": dict.fromkeys(state["counts"], "many")},
    "no optimizer": lambda state: {**state, "optimizer": None},
    "step of text": lambda state: {**state, "step": "10"},
    "step of another checkpoint": lambda state: {**state, "step": 5},
    "an absurd step": lambda state: {**state, "step": 10**9},
    "meters of numbers": lambda state: {**state, "meters": {"loss": 3.0}},
    "meters of text": lambda state: {**state, "meters": {"loss": ["a", "b"]}},
    "unreadable images of text": lambda state: {**state, "bad": ["a"]},
    "seconds of text": lambda state: {**state, "seconds": "long"},
    "no groups": lambda state: {**state, "optimizer": {"state": {}}},
    "moments of numbers": lambda state: {**state, "optimizer": {**state["optimizer"], "state": {0: 3}}},
    "moments of a parameter that is not there": lambda state: {
        **state,
        "optimizer": {**state["optimizer"], "state": {**state["optimizer"]["state"], 10**4: {"step": torch.ones(())}}},
    },
}


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("kind", STATES)
def test_a_state_that_is_none(run, kind, signed):
    change_state(run, STATES[kind], signed)
    said = refused(run)
    assert "state.pt" in said and "run.resume=5 continues" in said


def test_flipped_bits_of_the_earlier_format(run):
    """Whatever the unpickler makes of them."""
    change_state(run, lambda state: state, False)
    file = list_checkpoints(run / "checkpoints")[-1] / "state.pt"
    whole = file.read_bytes()
    for at in range(200, 1400, 150):
        content = bytearray(whole)
        content[at : at + 4] = bytes(255 - b for b in content[at : at + 4])
        file.write_bytes(content)
        assert "state.pt" in refused(run)


def test_a_state_with_code_is_refused_in_our_own_words(run):
    change_state(run, lambda state: Path("x"), False)
    assert "weights_only" not in refused(run)


def test_weights_that_are_not_finite(run):
    checkpoint = list_checkpoints(run / "checkpoints")[-1]
    weights = load_file(checkpoint / "model.safetensors")
    weights["head.weight"][0, 0] = float("inf")
    save_file(weights, checkpoint / "model.safetensors")
    write_manifest_again(checkpoint)
    assert "not finite" in refused(run)


def write_manifest_again(checkpoint: Path) -> None:
    (checkpoint / MANIFEST).unlink()
    write_manifest(checkpoint, 10)


@pytest.mark.parametrize("name", ["step-999999999999", "step-00000011"])
@pytest.mark.parametrize("as_file", [False, True])
def test_a_stray_checkpoint(run, name, as_file):
    stray = run / "checkpoints" / name
    stray.write_text("") if as_file else stray.mkdir()
    said = refused(run)
    assert name in said and "run.resume=10 continues" in said


def test_a_file_in_the_place_of_what_is_being_written(run):
    shutil.rmtree(list_checkpoints(run / "checkpoints")[-1])
    (run / "checkpoints" / "writing-x").write_text("")
    ClassificationRun(settings(run)).train()
    assert not (run / "checkpoints" / "writing-x").exists()


@pytest.mark.parametrize("line", ["[1, 2]", "3", "{}", '{"step": "2"}', '{"st', "\udcff"])
@pytest.mark.parametrize("last", [False, True])
def test_rows_that_are_none(run, line, last):
    file = run / "metrics.jsonl"
    rows = file.read_text().splitlines()
    rows.insert(len(rows) if last else 3, line)
    file.write_text("\n".join(rows) + "\n", errors="surrogateescape")
    if last and line in ('{"st', "\udcff"):  # cut off by a kill
        ClassificationRun(settings(run)).train()
        return
    said = refused(run)
    assert f"line {len(rows) if last else 4} of" in said and "delete it" in said


def test_a_record_that_was_removed(run):
    (run / "metrics.jsonl").unlink()
    assert "holds no evaluation any more" in refused(run)


@pytest.mark.parametrize("content", [b"", b"\n", b"\xff\xfe\x00", b"- 1\n", b"optim: [", b"optm: {}\n"])
def test_a_configuration_that_is_none(run, content):
    (run / "config.yaml").write_bytes(content)
    said = refused(run)
    assert "config.yaml" in said and "choose another run.folder" in said


def test_many_differences_are_not_all_named(run):
    (run / "config.yaml").write_text("optim: {lr: 0.5}\n")
    assert " and " in refused(run) and "more" in refused(run)


def test_a_file_in_the_place_of_the_folder(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(OSError, match="File exists") as caught:
        ClassificationRun(settings(tmp_path / "run"))
    assert caught.value.filename
