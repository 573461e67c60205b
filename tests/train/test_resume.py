"""Interrupted runs: killed at any step and continued, they end with the same weights, bit for bit."""

import json
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from tests.forks import Fork, finish, run_fork, start_two
from tests.helpers.runs import TINY, tiny, wait_for_step
from zoo import config
from zoo.models.checkpoint_tags import decode_tag
from zoo.train.checkpoint import list_checkpoints
from zoo.train.classification import ClassificationRun
from zoo.train.metrics_log import Record, read_rows

EVERYTHING = {  # whatever draws random numbers or keeps a state
    "augment": {
        "mixup": 0.4, "cutmix": 1.0, "crop": "resized", "auto_augment": "rand-m5-inc1", "random_erase": 0.2,
        "color_jitter": 0.2,
    },
    "data": {"cache": False, "workers": 1, "batch_size": 100},
    "model": {
        "mixer": "ahla",
        "mixer_options": {"gate": True},
        "kwargs": {"drop_path_rate": 0.2, "proj_drop_rate": 0.1},
    },
    "optim": {"ema": 0.99, "grad_accum_steps": 2, "mixer_lr_scale": 3.0, "anneal": 0.6},
    "distill": {"temperature": 2.0},
    "schedule": {"epochs": 2, "warmup_epochs": 0.5},
    "run": {"checkpoint_steps": 1, "keep_checkpoints": 2},
}


def write_config(folder: Path) -> Path:
    file = folder / "run.yaml"
    teacher = {"distill": {"teacher": str(folder / "teacher")}}
    file.write_text(yaml.safe_dump(config.merge(config.merge(TINY, EVERYTHING), teacher)))
    return file


def test_sigkill_and_resume_is_bit_identical(tmp_path):
    ClassificationRun(tiny(tmp_path / "teacher")).train()
    file = write_config(tmp_path)
    status, _, err = run_fork("tools/train_vit.py", str(file), f"run.folder={tmp_path}/whole")
    assert status == 0, err
    rng = random.Random(time.time_ns())
    kill_at = sorted(rng.sample(range(1, 13), 2))
    for step in kill_at:
        process = Fork("tools/train_vit.py", str(file), f"run.folder={tmp_path}/killed", "run.resume=true")
        wait_for_step(tmp_path / "killed", step, process)
        time.sleep(rng.random() * 0.1)  # anywhere inside a step, also while a checkpoint is written
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert not (tmp_path / "killed" / "model.safetensors").exists()
    status, out, err = run_fork("tools/train_vit.py", str(file), f"run.folder={tmp_path}/killed", "run.resume=true")
    assert status == 0, err
    assert "continuing" in out, kill_at
    for name in ("model.safetensors", "model_ema.safetensors"):
        whole, killed = (load_file(tmp_path / run / name) for run in ("whole", "killed"))
        assert whole.keys() == killed.keys()
        assert all(torch.equal(whole[k], killed[k]) for k in whole), f"killed at {kill_at}"
    rows = [
        [
            (r["step"], r["kind"], r.get("loss"), r.get("top1"))
            for r in read_rows(tmp_path / run / "metrics.jsonl")
            if r["kind"] != "checkpoint"  # a kill may come between a checkpoint and its row
        ]
        for run in ("whole", "killed")
    ]
    assert rows[0] == rows[1]
    checkpoints = tmp_path / "killed" / "checkpoints"
    assert [p.name for p in list_checkpoints(checkpoints)] == ["step-00000019", "step-00000020"]
    assert not list(checkpoints.glob("writing-*"))


def test_sigkill_of_two_processes_and_resume_is_bit_identical(tmp_path):
    ClassificationRun(tiny(tmp_path / "teacher")).train()
    short = ("tools/train_vit.py", str(write_config(tmp_path)), "data.batch_size=80")  # 24 steps
    status, _, err = finish(start_two(*short, f"run.folder={tmp_path}/whole"))
    assert status == 0, err
    words = (*short, f"run.folder={tmp_path}/killed", "run.resume=true")
    rng = random.Random(time.time_ns())
    kill_at = rng.randrange(2, 7)  # after the first checkpoint
    processes = start_two(*words)
    wait_for_step(tmp_path / "killed", kill_at, processes[0])
    time.sleep(rng.random() * 0.1)
    for process in processes:
        process.kill()
    assert finish(processes)[0] == -signal.SIGKILL and not (tmp_path / "killed" / "model.safetensors").exists()
    status, out, err = finish(start_two(*words))
    assert status == 0, err
    assert out.count("continuing") == 1, kill_at
    for name in ("model.safetensors", "model_ema.safetensors"):
        whole, killed = (load_file(tmp_path / run / name) for run in ("whole", "killed"))
        assert all(torch.equal(whole[k], killed[k]) for k in whole), f"killed at {kill_at}"


def test_a_finished_run_resumes_to_the_same_result(tmp_path):
    first = ClassificationRun(tiny(tmp_path)).train()
    again = ClassificationRun(tiny(tmp_path, run={"resume": True})).train()
    assert again["top1"] == first["top1"] and again["step"] == first["step"]


