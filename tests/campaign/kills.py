"""Runs killed at every durable operation and at random times, or interrupted; resumed, they end bit-identically."""

from __future__ import annotations

import random
import signal
from pathlib import Path

from tests.campaign.harness import Case, Result
from tests.campaign.runs import RUNS, Durable, counted, differences, start, write_config

TIMES, INTERRUPTS = 20, 6  # random kills and signals per run
TWICE = 0.3  # fraction of the kills after which the resumed run is killed, too
SIGNALS = {signal.SIGTERM: 143, signal.SIGINT: 130}  # and the exit code that a shell expects


def cases(folder: Path, seed: int, seconds: float) -> list[Case]:
    """Every kill of both runs."""
    rng = random.Random(seed)
    found = []
    for kind in RUNS:
        attack = Attack(kind, folder)
        for at in range(1, attack.operations + 1):
            again = rng.randint(1, attack.operations) if rng.random() < TWICE else 0
            found.append(attack.case(f"operation {at}", at, again))
        for number in range(TIMES):
            found.append(attack.case(f"time {number}", rng.uniform(0, attack.seconds), 0, signal.SIGKILL))
        for number in range(INTERRUPTS):
            name = list(SIGNALS)[number % 2]
            found.append(attack.case(f"{name.name} {number}", rng.uniform(0.1, attack.seconds), 0, name))
    return found


class Attack:
    """The unkilled run of one kind, and kills of others like it."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.whole = kind, folder / f"{kind}-whole"
        self.file = write_config(kind, folder / f"{kind}.yaml")
        result, self.operations = counted(kind, self.file, self.whole)
        if result.code:
            raise RuntimeError(f"the unkilled run failed: {result.err}")
        self.seconds = result.seconds

    def case(self, name: str, at: float, again: int, number: int = 0) -> Case:
        """Kill by operation `at` (and the resumed run by operation `again`), or by signal `number` after so many
        seconds."""
        how = f"signal {number} after {at:.3f} s" if number else f"SIGKILL before operation {at}, again {again}"
        return Case(f"{self.kind} {name}", lambda place: self.check(place / "run", at, again, number), how)

    def check(self, run: Path, at: float, again: int, number: int) -> str:
        """The complaint about the killed and resumed run in `run`."""
        if number:
            result = start(self.kind, self.file, run, signal_at=(number, at))
            expected = SIGNALS.get(signal.Signals(number), 137)
            if result.code not in (0, expected) or "Traceback" in result.err:
                return f"signal {number} ends in exit {result.code}: {result.err[-200:]}"
        for stop in (int(at), again):
            if stop and not number:
                result = self.killed(run, stop)
                if result.code not in (0, 137):
                    return f"before the kill exit {result.code}: {result.err[-200:]}"
        result = start(self.kind, self.file, run)
        if result.code:
            return f"not resumed, exit {result.code}: {result.err[-300:]}"
        return "; ".join(differences(self.whole, run))

    def killed(self, run: Path, stop: int) -> Result:
        """The run, killed before its durable operation `stop`."""
        return start(self.kind, self.file, run, before=Durable(run, stop).install)
