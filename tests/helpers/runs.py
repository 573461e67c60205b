"""Tiny runs for the tests of training, evaluation and tools, in this process or as a user starts them."""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from zoo import config
from zoo.train.classification import ClassificationRun
from zoo.train.metrics_log import read_rows
from zoo.train.settings import TrainSettings

ROOT = Path(__file__).resolve().parents[2]
# keys of metrics that depend on the machine, not on the run
MEASURED = ("images_per_second", "seconds_per_step", "seconds", "peak_mib")
TINY = {  # a ViT of 16 tokens that learns a little in a second
    "model": {
        "name": "vit_tiny_patch16_224",
        "img_size": 8,
        "kwargs": {
            "patch_size": 2,
            "embed_dim": 16,
            "depth": 2,
            "num_heads": 2,
            "global_pool": "avg",
            "class_token": False,
        },
    },
    "data": {"source": "digits", "batch_size": 100, "workers": 0, "cache": True, "crop_pct": 1.0},
    "augment": {"crop": "padded", "pad": 1, "hflip": 0.0},
    "schedule": {"epochs": 1},
    "log": {"every": 1},
}


def tiny(folder: Path, **sections: dict[str, Any]) -> TrainSettings:
    """The settings of a tiny run in `folder` with some keys changed."""
    return config.from_tree(TrainSettings, config.merge(config.merge(TINY, {"run": {"folder": str(folder)}}), sections))


def start_tool(name: str, *words: str, launcher: tuple[str, ...] = (), **env: str) -> subprocess.Popen:
    """A tool in its own process with the packages of this one, one thread, without a GPU."""
    places = [str(ROOT), str(ROOT / "kernels"), *filter(None, sys.path)]
    fixed = {"PYTHONPATH": os.pathsep.join(places), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *launcher, str(ROOT / "tools" / f"{name}.py"), *words]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env={**os.environ, **fixed, **env}, stdout=pipe, stderr=pipe, text=True)


def run_tool(name: str, *words: str, **kwargs: Any) -> tuple[int, str, str]:
    """(exit status, standard output, standard error) of a tool."""
    process = start_tool(name, *words, **kwargs)
    out, err = process.communicate(timeout=900)
    return process.returncode, out, err


def wait_for_step(run: Path, step: int, process: subprocess.Popen) -> None:
    """Until the log of a run that another process writes has this step."""
    deadline = time.monotonic() + 600
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(ValueError):  # the file is being replaced
            if any(row["step"] >= step for row in read_rows(run / "metrics.jsonl")):
                return
        time.sleep(0.005)
    pytest.fail(f"the run never reached step {step}: {process.communicate()}")


def stop_before(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Make runs of image classifiers fail before this step, counted from 0."""
    original = ClassificationRun._train_step

    def limited(self, batches):
        if self.step == step:
            raise KeyboardInterrupt
        original(self, batches)

    monkeypatch.setattr(ClassificationRun, "_train_step", limited)
