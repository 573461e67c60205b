"""Checkpoints of a run, written atomically and verified by hash when read.

A checkpoint is a folder `step-00001234`. It is written under another name and renamed at the end. Its files:
    model.safetensors: weights
    ema.safetensors: weights of the EMA, if there is one
    state.pt: optimizer, gradient scaler and counters; tensors and plain values only
    manifest.json: the step, and the SHA-256 of every other file
"""

import hashlib
import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import NoneType
from typing import Any, NotRequired, TypedDict, cast

import torch
from torch import Tensor, nn

from zoo.config import Tree
from zoo.errors import DamagedCheckpoint
from zoo.files import remove, replacing, sync
from zoo.io import write_json
from zoo.models.timm.model_files import WEIGHTS, load_strict, read_weights, save_tensors
from zoo.train.distributed import shard_like
from zoo.train.update import Counts, State

EMA_FILE = "ema.safetensors"
STATE = "state.pt"
MANIFEST = "manifest.json"
MANIFEST_FORMAT = 1  # version of the format; earlier versions of this package wrote no manifest
ASIDE = "aside-"  # prefix of checkpoints that were set aside: no run resumes from them

Weights = dict[str, Tensor]


class RunState(TypedDict):
    """Content of state.pt."""

    optimizer: State
    scaler: State | None
    step: int
    seconds: float  # time of training, validation and checkpoints so far
    counts: Counts
    meters: dict[str, list[float]]  # name -> [sum, count] of the losses since the last row of the metrics
    bad: list[int]  # numbers of unreadable images
    settings: NotRequired[Tree]  # absent in checkpoints of earlier versions


STATE_TYPES: dict[str, type | tuple[type, ...]] = {
    "optimizer": dict,
    "scaler": (dict, NoneType),
    "step": int,
    "seconds": (int, float),
    "counts": dict,
    "meters": dict,
    "bad": list,
}


# Writing


def save_checkpoint(
    folder: Path,
    weights: Weights,
    average: Weights | None,
    header: dict[str, str],
    state: RunState,
    keep: int,
) -> Path:
    """Write the checkpoint of the step in `state` into `folder` and delete all but the newest `keep`. Returns its path.

    weights, average: full state dicts of the model and of its EMA.  header: metadata of the safetensors files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    prune(folder, keep)
    step = state["step"]
    final, temporary = folder / f"step-{step:08d}", folder / f"writing-{step:08d}"
    temporary.mkdir()
    header = {**header, "step": str(step)}
    save_tensors(weights, header, temporary / WEIGHTS)
    if average is not None:
        save_tensors(average, header, temporary / EMA_FILE)
    with replacing(temporary / STATE) as file, file.open("wb") as opened:  # given a path, torch.save hides the errno
        torch.save({"format": MANIFEST_FORMAT, **state}, opened)
    write_manifest(temporary, step)
    if final.exists():
        remove(final)
    temporary.rename(final)
    sync(folder)
    prune(folder, keep)
    return final


def prune(folder: Path, keep: int) -> None:
    """Delete all checkpoints but the newest `keep`, and incomplete ones, which killed runs were writing or deleting."""
    for old in list_checkpoints(folder)[:-keep]:
        old.rename(old.with_name(f"writing-{old.name}"))  # so that a half-deleted checkpoint is never listed
    for left in folder.glob("writing-*"):
        remove(left)


def set_aside(checkpoint: Path) -> list[Path]:
    """Rename the checkpoints that are newer than this one, so that no run resumes from them. A checkpoint that was set
    aside earlier under the same name is deleted. Returns the new paths."""
    newer = [p for p in list_checkpoints(checkpoint.parent) if step_of(p) > step_of(checkpoint)]
    renamed = [path.with_name(ASIDE + path.name) for path in newer]
    for path, name in zip(newer, renamed, strict=True):
        if name.exists():
            remove(name)
        path.rename(name)
    return renamed


# Finding


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in `folder`, oldest first."""
    found = [p for p in folder.glob("step-*") if re.fullmatch(r"step-\d{8,}", p.name)]
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    """Return the step of a checkpoint: the number of optimizer steps done when it was written."""
    return int(checkpoint.name.removeprefix("step-"))


def choose_checkpoint(folder: Path, resume: bool | int) -> Path | None:
    """Return the checkpoint in `folder` to resume from: the one of step `resume`, or the newest if `resume` is a
    bool. None if there is no checkpoint. Raises ValueError if there is none of step `resume`."""
    found = list_checkpoints(folder)
    if isinstance(resume, bool):
        return found[-1] if found else None
    chosen = next((path for path in found if step_of(path) == resume), None)
    if chosen is None:
        steps = ", ".join(str(step_of(path)) for path in found) or "none"
        raise ValueError(f"run.resume={resume}: {folder} has no checkpoint of that step; steps with one: {steps}")
    return chosen