EARLIER_TAG = ("mixer", "feature_map", "normalize", "center", "causal", "order", "blocks", "mixing")  # all it held


def make_earlier(run: Path) -> None:
    """The only checkpoint of a run as it was written when files held what differed from the defaults of then."""
    file, state = (next(run.glob(f"checkpoints/*/{name}")) for name in ("model.safetensors", "state.pt"))
    for weights in (file, file.with_name("ema.safetensors")):
        tensors = load_file(weights)
        for key in [key for key in tensors if key.endswith(".tag")]:
            tag = {k: v for k, v in decode_tag(tensors[key]).items() if k in EARLIER_TAG}
            tensors[key] = torch.tensor([2 * byte for byte in json.dumps(tag).encode()], dtype=torch.uint8)
        save_file(tensors, weights)
    content = {k: v for k, v in torch.load(state, weights_only=True).items() if k not in ("format", "settings")}
    torch.save(content, state)
    file.with_name("manifest.json").unlink()
    tree = yaml.safe_load((run / "config.yaml").read_text())
    tree["model"]["mixer_options"].pop("feature_map")
    (run / "config.yaml").write_text(yaml.safe_dump(tree))


@pytest.mark.parametrize("mixer", ["ahla", "mhla"])
def test_an_earlier_run_resumes_with_the_defaults_of_then(tmp_path, mixer):
    """And goes on from its own checkpoints."""
    image = {"img_size": 16, "kwargs": {**TINY["model"]["kwargs"], "depth": 1}}
    sections = {"run": {"checkpoint_steps": 4, "keep_checkpoints": 9}, "optim": {"ema": 0.9}}
    named = {**image, "mixer": mixer, "mixer_options": {"feature_map": "elu1"}}
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    ClassificationRun(tiny(whole, model=named, **sections)).train()
    shutil.copytree(whole, resumed)
    for path in resumed.glob("checkpoints/*"):
        if path.name != "step-00000004":
            shutil.rmtree(path)
    make_earlier(resumed)
    for step in (True, 8):
        unnamed = {**image, "mixer": mixer, "mixer_options": {}}
        run = {**sections["run"], "resume": step}
        ClassificationRun(tiny(resumed, model=unnamed, **{**sections, "run": run})).train()
        for name in ("model.safetensors", "model_ema.safetensors"):
            one, two = load_file(whole / name), load_file(resumed / name)
            assert one.keys() == two.keys() and all(torch.equal(one[k], two[k]) for k in one)


def test_a_folder_with_a_run_is_not_overwritten(tmp_path):
    ClassificationRun(tiny(tmp_path))
    with pytest.raises(ValueError, match=r"already holds a run; set run.resume=true"):
        ClassificationRun(tiny(tmp_path))


@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_with_a_model_and_no_checkpoint_is_not_overwritten(tmp_path, resume):
    run = tmp_path / "run"
    ClassificationRun(tiny(run)).train()
    shutil.rmtree(run / "checkpoints")
    if not resume:
        (run / "config.yaml").unlink()
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    with pytest.raises(ValueError, match=r"holds a model and no checkpoint .*choose another run\.folder"):
        ClassificationRun(tiny(run, run={"resume": resume}))
    assert before == {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}


def test_resuming_with_another_configuration_names_the_keys(tmp_path):
    ClassificationRun(tiny(tmp_path))
    changed = {"optim": {"lr": 0.5}, "augment": {"label_smoothing": 0.0}}
    with pytest.raises(ValueError, match=r"they differ in augment.label_smoothing, optim.lr\. .*model.checkpoint="):
        ClassificationRun(tiny(tmp_path, run={"resume": True}, **changed))
    ClassificationRun(tiny(tmp_path, run={"resume": True, "keep_checkpoints": 5}, log={"every": 3}))


@pytest.mark.parametrize("name", ["model.safetensors", "ema.safetensors", "state.pt"])
def test_a_truncated_checkpoint_is_refused(tmp_path, name):
    settings = {"optim": {"ema": 0.9}}
    ClassificationRun(tiny(tmp_path, **settings)).train()
    file = list_checkpoints(tmp_path / "checkpoints")[-1] / name
    for size in (file.stat().st_size // 2, 5, 0):
        file.write_bytes(file.read_bytes()[:size])
        with pytest.raises(ValueError, match=rf"{name} is truncated or damaged") as caught:
            ClassificationRun(tiny(tmp_path, run={"resume": True}, **settings))
        assert "\n" not in str(caught.value)


def test_the_record_drops_rows_after_the_step_and_a_torn_last_line(tmp_path):
    file = tmp_path / "metrics.jsonl"
    record = Record(file)
    for step in range(4):
        record.write({"step": step})
    with file.open("a") as opened:
        opened.write('{"step": 4, "lo')
    assert [row["step"] for row in read_rows(file)] == [0, 1, 2, 3]
    Record(file, step=2)
    assert [row["step"] for row in read_rows(file)] == [0, 1, 2]
    file.write_text('{"step": 1}\n{"st\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"line 2 of .* is damaged"):
        read_rows(file)
