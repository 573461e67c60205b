"""Two tiny runs (a ViT that classifies, a DiT that draws): their settings, results, and comparison bit by bit."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file

from tests.campaign.harness import TOOLS, Result, call
from zoo.config import merge
from zoo.timer import MEASURED
from zoo.train.metrics_log import read_rows

Tree = dict[str, Any]
SIZES = {"patch_size": 2, "embed_dim": 16, "depth": 2, "num_heads": 2, "global_pool": "avg", "class_token": False}
RUNS: dict[str, Tree] = {
    "vit": {
        "model": {"name": "vit_tiny_patch16_224", "img_size": 8, "mixer": "ahla", "kwargs": SIZES},
        "data": {"source": "digits", "batch_size": 200, "workers": 0, "cache": True, "crop_pct": 1.0},
        "augment": {"crop": "padded", "pad": 1, "hflip": 0.5, "mixup": 0.4},
        "optim": {"ema": 0.9},
        "schedule": {"epochs": 2},
        "run": {"checkpoint_steps": 2},
        "log": {"every": 1},
    },
    "dit": {
        "model": {"kwargs": {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 8, "patch_size": 2}},
        "data": {"source": "digits", "img_size": 8, "batch_size": 20, "workers": 0, "cache": True, "val_images": 40},
        "optim": {"ema": 0.9},
        "schedule": {"steps": 8},
        "sample": {"every": 4, "count": 4, "steps": 2},
        "run": {"eval_steps": 4, "checkpoint_steps": 2},
        "log": {"every": 1},
    },
}
TRACKED = "hla-zoo/"  # of trackers, whose files are named by time
TOOL = {"vit": "train_vit", "dit": "finetune_dit"}
EVENTS = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate"}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def write_config(kind: str, file: Path, changes: Tree | None = None) -> Path:
    """The settings of a run as YAML."""
    file.write_text(yaml.safe_dump(merge(RUNS[kind], changes or {})))
    return file


def command(kind: str, file: Path, folder: Path) -> list[str]:
    """The words that start the run of `file` in `folder`, or continue it."""
    return [str(file), f"run.folder={folder}", "run.resume=true"]


def start(kind: str, file: Path, folder: Path, **options: Any) -> Result:
    """Start or continue a run in a forked child."""
    return call(TOOL[kind], command(kind, file, folder), cwd=folder.parent, **options)


@dataclass
class Durable:
    """Counts what a run does to the files of its folder, and kills the process before number `kill_at` (from 1).

    An operation is whatever opens for writing, renames, removes, makes or syncs; a file of weights or of state counts
    twice, untouched and torn in half.
    """

    folder: Path
    kill_at: int = 0
    count: int = 0

    def install(self) -> None:
        """Watch this process; for a child only, since audit hooks stay."""
        import safetensors.torch

        sys.addaudithook(self._hear)
        os.fsync = self._wrapped(os.fsync)
        torch.save = self._torn(torch.save, 1)
        safetensors.torch.serialize_file = self._torn(safetensors.torch.serialize_file, 1)  # type: ignore[attr-defined]

    def _tick(self) -> bool:
        self.count += 1
        return self.count == self.kill_at

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            ours = isinstance(args[2], int) and bool(args[2] & WRITING) and str(self.folder) in str(args[0])
        else:
            relative = event in ("os.remove", "os.rmdir") and args[1] not in (-1, None)  # of shutil.rmtree
            ours = event in EVENTS and (relative or str(self.folder) in str(args[0]))
        if ours and self._tick():
            os.kill(os.getpid(), signal.SIGKILL)

    def _wrapped(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._tick():
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return call

    def _torn(self, function: Callable[..., Any], position: int) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            found = self._wrapped(function)(*args, **kwargs)
            if self._tick():
                given = args[position]
                file = Path(given.name if hasattr(given, "write") else given)  # torch.save is given an open file
                os.truncate(file, file.stat().st_size // 2)
                os.kill(os.getpid(), signal.SIGKILL)
            return found

        return call


def counted(kind: str, file: Path, folder: Path) -> tuple[Result, int]:
    """A whole run and the number of its durable operations."""
    import runpy

    from tests.campaign.harness import fork

    durable, number = Durable(folder), folder.parent / f"{folder.name}.events"

    def action() -> None:
        sys.argv = [str(TOOLS / f"{TOOL[kind]}.py"), *command(kind, file, folder)]
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        finally:
            number.write_text(str(durable.count))

    result = fork(action, cwd=folder.parent, before=durable.install)
    return result, int(number.read_text())


def differences(whole: Path, other: Path) -> Iterator[str]:
    """What of the result of two runs is not the same, bit for bit: final weights, pictures, record, names of files."""
    names = [{str(p.relative_to(run)) for p in run.rglob("*") if p.is_file()} for run in (whole, other)]
    names = [{name for name in found if not name.startswith(TRACKED)} for found in names]
    if names[0] != names[1]:
        yield f"files: missing {sorted(names[0] - names[1])[:3]}, left over {sorted(names[1] - names[0])[:3]}"
    for name in sorted(names[0] & names[1]):
        if name.endswith(".safetensors"):
            one, two = load_file(whole / name), load_file(other / name)
            same = one.keys() == two.keys() and all(same_bits(one[k], two[k]) for k in one)
        elif name.endswith(".png") and "curves" not in name:
            same = (whole / name).read_bytes() == (other / name).read_bytes()
        else:
            continue
        if not same:
            yield f"{name} differs"
    if rows(whole) != rows(other):
        yield "metrics.jsonl differs"
    if result(whole) != result(other):
        yield "result.json differs"


def same_bits(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether two tensors hold the same bytes."""
    return one.dtype == two.dtype and torch.equal(one.view(torch.uint8), two.view(torch.uint8))


def rows(folder: Path) -> list[Tree]:
    """The record without measured times; a kill may come between a checkpoint and its row."""
    found = [row for row in read_rows(folder / "metrics.jsonl") if row["kind"] != "checkpoint"]
    return [{k: v for k, v in row.items() if k not in MEASURED} for row in found]


def result(folder: Path) -> Tree:
    """result.json without measured times."""
    found = json.loads((folder / "result.json").read_text())
    return {k: v for k, v in found.items() if k not in MEASURED}