def advice(path: Path) -> str:
    """Return advice for a damaged checkpoint, as text: resume from the newest intact one before it, or begin a new
    run."""
    for older in reversed(list_checkpoints(path.parent)):
        if step_of(older) >= step_of(path):
            continue
        names = [name for name in (WEIGHTS, EMA_FILE) if (older / name).exists()]
        try:
            read_checkpoint(older, names)
        except DamagedCheckpoint:
            continue
        step = step_of(older)
        return f"run.resume={step} continues from the newest intact one before it, and sets newer ones aside"
    return "no other checkpoint before it is intact: choose another run.folder to begin anew"


# Reading


def load_checkpoint(path: Path, models: list[nn.Module]) -> RunState:
    """Load the weights of a checkpoint into a model, and into its EMA if there is a second model. Returns the state.

    Raises DamagedCheckpoint, and ValueError for weights that do not fit the model.
    """
    weights, state = read_checkpoint(path, [WEIGHTS, EMA_FILE][: len(models)])
    for model, found in zip(models, weights.values(), strict=True):
        own = model.state_dict()
        load_strict(model, {k: shard_like(v, own.get(k)) for k, v in found.items()}, str(path))
    return state


def read_checkpoint(path: Path, names: list[str]) -> tuple[dict[str, Weights], RunState]:
    """Read a checkpoint: (weights by file name, state). Raises DamagedCheckpoint if a file is missing, has changed, or
    belongs to another step."""
    complete = check_manifest(path, step_of(path))
    state = _read_state(path)
    if state.get("format") is not None and not complete:
        raise _damaged(path, f"{MANIFEST} is missing")
    _check_state(path, state)
    weights = {}
    for name in names:
        try:
            weights[name] = read_weights(path / name)
        except ValueError as error:
            raise DamagedCheckpoint(str(error)) from error
    return weights, cast(RunState, state)


def _damaged(path: Path, reason: str) -> DamagedCheckpoint:
    return DamagedCheckpoint(f"the checkpoint {path} is damaged: {reason}")


def _read_state(path: Path) -> dict[str, Any]:
    try:
        state = torch.load(path / STATE, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged archive or pickle raises errors of many classes
        reason = "is missing" if isinstance(error, FileNotFoundError) else "is truncated or damaged"
        raise _damaged(path, f"{STATE} {reason}") from error
    if not isinstance(state, dict):
        raise _damaged(path, f"{STATE} holds a {type(state).__name__}, no dict")
    return state


def _check_state(path: Path, state: dict[str, Any]) -> None:
    """Raise DamagedCheckpoint unless `state` is a `RunState`."""
    wrong = [k for k, kind in STATE_TYPES.items() if k not in state or not _is(state[k], kind)]
    if not wrong:
        counts, sums = state["counts"], state["meters"].values()
        right = counts.keys() == Counts.__annotations__.keys() and all(_is(v, int) for v in counts.values())
        wrong += ["counts"] * (not right)
        wrong += ["meters"] * (not all(_is(v, list) and [_is(x, (int, float)) for x in v] == [True] * 2 for v in sums))
        wrong += ["bad"] * (not all(_is(v, int) for v in state["bad"]))
    if wrong:
        raise _damaged(path, f"{STATE} has no {wrong[0]!r}, or a wrong one")
    if state["step"] != step_of(path):
        raise _damaged(path, f"{STATE} is of step {state['step']}")


def _is(value: object, kind: type | tuple[type, ...]) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


# The manifest


def write_manifest(folder: Path, step: int) -> None:
    """Write the manifest of a checkpoint, after all other files."""
    digests = _digests(sorted(folder.iterdir()))
    write_json({"format": MANIFEST_FORMAT, "step": step, "sha256": digests}, folder / MANIFEST)


def check_manifest(folder: Path, step: int) -> bool:
    """Compare the files of a checkpoint with its manifest. Returns False if there is no manifest. Raises
    DamagedCheckpoint for a file that is missing, unknown or changed, and for a manifest of another step."""
    file = folder / MANIFEST
    if not file.is_file():
        return False
    try:
        content = json.loads(file.read_text())
    except ValueError as error:
        raise _damaged(folder, f"{MANIFEST} is no JSON") from error
    known = isinstance(content, dict) and content.get("format") == MANIFEST_FORMAT
    if not known or not isinstance(content.get("sha256"), dict):
        raise _damaged(folder, f"{MANIFEST} is of no known format")
    if content.get("step") != step:
        raise _damaged(folder, f"its {MANIFEST} is of step {content.get('step')}")
    written = content["sha256"]
    there = {path.name: path for path in sorted(folder.iterdir()) if path.name != MANIFEST and path.name[0] != "."}
    for name in written.keys() - there.keys():
        raise _damaged(folder, f"{name} is missing")
    for name in there.keys() - written.keys():
        raise _damaged(folder, f"{name} is not in its {MANIFEST}")
    for name, digest in _digests(list(there.values())).items():
        if digest != written[name]:
            raise _damaged(folder, f"{name} is truncated or damaged, or of another checkpoint")
    return True


def _digests(files: list[Path]) -> dict[str, str]:
    """Return the SHA-256 of each file, in hexadecimal, by file name."""
    with ThreadPoolExecutor() as pool:  # hashing releases the GIL
        return dict(zip([file.name for file in files], pool.map(_digest, files), strict=True))


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
