"""Checkpoints of a run: complete or absent, never half-written.

A checkpoint is a folder `step-00001234` with model.safetensors, ema.safetensors (if there is an average) and state.pt
(optimiser, gradient scaler, counters; tensors and plain values only). It is written under another name and renamed at
the end.
"""

import os
import re
import shutil
import tempfile
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import nn

from zoo.train.model import WEIGHTS, Recipe, fill, read_weights, save_weights

EMA_WEIGHTS = "ema.safetensors"
STATE = "state.pt"


def save_checkpoint(
    folder: Path, step: int, model: nn.Module, ema: nn.Module | None, recipe: Recipe, state: dict[str, Any], keep: int
) -> Path:
    """Write the checkpoint of a step into `folder` and delete all but the newest `keep`. Returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob("writing-*"):  # by a run that was killed
        shutil.rmtree(left)
    final = folder / f"step-{step:08d}"
    temporary = Path(tempfile.mkdtemp(prefix="writing-", dir=folder))
    temporary.chmod(0o755)  # mkdtemp makes it private
    save_weights(model, recipe, temporary / WEIGHTS)
    if ema is not None:
        save_weights(ema, recipe, temporary / EMA_WEIGHTS)
    torch.save(state, temporary / STATE)
    for file in temporary.iterdir():
        _sync(file)
    if final.exists():
        shutil.rmtree(final)
    os.replace(temporary, final)
    for old in list_checkpoints(folder)[:-keep]:
        shutil.rmtree(old)
    return final


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, oldest first."""
    found = [p for p in folder.glob("step-*") if re.fullmatch(r"step-\d{8,}", p.name)]
    return sorted(found, key=lambda p: int(p.name.removeprefix("step-")))


def load_checkpoint(path: Path, model: nn.Module, ema: nn.Module | None) -> dict[str, Any]:
    """Fill `model` and `ema` from a checkpoint and return its state. Raises ValueError when a file is missing or
    truncated."""
    fill(model, read_weights(path / WEIGHTS), str(path))
    if ema is not None:
        fill(ema, read_weights(path / EMA_WEIGHTS), str(path))
    file = path / STATE
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, UnpicklingError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f"the checkpoint {file} is truncated or damaged ({reason}); delete {path} to continue from the one before"
        ) from error


def _sync(file: Path) -> None:
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
