"""Attacks on runs: random valid options, kills and signals, and limits of file sizes. Runs resume bit for bit."""

from __future__ import annotations

import json
import random
import resource
import signal
from pathlib import Path
from typing import Any

import yaml

from tests.campaign.harness import TABLES, Case, call, judge, shown, shrink, succeed
from tests.campaign.runs import TOOL, Durable, counted, files_below, resume, same_file, start, whole_run, write_config

TRIALS, CHANGES = 100, 5  # random choices per kind of run; options changed in each
OPTIONS = yaml.safe_load((TABLES / "options.yaml").read_text())
LOADS = {  # tool and words that read the folder of a finished run
    "vit": ("evaluate_imagenet", "data.source=digits data.workers=0 eval.models=[whole] out=out"),
    "dit": ("sample", "sample.model=whole/transformer sample.count=2 sample.steps=2 out=out.npz"),
}
TIMES, INTERRUPTS = 20, 6  # random kills and signals per run
TWICE = 0.3  # fraction of the kills after which the resumed run is killed, too
SIGNALS = {signal.SIGKILL: 137, signal.SIGTERM: 143, signal.SIGINT: 130}  # and the exit code that a shell expects
SIZES = 20  # file size limits per command
SOFTMAX = {"vit": {"model": {"mixer": ""}}}  # a classifier that can be converted
WRITERS = {  # other tools that write files
    "sample": "sample.model={f}/dit/transformer_ema sample.count=40 sample.steps=1 sample.batch_size=20 out=out/a.npz",
    "convert": "model.checkpoint={f}/vit model.mixer=la out=out",
    "evaluate_imagenet": "data.source=digits data.workers=0 eval.models=[{f}/vit] out=out",
}
Changes = list[tuple[str, Any]]


def options(folder: Path, seed: int) -> list[Case]:
    """Random choices for both kinds of runs; the second run of each is killed after a part of its operations."""
    rng, found = random.Random(seed), []
    for kind in TOOL:
        choices = OPTIONS["both"] | OPTIONS[kind]
        for number in range(TRIALS):
            changes = [(key, rng.choice(choices[key])) for key in rng.sample(sorted(choices), CHANGES)]
            found.append(_trial(kind, number, changes, rng.random()))
    return found


def _trial(kind: str, number: int, changes: Changes, stop: float) -> Case:
    def command(these: Changes) -> str:
        return shown(TOOL[kind], [f"{kind}.yaml", *(f"{key}={json.dumps(value)}" for key, value in these)])

    def check(these: Changes, place: Path) -> str:
        return _attempt(kind, these, stop, place)

    return Case(
        f"{kind} {number}", lambda place: check(changes, place), command(changes),
        lambda place, complaint: command(shrink(changes, complaint, place, check)),
    )  # fmt: skip


def _attempt(kind: str, changes: Changes, stop: float, place: Path) -> str:
    """The complaint about runs with these changes."""
    tree: dict[str, Any] = {}
    for key, value in changes:
        *sections, last = key.split(".")
        inner = tree
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[last] = value
    file = write_config(kind, place / "run.yaml", tree)
    result, operations = counted(kind, file, place / "whole")
    if result.code == 2 and any(word in result.err for word in OPTIONS["conflicts"]):
        return ""
    if result.code:
        return f"exit {result.code}: {result.err[-400:]}"
    kill_at = max(1, round(stop * operations))
    if complaint := _killed(kind, file, place / "killed", place / "whole", [kill_at]):
        return f"killed at operation {kill_at}: {complaint}"
    tool, words = LOADS[kind]
    result = call(tool, words.split(), cwd=place)
    return f"not loaded, exit {result.code}: {result.err[-300:]}" if result.code else ""


def _killed(kind: str, file: Path, run: Path, whole: Path, stops: list[int]) -> str:
    """The complaint about a run that is killed before the first of these operations; the second counts from its
    continuation."""
    for stop in stops:
        ended = start(kind, file, run, before=Durable(run, stop).install)
        if ended.code not in (0, 137):
            return f"before the kill exit {ended.code}: {ended.err[-300:]}"
    return resume(kind, file, run, whole)


