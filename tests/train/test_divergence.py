"""Runs that diverge: they end with one sentence, write no result, and keep the checkpoints from before the damage."""

from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from tests.forks import run_fork
from tests.helpers.runs import TINY, tiny
from zoo import config
from zoo.errors import TrainingFailed
from zoo.train.checkpoint import MANIFEST, list_checkpoints, write_manifest
from zoo.train.classification import ClassificationRun
from zoo.train.metrics_log import read_rows
from zoo.train.update import Updater


def steps(run: Path) -> list[int]:
    return [int(path.name[-8:]) for path in list_checkpoints(run / "checkpoints")]


def poison(monkeypatch, bad) -> None:
    """Make the loss of these steps (counted from 0) not a number."""
    original = ClassificationRun.loss
    factor = {True: float("nan"), False: 1.0}
    monkeypatch.setattr(ClassificationRun, "loss", lambda s, b: original(s, b) * factor[s.step in bad])


def test_a_rate_far_too_high_ends_with_status_2_and_no_weights(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(config.merge(TINY, {"run": {"checkpoint_steps": 5, "keep_checkpoints": 2}})))
    words = (f"run.folder={tmp_path}/run", "optim.lr=1e38", "optim.clip_grad_norm=null")
    status, _, err = run_fork("tools/train_vit.py", str(file), *words)
    assert status == 2 and "Traceback" not in err
    assert [line for line in err.splitlines() if line.startswith("error:")] == [err.strip().splitlines()[-1]]
    assert not (tmp_path / "run" / "result.json").exists() and not list((tmp_path / "run").glob("*.safetensors"))
    assert steps(tmp_path / "run") == []


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_steps_skipped_to_the_end_prune_no_checkpoint(tmp_path, monkeypatch, optimizer):
    poison(monkeypatch, range(5, 10))
    settings = tiny(tmp_path, optim={"name": optimizer}, run={"checkpoint_steps": 1, "keep_checkpoints": 2})
    with pytest.raises(
        TrainingFailed, match=r"the last 5 steps .* the last checkpoint from before is .*step-00000005$"
    ):
        ClassificationRun(settings).train()
    assert steps(tmp_path) == [4, 5]
    assert not (tmp_path / "result.json").exists() and not (tmp_path / "model.safetensors").exists()


def test_a_checkpoint_after_a_skipped_step_is_written_after_the_next_one(tmp_path, monkeypatch):
    poison(monkeypatch, {3, 4})
    ClassificationRun(tiny(tmp_path, run={"checkpoint_steps": 5, "keep_checkpoints": 9})).train()
    assert steps(tmp_path) == [6, 10]
    rows = [row for row in read_rows(tmp_path / "metrics.jsonl") if row["kind"] == "checkpoint"]
    assert [(row["step"], row.get("postponed", False)) for row in rows] == [(5, True), (6, False), (10, False)]


@pytest.mark.parametrize("average", [False, True])
def test_weights_that_are_not_finite_stop_the_run_at_once(tmp_path, monkeypatch, average):
    """In a parameter that no gradient shows."""
    update = Updater.optimizer_step

    def damage(self, step):
        update(self, step)
        if step == 4:
            with torch.no_grad():
                model = self.ema.module if average else self.model
                model.blocks[0].attn.qkv.bias[0] = float("inf")

    monkeypatch.setattr(Updater, "optimizer_step", damage)
    settings = tiny(tmp_path, optim={"ema": 0.9}, run={"checkpoint_steps": 3})
    with pytest.raises(TrainingFailed, match=r"the weights are not finite after step [456]"):
        ClassificationRun(settings).train()
    assert steps(tmp_path) == [3]


def test_a_last_evaluation_that_is_not_finite_is_no_result(tmp_path, monkeypatch):
    original = ClassificationRun.evaluate
    monkeypatch.setattr(ClassificationRun, "evaluate", lambda self: {**original(self), "loss": float("nan")})
    with pytest.raises(TrainingFailed, match="loss of the last evaluation is not finite"):
        ClassificationRun(tiny(tmp_path)).train()
    assert not (tmp_path / "result.json").exists()


def test_a_checkpoint_with_weights_that_are_not_finite_is_refused(tmp_path):
    """Such as were written when nothing looked."""
    ClassificationRun(tiny(tmp_path)).train()
    (path,) = list_checkpoints(tmp_path / "checkpoints")
    weights = load_file(path / "model.safetensors")
    weights["head.bias"][0] = float("nan")
    save_file(weights, path / "model.safetensors")
    (path / MANIFEST).unlink()
    write_manifest(path, 10)
    with pytest.raises(ValueError, match="holds values that are not finite"):
        ClassificationRun(tiny(tmp_path, run={"resume": True}))
