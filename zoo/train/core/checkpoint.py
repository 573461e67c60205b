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
from torch import Tensor, nn

from zoo import config
from zoo.train.core.sharding import spread
from zoo.train.model import WEIGHTS, fill, read_weights, save_tensors
from zoo.train.settings import CHANGEABLE

EMA_WEIGHTS = "ema.safetensors"
STATE = "state.pt"
CONFIG = "config.yaml"


def check_folder(settings: Any) -> None:
    """Raise ValueError when `run.folder` holds a run and `run.resume` is not set, or one with another
    configuration."""
    folder = Path(settings.run.folder)
    file = folder / CONFIG
    if not file.exists() and last_checkpoint(settings):
        raise ValueError(f"{folder} holds checkpoints but no {CONFIG}: choose another run.folder")
    if not file.exists():
        return
    if not settings.run.resume:
        raise ValueError(
            f"{folder} already holds a run; set run.resume=true to continue it or choose another run.folder"
        )
    changed = config.differences(config.load(type(settings), file), settings, ignore=CHANGEABLE)
    if changed:
        raise ValueError(f"{folder} holds a run with another configuration; they differ in {', '.join(changed)}")


def begin_folder(settings: Any) -> None:
    """Write the configuration of a new run, once everything it names was found."""
    file = Path(settings.run.folder) / CONFIG
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        config.save(settings, file)


def last_checkpoint(settings: Any) -> Path | None:
    """The newest checkpoint to continue from, or None for a run that begins."""
    found = list_checkpoints(Path(settings.run.folder) / "checkpoints")
    return found[-1] if found else None


def save_checkpoint(
    folder: Path,
    step: int,
    weights: dict[str, Tensor],
    average: dict[str, Tensor] | None,
    header: dict[str, str],
    state: dict[str, Any],
    keep: int,
) -> Path:
    """Write the checkpoint of a step into `folder` and delete all but the newest `keep`. Returns its path.

    weights, average: the state dicts of the model and of its average, whole.  header: of the files of weights.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob("writing-*"):  # by a run that was killed
        shutil.rmtree(left)
    final = folder / f"step-{step:08d}"
    temporary = Path(tempfile.mkdtemp(prefix="writing-", dir=folder))
    temporary.chmod(0o755)  # mkdtemp makes it private
    save_tensors(weights, header, temporary / WEIGHTS)
    if average is not None:
        save_tensors(average, header, temporary / EMA_WEIGHTS)
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
    for part, name in ((model, WEIGHTS), (ema, EMA_WEIGHTS)):
        if part is not None:
            weights, own = read_weights(path / name), part.state_dict()
            fill(part, {k: spread(v, own.get(k)) for k, v in weights.items()}, str(path))
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
