"""Interrupted diffusion runs: killed at any step and continued, they end with the same weights, bit for bit."""

import random
import signal
import time
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from tests.forks import Fork, finish, run_fork, start_two
from tests.helpers.runs import MEASURED, wait_for_step
from tests.helpers.tiny_runs import tiny, tree
from tests.helpers.tiny_video import SIZES
from zoo import config
from zoo.train.denoising.run import DiffusionRun
from zoo.train.denoising.settings import DiffusionSettings
from zoo.train.metrics_log import read_rows

EVERYTHING: dict[str, Any] = {  # whatever draws random numbers or keeps a state
    "objective": {"kind": "ddpm"},
    "data": {"hflip": 0.5, "cond_dropout": 0.3},
    "optim": {"grad_accum_steps": 2, "mixer_lr_scale": 3.0},
    "distill": {"teacher": "source", "attention": 0.5},
    "schedule": {"name": "cosine", "steps": 14, "warmup_steps": 2},
    "sample": {"every": 4},
    "run": {"checkpoint_steps": 1, "eval_steps": 4},
}
CLIPS = {"source": "moving_digits", "frames": 4, "clips": 40, **EVERYTHING["data"]}
WAN = {"kind": "wan", "kwargs": {**SIZES, "patch_size": [1, 2, 2]}}
WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.mark.parametrize(
    ("tool", "sections", "keep"),
    [
        ("finetune_dit.py", {"objective": {"kind": "ddpm"}}, []),
        ("finetune_dit.py", {"model": WAN, "data": CLIPS, "objective": {"kind": "flow"}}, "every:2"),
    ],
)
def test_sigkill_and_resume_is_bit_identical(tmp_path, tool, sections, keep):
    source = tree(tmp_path / "source", **sections, schedule={"steps": 2})
    DiffusionRun(config.from_tree(DiffusionSettings, source)).train()
    model = {"checkpoint": str(tmp_path / "source"), "mixer": "ahla", "mixer_options": {"gate": True}}
    file = tmp_path / "run.yaml"
    model = {**sections.get("model", {}), **model, "keep_softmax": keep}
    file.write_text(yaml.safe_dump(tree(tmp_path, **EVERYTHING | sections | {"model": model})))
    status, _, err = run_fork(f"tools/{tool}", str(file), f"run.folder={tmp_path}/whole")
    assert status == 0, err
    rng = random.Random(time.time_ns())
    kill_at = rng.randrange(2, 6)
    process = Fork(f"tools/{tool}", str(file), f"run.folder={tmp_path}/killed", "run.resume=true")
    wait_for_step(tmp_path / "killed", kill_at, process)
    time.sleep(rng.random() * 0.1)  # anywhere inside a step, also while a checkpoint is written
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (tmp_path / "killed" / "transformer").exists()
    status, out, err = run_fork(f"tools/{tool}", str(file), f"run.folder={tmp_path}/killed", "run.resume=true")
    assert status == 0, err
    assert "continuing" in out, kill_at
    for name in ("transformer", "transformer_ema"):
        whole, killed = (load_file(tmp_path / run / name / WEIGHTS) for run in ("whole", "killed"))
        assert whole.keys() == killed.keys()
        assert all(torch.equal(whole[k], killed[k]) for k in whole), f"killed at {kill_at}"
    grids = [(tmp_path / run / "samples" / "step-00000014.png").read_bytes() for run in ("whole", "killed")]
    assert grids[0] == grids[1]
    found = [
        [
            {k: v for k, v in row.items() if k not in MEASURED}
            for row in read_rows(tmp_path / run / "metrics.jsonl")
            if row["kind"] != "checkpoint"  # a kill may come between a checkpoint and its row
        ]
        for run in ("whole", "killed")
    ]
    assert found[0] == found[1]


def test_resuming_with_another_configuration_names_the_keys(tmp_path):
    DiffusionRun(tiny(tmp_path))
    changed = {"objective": {"t_mean": 0.5}, "data": {"cond_dropout": 0.2}}
    with pytest.raises(ValueError, match=r"they differ in data.cond_dropout, objective.t_mean\. .*model.checkpoint="):
        DiffusionRun(tiny(tmp_path, run={"resume": True}, **changed))
    with pytest.raises(ValueError, match=r"already holds a run; set run.resume=true"):
        DiffusionRun(tiny(tmp_path))


def test_two_processes_share_a_run(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(tree(tmp_path / "two", schedule={"steps": 2}, sample={"every": 2})))
    status, out, err = finish(start_two("tools/finetune_dit.py", str(file)))
    assert status == 0, err
    assert out.count("{") == 1, "only the first process reports"
    one = DiffusionRun(tiny(tmp_path / "one", model={"kwargs": {}, "checkpoint": str(tmp_path / "two")}))
    last = [row for row in read_rows(tmp_path / "two" / "metrics.jsonl") if row["kind"] == "eval"][-1]
    assert one.evaluate()["val_loss"] == pytest.approx(last["ema_val_loss"], rel=1e-4)
