"""Random valid options of runs: the run finishes, killed and resumed it ends bit-identically, and its folder loads."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import yaml

from tests.campaign.harness import TABLES, Case, call, shown, shrink
from tests.campaign.runs import TOOL, Durable, counted, resume, start, write_config

TRIALS, CHANGES = 100, 5  # per kind of run; options changed in each
TABLE = yaml.safe_load((TABLES / "options.yaml").read_text())
LOADS = {  # tool and words that read the folder of a finished run
    "vit": ("evaluate_imagenet", "data.source=digits data.workers=0 eval.models=[whole] out=out"),
    "dit": ("sample", "sample.model=whole/transformer sample.count=2 sample.steps=2 out=out.npz"),
}
Changes = list[tuple[str, Any]]


def cases(folder: Path, seed: int) -> list[Case]:
    """Random choices for both kinds of runs; the second run of each is killed after a part of its operations."""
    rng, found = random.Random(seed), []
    for kind in TOOL:
        choices = TABLE["both"] | TABLE[kind]
        for number in range(TRIALS):
            changes = [(key, rng.choice(choices[key])) for key in rng.sample(sorted(choices), CHANGES)]
            found.append(trial(kind, number, changes, rng.random()))
    return found


def trial(kind: str, number: int, changes: Changes, stop: float) -> Case:
    """One choice."""

    def command(these: Changes) -> str:
        return shown(TOOL[kind], [f"{kind}.yaml", *(f"{key}={json.dumps(value)}" for key, value in these)])

    def check(these: Changes, place: Path) -> str:
        return attempt(kind, these, stop, place)

    return Case(
        f"{kind} {number}", lambda place: check(changes, place), command(changes),
        lambda place, complaint: command(shrink(changes, complaint, place, check)),
    )  # fmt: skip


def attempt(kind: str, changes: Changes, stop: float, place: Path) -> str:
    """The complaint about runs with these changes."""
    tree: dict[str, Any] = {}
    for key, value in changes:
        *sections, last = key.split(".")
        inner = tree
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[last] = value
    file = write_config(kind, place / "run.yaml", tree)
    whole, killed = place / "whole", place / "killed"
    result, operations = counted(kind, file, whole)
    if result.code == 2 and any(word in result.err for word in TABLE["conflicts"]):
        return ""
    if result.code:
        return f"exit {result.code}: {result.err[-400:]}"
    kill_at = max(1, round(stop * operations))
    result = start(kind, file, killed, before=Durable(killed, kill_at).install)
    if result.code not in (0, 137):
        return f"before the kill exit {result.code}: {result.err[-300:]}"
    if complaint := resume(kind, file, killed, whole):
        return f"after a kill at operation {kill_at}: {complaint}"
    tool, words = LOADS[kind]
    result = call(tool, words.split(), cwd=place)
    return f"not loaded, exit {result.code}: {result.err[-300:]}" if result.code else ""