def kills(folder: Path, seed: int) -> list[Case]:
    """Both runs, killed at every durable operation and at random times, or interrupted."""
    rng, found = random.Random(seed), []
    for kind in TOOL:
        file, whole = write_config(kind, folder / f"{kind}.yaml"), folder / kind
        ended, operations = counted(kind, file, whole)
        seconds = succeed(ended).seconds
        for at in range(1, operations + 1):
            stops = [at, rng.randint(1, operations)] if rng.random() < TWICE else [at]
            found.append(_kill(kind, file, whole, stops))
        signals = [signal.SIGKILL] * TIMES + [signal.SIGTERM, signal.SIGINT] * (INTERRUPTS // 2)
        found += [_interrupted(kind, file, whole, s, rng.uniform(0.1, seconds), i) for i, s in enumerate(signals)]
    return found


def _kill(kind: str, file: Path, whole: Path, stops: list[int]) -> Case:
    def check(place: Path) -> str:
        return _killed(kind, file, place / "run", whole, stops)

    return Case(f"{kind} operation {stops[0]}", check, f"{kind}, SIGKILL before operations {stops}")


def _interrupted(kind: str, file: Path, whole: Path, number: signal.Signals, at: float, name: int) -> Case:
    """A run that gets a signal after `at` seconds."""

    def check(place: Path) -> str:
        ended = start(kind, file, place / "run", signal_at=(number, at))
        if ended.code not in (0, SIGNALS[number]) or "Traceback" in ended.err:
            return f"{number.name} ends in exit {ended.code}: {ended.err[-200:]}"
        return resume(kind, file, place / "run", whole)

    return Case(f"{kind} {number.name} {name}", check, f"{kind}, {number.name} after {at:.3f} s")


def disks(folder: Path, seed: int) -> list[Case]:
    """Files that may not grow, as on a full disk: limits between nothing and the largest file of each output."""
    rng, found = random.Random(seed), []
    for kind in TOOL:
        file = whole_run(kind, folder, kind, SOFTMAX.get(kind))
        found += [_limited_run(kind, file, folder / kind, size) for size in _sizes(rng, folder / kind)]
    for tool, text in WRITERS.items():
        words, whole = text.format(f=folder).split(), folder / tool
        whole.mkdir()
        succeed(call(tool, words, cwd=whole))
        found += [_limited_tool(tool, words, whole, size) for size in _sizes(rng, whole)]
    return found


def _sizes(rng: random.Random, folder: Path) -> list[int]:
    """Random sizes up to the largest file below a folder, mostly small."""
    largest = max(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return [int(rng.uniform(0, 1.05) ** 2 * largest) for _ in range(SIZES)]


def _limit_files(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def _limited_run(kind: str, file: Path, whole: Path, size: int) -> Case:
    """A run none of whose files may be larger than `size` bytes, continued without that limit."""

    def check(place: Path) -> str:
        ended = start(kind, file, place / "run", before=lambda: _limit_files(size))
        return judge(ended) or resume(kind, file, place / "run", whole)

    return Case(f"{kind} files of {size}", check, f"prlimit --fsize={size} {kind}")


def _limited_tool(tool: str, words: list[str], whole: Path, size: int) -> Case:
    """Another tool under a limit, run again without it: it writes what it wrote without a limit before."""

    def check(place: Path) -> str:
        if complaint := judge(call(tool, words, cwd=place, before=lambda: _limit_files(size))):
            return complaint
        if (again := call(tool, words, cwd=place)).code:
            return f"not repeated, exit {again.code}: {again.err[-300:]}"
        names = files_below(whole)
        if other := names ^ files_below(place):
            return f"files: {sorted(other)[:3]}"
        compared = sorted(name for name in names if name.endswith((".npz", ".safetensors", ".csv")))
        return "; ".join(f"{name} differs" for name in compared if not same_file(whole / name, place / name))

    return Case(f"{tool} files of {size}", check, f"prlimit --fsize={size} {shown(tool, words)}")
