"""Checkpoints of a run: complete or absent, never half-written, and compared with what was written when they are read.

A checkpoint is a folder `step-00001234` with model.safetensors, ema.safetensors (if there is an average), state.pt
(optimiser, gradient scaler, counters; tensors and plain values only) and manifest.json. It is written under another
name and renamed at the end.
"""

import re
from pathlib import Path
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn

from zoo.errors import DamagedCheckpoint
from zoo.files import remove, replacing, sync
from zoo.models.timm.model_files import WEIGHTS, load_strict, read_weights, save_tensors
from zoo.train.checkpoint_manifest import FORMAT, MANIFEST, check_manifest, write_manifest
from zoo.train.sharding import spread

EMA_WEIGHTS = "ema.safetensors"
STATE = "state.pt"
ASIDE = "aside-"  # in the names of checkpoints from which no run continues
STATE_TYPES: dict[str, Any] = {
    "optimizer": dict,
    "scaler": (dict, NoneType),
    "step": int,
    "seconds": (int, float),
    "counts": dict,
    "meters": dict,
    "bad": list,
}
COUNTS = {"skipped", "skipped_in_a_row", "clipped"}


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
    prune(folder, keep)
    final, temporary = folder / f"step-{step:08d}", folder / f"writing-{step:08d}"
    temporary.mkdir()
    header = {**header, "step": str(step)}
    save_tensors(weights, header, temporary / WEIGHTS)
    if average is not None:
        save_tensors(average, header, temporary / EMA_WEIGHTS)
    with replacing(temporary / STATE) as file, file.open("wb") as opened:  # whose errors torch.save passes on
        torch.save({"format": FORMAT, **state}, opened)
    write_manifest(temporary, step)
    if final.exists():
        remove(final)
    temporary.rename(final)
    sync(folder)
    prune(folder, keep)
    return final


def prune(folder: Path, keep: int) -> None:
    """Delete all checkpoints but the newest `keep`, and what killed runs were writing or deleting."""
    for old in list_checkpoints(folder)[:-keep]:
        old.rename(old.with_name(f"writing-{old.name}"))  # so that it never counts without all of its files
    for left in folder.glob("writing-*"):
        remove(left)


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, oldest first."""
    found = [p for p in folder.glob("step-*") if re.fullmatch(r"step-\d{8,}", p.name)]
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    """The number of steps that were done when a checkpoint was written."""
    return int(checkpoint.name.removeprefix("step-"))


def choose_checkpoint(folder: Path, resume: bool | int) -> Path | None:
    """The checkpoint in `folder` to continue from: of the step `resume`, or for True the newest; None for a run that
    begins. Raises ValueError when that step has none."""
    found = list_checkpoints(folder)
    if isinstance(resume, bool):
        return found[-1] if found else None
    chosen = next((path for path in found if step_of(path) == resume), None)
    if chosen is None:
        steps = ", ".join(str(step_of(path)) for path in found) or "no step"
        raise ValueError(f"run.resume={resume}: {folder} has no checkpoint of that step; it has those of {steps}")
    return chosen


def set_aside(checkpoint: Path) -> list[Path]:
    """Rename the checkpoints that are newer than this one, so that nothing continues from them or counts them. Returns
    their new paths; what was set aside under the same name before is deleted."""
    newer = [p for p in list_checkpoints(checkpoint.parent) if step_of(p) > step_of(checkpoint)]
    renamed = [path.with_name(ASIDE + path.name) for path in newer]
    for path, name in zip(newer, renamed, strict=True):
        if name.exists():
            remove(name)
        path.rename(name)
    return renamed


def load_checkpoint(path: Path, models: list[nn.Module]) -> dict[str, Any]:
    """Fill a model, and the average of its weights if there is a second one, from a checkpoint and return its state.
    Raises DamagedCheckpoint, and ValueError for weights that do not fit the model."""
    weights, state = read_checkpoint(path, [WEIGHTS, EMA_WEIGHTS][: len(models)])
    for model, found in zip(models, weights.values(), strict=True):
        own = model.state_dict()
        load_strict(model, {k: spread(v, own.get(k)) for k, v in found.items()}, str(path))
    return state


def read_checkpoint(path: Path, names: list[str]) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """({file: weights}, state) of a checkpoint. Raises DamagedCheckpoint when a file is missing, not as it was written,
    or of another step."""
    complete = check_manifest(path, step_of(path))
    state = _read_state(path)
    if state.get("format") is not None and not complete:
        raise DamagedCheckpoint(f"the checkpoint {path} is damaged: {MANIFEST} is missing")
    _check_state(path, state)
    weights = {}
    for name in names:
        try:
            weights[name] = read_weights(path / name)
        except ValueError as error:
            raise DamagedCheckpoint(str(error)) from error
    return weights, state


def way_out(path: Path) -> str:
    """What to do when a checkpoint is damaged: the newest intact one before it, or that there is none."""
    for older in reversed(list_checkpoints(path.parent)):
        if step_of(older) >= step_of(path):
            continue
        names = [name for name in (WEIGHTS, EMA_WEIGHTS) if (older / name).exists()]
        try:
            read_checkpoint(older, names)
        except DamagedCheckpoint:
            continue
        step = step_of(older)
        return f"run.resume={step} continues from the newest intact one before it, and sets newer ones aside"
    return "no other checkpoint before it is intact: choose another run.folder to begin anew"


def _read_state(path: Path) -> dict[str, Any]:
    try:
        state = torch.load(path / STATE, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged archives and pickles raise whatever their bytes lead to
        reason = "is missing" if isinstance(error, FileNotFoundError) else "is truncated or damaged"
        raise DamagedCheckpoint(f"the checkpoint {path} is damaged: {STATE} {reason}") from error
    if not isinstance(state, dict):
        raise DamagedCheckpoint(f"the checkpoint {path} is damaged: {STATE} holds a {type(state).__name__}, no dict")
    return state


def _check_state(path: Path, state: dict[str, Any]) -> None:
    """Raise DamagedCheckpoint unless `state` has what `save_checkpoint` was given, of the right types."""
    wrong = [k for k, kind in STATE_TYPES.items() if k not in state or not _is(state[k], kind)]
    if not wrong:
        wrong += ["counts"] * (
            state["counts"].keys() != COUNTS or not all(_is(v, int) for v in state["counts"].values())
        )
        sums = state["meters"].values()
        wrong += ["meters"] * (not all(_is(v, list) and [_is(x, (int, float)) for x in v] == [True] * 2 for v in sums))
        wrong += ["bad"] * (not all(_is(v, int) for v in state["bad"]))
    if wrong:
        raise DamagedCheckpoint(f"the checkpoint {path} is damaged: {STATE} has no {wrong[0]!r}, or a wrong one")
    if state["step"] != step_of(path):
        raise DamagedCheckpoint(f"the checkpoint {path} is damaged: {STATE} is of step {state['step']}")


def _is(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)
