"""Runs killed at every durable operation and at random times, or interrupted; resumed, they end bit-identically."""

from __future__ import annotations

import random
import signal
from pathlib import Path

from tests.campaign.harness import Case, succeed
from tests.campaign.runs import TOOL, Durable, counted, resume, start, write_config

TIMES, INTERRUPTS = 20, 6  # random kills and signals per run
TWICE = 0.3  # fraction of the kills after which the resumed run is killed, too
SIGNALS = {signal.SIGKILL: 137, signal.SIGTERM: 143, signal.SIGINT: 130}  # and the exit code that a shell expects


def cases(folder: Path, seed: int) -> list[Case]:
    """Every kill of both runs."""
    rng, found = random.Random(seed), []
    for kind in TOOL:
        file, whole = write_config(kind, folder / f"{kind}.yaml"), folder / kind
        ended, operations = counted(kind, file, whole)
        seconds = succeed(ended).seconds
        for at in range(1, operations + 1):
            stops = [at, rng.randint(1, operations)] if rng.random() < TWICE else [at]
            found.append(killed(kind, file, whole, stops))
        signals = [signal.SIGKILL] * TIMES + [signal.SIGTERM, signal.SIGINT] * (INTERRUPTS // 2)
        found += [interrupted(kind, file, whole, s, rng.uniform(0.1, seconds), i) for i, s in enumerate(signals)]
    return found


def killed(kind: str, file: Path, whole: Path, stops: list[int]) -> Case:
    """A run that is killed before the first of these operations; the second counts from its continuation."""

    def check(place: Path) -> str:
        for stop in stops:
            ended = start(kind, file, place / "run", before=Durable(place / "run", stop).install)
            if ended.code not in (0, 137):
                return f"before the kill exit {ended.code}: {ended.err[-200:]}"
        return resume(kind, file, place / "run", whole)

    return Case(f"{kind} operation {stops[0]}", check, f"{kind}, SIGKILL before operations {stops}")


def interrupted(kind: str, file: Path, whole: Path, number: signal.Signals, at: float, name: int) -> Case:
    """A run that gets a signal after `at` seconds."""

    def check(place: Path) -> str:
        ended = start(kind, file, place / "run", signal_at=(number, at))
        if ended.code not in (0, SIGNALS[number]) or "Traceback" in ended.err:
            return f"{number.name} ends in exit {ended.code}: {ended.err[-200:]}"
        return resume(kind, file, place / "run", whole)

    return Case(f"{kind} {number.name} {name}", check, f"{kind}, {number.name} after {at:.3f} s")
