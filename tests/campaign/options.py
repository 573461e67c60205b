"""Random valid options of runs: the run finishes, killed and resumed it ends bit-identically, and its folder loads."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tests.campaign.harness import Case, call, kind, shown, shrink
from tests.campaign.runs import TOOL, Durable, counted, differences, start, write_config

TRIALS, CHANGES = 100, 5  # per kind of run; options changed in each
COMMON: dict[str, list[Any]] = {
    "optim.name": ["sgd", "lamb", "lion", "adamw", "nadamw", "adafactor", "rmsprop"],
    "optim.lr": [1e-5, 1e-2],
    "optim.weight_decay": [0.0, 0.5],
    "optim.betas": [[0.5, 0.6]],
    "optim.mixer_lr": [0.1, 10.0],
    "optim.attention_lr": [0.1, 10.0],
    "optim.clip": [None, 1e-3],
    "optim.accumulate": [2],
    "optim.ema": [0.0, 0.5, 0.999],
    "optim.ema_warmup": [False],
    "optim.anneal": [0.3, 0.9],
    "optim.ridge": [0.1],
    "run.seed": [1, 2**32 - 1],
    "run.precision": ["bf16"],
    "run.keep": [1, 7],
    "log.every": [3, 1000],
    "log.trackers": [["tensorboard"]],
    "data.workers": [1],
    "data.cache": [False],
    "data.hflip": [],
    "model.mixer": ["softmax", "la", "hla2", "ahla", "hla3", "poly", "mhla", "mhla2", "taylor2", "multipole"],
    "model.mixer_options": [{"gate": True}, {"depthwise": "v"}, {"gains": True}],
    "model.keep_softmax": [[0], "every:2"],
}
CHOICES: dict[str, dict[str, list[Any]]] = {
    "vit": COMMON
    | {
        "model.kwargs.drop_path_rate": [0.2],
        "model.kwargs.proj_drop_rate": [0.1],
        "model.kwargs.class_token": [True],
        "model.kwargs.init_values": [0.1],
        "model.kwargs.depth": [1, 3],
        "model.img_size": [12],
        "data.batch_size": [100, 250],
        "data.holdout": [100],
        "data.crop_pct": [0.9],
        "data.mean": [[0.1, 0.2, 0.3]],
        "data.std": [[0.1, 2.0, 5.0]],
        "augment.crop": ["resized", "none"],
        "augment.scale": [[0.5, 0.6]],
        "augment.pad": [0, 3],
        "augment.hflip": [0.0, 1.0],
        "augment.jitter": [0.3],
        "augment.auto": ["rand-m5-inc1", "augmix-m3-w2", "original"],
        "augment.erase": [0.5],
        "augment.mixup": [0.0, 1.0],
        "augment.cutmix": [1.0],
        "augment.mix_prob": [0.5],
        "augment.smoothing": [0.0, 0.5],
        "schedule.name": ["constant", "poly", "tanh", "wsd"],
        "schedule.epochs": [1, 3],
        "schedule.warmup_epochs": [0.5],
        "schedule.min_lr": [0.0],
        "optim.layer_decay": [0.5, 0.9],
        "run.eval_epochs": [2],
        "run.checkpoint_epochs": [2],
        "run.checkpoint_steps": [0, 1],
    },
    "dit": COMMON
    | {
        "model.kwargs.num_layers": [1, 3],
        "model.kwargs.patch_size": [1, 4],
        "model.checkpointing": [True],
        "data.batch_size": [10, 50],
        "data.hflip": [0.0, 1.0],
        "data.drop": [0.0, 1.0],
        "data.val_images": [7],
        "objective.kind": ["ddpm"],
        "objective.t_mean": [-2.0],
        "objective.t_std": [0.1],
        "objective.shift": [3.0],
        "schedule.name": ["cosine", "tanh"],
        "schedule.steps": [3, 9],
        "schedule.warmup_steps": [2],
        "sample.every": [0, 1],
        "sample.guidance": [1.0, 7.0],
        "run.eval_steps": [1, 100],
        "run.checkpoint_steps": [1, 100],
    },
}
CONFLICTS = (  # what the sentence holds when options that are valid alone exclude each other
    *("cache", "even number", "is for", "accumulate", "ema", "keep_softmax"),
    *("holdout", "grid", "class token", "blocks", "depthwise", "gains", "gate", "anneal"),
)


def cases(folder: Path, seed: int, seconds: float) -> list[Case]:
    """Random choices for both kinds of runs."""
    rng = random.Random(seed)
    found = []
    for name, choices in CHOICES.items():
        keys = [key for key, values in choices.items() if values]
        for number in range(TRIALS):
            changes = {key: rng.choice(choices[key]) for key in rng.sample(keys, CHANGES)}
            found.append(trial(name, number, changes, rng.random()))
    return found


def trial(name: str, number: int, changes: dict[str, Any], stop: float) -> Case:
    """One choice; the second run is killed after the part `stop` of its durable operations."""

    def reduce(place: Path, first: str) -> str:
        tries = iter(range(10**6))

        def fails(items: list[tuple[str, Any]]) -> bool:
            where = place / str(next(tries))
            where.mkdir()
            return kind(attempt(name, dict(items), stop, where)) == kind(first)

        return described(name, dict(shrink(list(changes.items()), fails)))

    return Case(f"{name} {number}", lambda place: attempt(name, changes, stop, place), described(name, changes), reduce)


def described(name: str, changes: dict[str, Any]) -> str:
    """The command line of a choice."""
    return shown(TOOL[name], [f"{name}.yaml", *(f"{key}={json.dumps(value)}" for key, value in changes.items())])


def attempt(name: str, changes: dict[str, Any], stop: float, place: Path) -> str:
    """The complaint about runs with these changes."""
    tree: dict[str, Any] = {}
    for key, value in changes.items():
        *sections, last = key.split(".")
        inner = tree
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[last] = value
    file = write_config(name, place / "run.yaml", tree)
    whole, killed = place / "whole", place / "killed"
    result, operations = counted(name, file, whole)
    if result.code == 2 and any(word in result.err for word in CONFLICTS):
        return ""
    if result.code:
        return f"exit {result.code}: {result.err[-400:]}"
    kill_at = max(1, round(stop * operations))
    result = start(name, file, killed, before=Durable(killed, kill_at).install)
    if result.code not in (0, 137):
        return f"before the kill exit {result.code}: {result.err[-300:]}"
    result = start(name, file, killed)
    if result.code:
        return f"not resumed after operation {kill_at}, exit {result.code}: {result.err[-300:]}"
    if found := list(differences(whole, killed)):
        return f"resumed after operation {kill_at}: {'; '.join(found)}"
    return loads(name, place)


def loads(name: str, place: Path) -> str:
    """The complaint when the folder of a finished run cannot be read by the next tool."""
    if name == "vit":
        words = ["data.source=digits", "data.workers=0", "eval.models=[whole]", "out=out"]
        result = call("evaluate_imagenet", words, cwd=place)
    else:
        words = ["sample.model=whole/transformer", "sample.count=2", "sample.steps=2", "out=out.npz"]
        result = call("sample", words, cwd=place)
    return f"not loaded, exit {result.code}: {result.err[-300:]}" if result.code else ""
