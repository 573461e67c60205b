"""Run the campaign of attacks: `python -m tests.campaign [--seed 0] [--minutes 20] [--only kills,commands]`.

Prints figures per part, writes the failures as JSON, and exits with code 1 when one of them is not in ledger.yaml.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml
from tqdm import tqdm

from tests.campaign.harness import Case, prepare

PARTS = ("commands", "options", "kills", "folders", "disks", "operators")
LEDGER = Path(__file__).with_name("ledger.yaml")
REDUCING = 60.0  # seconds after its time that a part may spend on reducing failures


@dataclass
class Figures:
    """What became of the cases of one part; `tolerated` failures are in the ledger."""

    part: str
    cases: int
    tried: int = 0
    passed: int = 0
    failed: int = 0
    tolerated: int = 0
    failures: list[dict[str, Any]] = field(default_factory=list)


def main(words: list[str]) -> int:
    """Run the parts that the words select. Returns the exit code."""
    options = arguments(words)
    ledger = read_ledger(LEDGER)
    prepare()
    end = time.monotonic() + 60 * options.minutes
    rows = []
    with tempfile.TemporaryDirectory(prefix="campaign-") as work:
        for number, part in enumerate(options.only):
            seconds = max(end - time.monotonic(), 1.0) / (len(options.only) - number)
            try:
                module = importlib.import_module(f"tests.campaign.{part}")
            except ModuleNotFoundError as error:
                if error.name != f"tests.campaign.{part}":
                    raise
                print(f"{part}: not there yet", flush=True)
                continue
            folder = Path(work) / part
            folder.mkdir()
            cases = list(module.cases(folder, options.seed, seconds))
            rows.append(carry_out(part, cases, folder, seconds, options.seed, ledger.get(part, {})))
    return report(rows, Path(options.out), options.seed)


def arguments(words: list[str]) -> argparse.Namespace:
    """The options of the command line, `only` as a list."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaign", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="choice and order of the random cases")
    parser.add_argument("--minutes", type=float, default=20.0, help="time limit, shared out among the parts")
    parser.add_argument("--only", default=",".join(PARTS), help=f"parts, among {','.join(PARTS)}")
    parser.add_argument("--out", default="runs/campaign.json", help="file for figures and failures")
    options = parser.parse_args(words)
    options.only = options.only.split(",")
    if unknown := [part for part in options.only if part not in PARTS]:
        parser.error(f"unknown part {unknown[0]!r}; allowed: {', '.join(PARTS)}")
    return options


def read_ledger(file: Path) -> dict[str, dict[str, str]]:
    """part -> name of the case -> reason why its failure is tolerated. Raises ValueError for an entry without one."""
    found: dict[str, dict[str, str]] = {}
    for entry in yaml.safe_load(file.read_text()) or []:
        if set(entry) != {"part", "name", "reason"} or not entry["reason"]:
            raise ValueError(f"an entry of {file.name} needs part, name and reason, got {entry}")
        found.setdefault(entry["part"], {})[entry["name"]] = entry["reason"]
    return found


def carry_out(
    part: str, cases: list[Case], folder: Path, seconds: float, seed: int, tolerated: dict[str, str]
) -> Figures:
    """Try the cases, in an order that the seed chooses, for so many seconds."""
    figures = Figures(part, len(cases))
    random.Random(seed).shuffle(cases)
    deadline = time.monotonic() + seconds
    with tqdm(total=len(cases), desc=part, unit="case", mininterval=0.5 if sys.stderr.isatty() else 30) as bar:
        for case in cases:
            if time.monotonic() > deadline:
                break
            with scratch(folder) as place:
                complaint = case.check(place)
            figures.tried += 1
            if not complaint:
                figures.passed += 1
            elif case.name in tolerated:
                figures.tolerated += 1
            else:
                figures.failed += 1
                failure = {"part": part, "name": case.name, "complaint": complaint, "command": case.command}
                tqdm.write(f"{part} {case.name}: {complaint}")
                if case.reduce and time.monotonic() < deadline + REDUCING:
                    with scratch(folder) as place:
                        failure["command"] = case.reduce(place, complaint)
                figures.failures.append({**failure, "seed": seed})
            bar.update()
            bar.set_postfix(failed=figures.failed, refresh=False)
    return figures


@contextlib.contextmanager
def scratch(folder: Path) -> Iterator[Path]:
    """An empty folder that goes away."""
    with tempfile.TemporaryDirectory(dir=folder, prefix="case-", ignore_cleanup_errors=True) as name:
        yield Path(name)


def report(rows: list[Figures], out: Path, seed: int) -> int:
    """Print and write the figures. Returns the exit code, 1 if a failure is not tolerated."""
    failures = [failure for row in rows for failure in row.failures]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"seed": seed, "parts": [asdict(row) for row in rows]}, indent=1) + "\n")
    print(f"\n{'part':<10} {'cases':>6} {'tried':>6} {'passed':>6} {'failed':>6} {'tolerated':>9}")
    for row in rows:
        print(f"{row.part:<10} {row.cases:>6} {row.tried:>6} {row.passed:>6} {row.failed:>6} {row.tolerated:>9}")
    for failure in failures:
        print("\n" + "\n".join(lines(failure)))
    print(f"\nwrote {out}")
    return int(bool(failures))


def lines(failure: dict[str, Any]) -> Iterator[str]:
    """A failure as text."""
    yield f"{failure['part']} {failure['name']} (seed {failure['seed']}): {failure['complaint']}"
    yield f"  {failure['command']}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
