"""Training on GPUs: fp16 with the scaler's skipped steps, steps that do not wait for the device, two GPUs as one.

Run with `pytest -m gpu tests/train`.
"""

import itertools
import json
import os

import pytest
import torch
import yaml
from accelerate.state import AcceleratorState
from safetensors.torch import load_file

from tests.helpers.runs import ROOT, TINY, run_tool, stop_before, tiny
from zoo import config
from zoo.train.checkpoint import list_checkpoints, step_of
from zoo.train.classification import ClassificationRun
from zoo.train.metrics_log import read_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: training on a GPU is not checked here"),
]
GPUS = (os.environ.get("CUDA_VISIBLE_DEVICES") or "0,1").split(",")  # of this machine, those that are ours
LARGE = 2.0**24  # a scale at which the first steps overflow
FP16 = {
    "run": {"precision": "fp16", "checkpoint_steps": 1, "keep_checkpoints": 40},
    "optim": {"ema": 0.9},
    "schedule": {"epochs": 3},  # 30 steps
    "log": {"every": 4},
    "model": {"mixer": "ahla"},
}


@pytest.fixture(autouse=True)
def repeatable(monkeypatch):
    """The same kernels in every run, with the same order of sums."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    yield
    torch.backends.cudnn.deterministic = before


def with_large_scale(folder, **sections):
    AcceleratorState._reset_state()
    trainer = ClassificationRun(tiny(folder, **config.merge(FP16, sections)))
    scaler = trainer.accelerator.scaler
    if trainer.step == 0:
        scaler.load_state_dict({**scaler.state_dict(), "scale": LARGE})
    return trainer


def optimizer_steps(trainer):
    return {int(state["step"]) for state in trainer.optimizer.state.values()}


@pytest.mark.parametrize("name", ["adamw", "lamb"])
def test_fp16_skips_steps_that_overflow_and_counts_them(tmp_path, name):
    trainer = with_large_scale(tmp_path, optim={"name": name})
    result = trainer.train()
    skipped = result["skipped"]
    assert 1 <= skipped < 25 and result["skipped_in_a_row"] == 0 and result["step"] == 30
    assert trainer.accelerator.scaler.get_scale() == LARGE / 2**skipped, (
        "the scaler halves its factor at each skipped step"
    )
    if name == "adamw":
        assert optimizer_steps(trainer) == {30 - skipped}
    rows = [row for row in read_rows(tmp_path / "metrics.jsonl") if row["kind"] == "train"]
    assert rows[-1]["skipped"] == skipped and rows[-1]["loss"] < rows[0]["loss"]
    for file in ("model", "model_ema"):
        assert all(torch.isfinite(v).all() for v in load_file(tmp_path / f"{file}.safetensors").values())


def test_a_skipped_fp16_step_leaves_the_weights(tmp_path):
    trainer = with_large_scale(tmp_path, log={"every": 1})
    initial = {k: v.cpu().clone() for k, v in trainer.model.state_dict().items()}
    trainer.train()
    rows = [row for row in read_rows(tmp_path / "metrics.jsonl") if row["kind"] == "train"]
    finite = [row["grad_norm"] is not None for row in rows]
    paths = list_checkpoints(tmp_path / "checkpoints")
    steps = [0, *(step_of(path) for path in paths)]
    # a checkpoint is postponed while steps are skipped, except after the first of them
    assert steps[1:] == [i + 1 for i in range(30) if finite[i] or i == 0 or finite[i - 1]]
    weights = [initial, *(load_file(path / "model.safetensors") for path in paths)]
    changed = [any(not torch.equal(a[k], b[k]) for k in a) for a, b in itertools.pairwise(weights)]
    assert changed == [any(finite[a:b]) for a, b in itertools.pairwise(steps)] and not changed[0] and changed[-1]


def test_fp16_resumed_while_it_skips_equals_the_whole_run(tmp_path, monkeypatch):
    whole = with_large_scale(tmp_path / "whole")
    result = whole.train()
    for step in (2, 17):
        with monkeypatch.context() as patched:
            stop_before(patched, step)
            with pytest.raises(KeyboardInterrupt):
                with_large_scale(tmp_path / "cut", run={"resume": True}).train()
    cut = with_large_scale(tmp_path / "cut", run={"resume": True})
    again = cut.train()
    assert {k: again[k] for k in ("skipped", "clipped", "step", "top1")} == {
        k: result[k] for k in ("skipped", "clipped", "step", "top1")
    }
    assert cut.accelerator.scaler.state_dict() == whole.accelerator.scaler.state_dict()
    assert optimizer_steps(cut) == optimizer_steps(whole)
    for file in ("model", "model_ema"):
        a, b = (load_file(tmp_path / run / f"{file}.safetensors") for run in ("whole", "cut"))
        assert all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_steps_between_log_lines_do_not_wait_for_the_device(tmp_path, monkeypatch, precision):
    original, waited = ClassificationRun._train_step, []

    def watched(self, batches):
        if self.step < 2:  # kernels are loaded, states made
            return original(self, batches)
        torch.cuda.set_sync_debug_mode("error")
        try:
            original(self, batches)
            waited.append(False)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(ClassificationRun, "_train_step", watched)
    AcceleratorState._reset_state()
    sections = {"run": {"precision": precision}, "log": {"every": 5}, "optim": {"ema": 0.9, "grad_accum_steps": 2}}
    ClassificationRun(tiny(tmp_path, augment={"mixup": 0.2}, model={"mixer": "ahla"}, **sections)).train()
    assert len(waited) == 8


def distance(start, a, b):
    """The L2 distance of the weights of two runs, relative to what training changed."""
    start, a, b = (torch.cat([weights[k].double().flatten() for k in start]) for weights in (start, a, b))
    return float((a - b).norm() / (a - start).norm())


@pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="fewer than two GPUs: several processes are not checked on them"
)
# on CPUs, another order of summation: 6e-7 and 2e-4; an EMA that is one step off: 1e-2; unequal gradients: 0.3
@pytest.mark.parametrize(("precision", "bound"), [("fp32", 6e-6), ("fp16", 1e-3)])
def test_two_gpus_equal_two_parts_on_one(tmp_path, precision, bound):
    """With SGD, whose steps are linear in the gradients. Adam divides gradients by their own size: rounding of those
    near zero becomes any fraction of a step, and a wrong scale has no effect."""
    file = tmp_path / "run.yaml"
    more = {
        "schedule": {"epochs": 2},
        "model": {"mixer": "poly"},
        "optim": {"name": "sgd", "lr": 0.01, "clip_grad_norm": None, "ema": 0.9},
        "run": {"precision": precision},
    }
    file.write_text(yaml.safe_dump(config.merge(TINY, more)))
    runs = {
        "one": ((), GPUS[0], ["optim.grad_accum_steps=2"]),
        "two": (("-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"), ",".join(GPUS[:2]), []),
    }
    for name, (launcher, devices, words) in runs.items():
        words = [str(file), f"run.folder={tmp_path}/{name}", *words]
        status, _, err = run_tool("train_vit", *words, launcher=launcher, CUDA_VISIBLE_DEVICES=devices)
        assert status == 0, err
    one, two = (json.loads((tmp_path / name / "result.json").read_text()) for name in runs)
    assert two["images"] == 797 and two["top1"] == pytest.approx(one["top1"], abs=0.5)
    AcceleratorState._reset_state()
    start = {k: v.cpu() for k, v in ClassificationRun(tiny(tmp_path / "start", **more)).model.state_dict().items()}
    for weights in ("model", "model_ema"):
        assert distance(start, *(load_file(tmp_path / name / f"{weights}.safetensors") for name in runs)) < bound


@pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="fewer than two GPUs: sharded weights are not checked on them"
)
def test_sharded_weights_on_two_gpus_end_where_whole_ones_do(tmp_path):
    """As a user starts them, with the configuration for FSDP2 that lies in configs/accelerate."""
    file = tmp_path / "run.yaml"
    more = {"model": {"mixer": "ahla"}, "optim": {"ema": 0.9, "grad_accum_steps": 2}, "run": {"precision": "bf16"}}
    file.write_text(yaml.safe_dump(config.merge(TINY, more)))
    fsdp2 = ("--config_file", str(ROOT / "configs/accelerate/fsdp2.yaml"), "--main_process_port", "0")
    launchers = {
        "whole": ("-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"),
        "parts": ("-m", "accelerate.commands.launch", *fsdp2),
    }
    for name, launcher in launchers.items():
        words = [str(file), f"run.folder={tmp_path}/{name}"]
        status, _, err = run_tool("train_vit", *words, launcher=launcher, CUDA_VISIBLE_DEVICES=",".join(GPUS[:2]))
        assert status == 0, err
    for weights in ("model", "model_ema"):
        a, b = (load_file(tmp_path / name / f"{weights}.safetensors") for name in launchers)
        assert a.keys() == b.keys()
        assert max(float((a[k].double() - b[k].double()).abs().max()) for k in a) < 1e-5  # a step is 1e-3
