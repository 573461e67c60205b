"""The campaign: attacks on command lines, options, running processes, folders, disks and operators.

    python -m tests.campaign [--seed 0] [--minutes 20] [--only kills,commands] [--out runs/campaign.json]

prints figures per part and each failure with a command that shows it, reduced where that can be done; writes them as
JSON; exits with code 1 when a failure is not in ledger.yaml. Cases come in an order that the seed chooses, and parts
share the time; three hours are enough for all cases on two free cores.

- commands: about 2,700 command lines, 694 of them written in tables/commands.yaml
- options: 200 random choices of valid options
- kills: two runs, killed before every durable operation, at random times, and interrupted
- folders: every kind of damage to a run, a classifier and a model of diffusers
- disks: limits of file sizes
- operators: 10,000 random calls on the CPU against dense definitions in float64

Kernels on a GPU: 2,000 calls in 8 processes that share one GPU, each with a seed of its own. Every process prints the
smallest call that shows a failure, and exits with code 1 for one.

    seq 8 | xargs -P 8 -I N python -m tests.campaign.operators --device cuda --seed N --calls 250 --seconds 3000
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml
from tqdm import tqdm

from tests.campaign.harness import Case, prepare

PARTS = {  # module and function with the cases
    "commands": ("commands", "cases"),
    "options": ("attacks", "options"),
    "kills": ("attacks", "kills"),
    "folders": ("folders", "cases"),
    "disks": ("attacks", "disks"),
    "operators": ("operators", "cases"),
}
FIGURES = ("cases", "tried", "passed", "failed", "tolerated")
LEDGER = Path(__file__).with_name("ledger.yaml")
REDUCING = 60.0  # seconds after its time that a part may spend on reducing failures


def main(words: list[str]) -> int:
    """Run the parts that the words select. Returns the exit code."""
    parser = argparse.ArgumentParser(
        "python -m tests.campaign", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0, help="choice and order of the random cases")
    parser.add_argument("--minutes", type=float, default=20.0, help="time limit, shared out among the parts")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, separated by commas")
    parser.add_argument("--out", default="runs/campaign.json", help="file for figures and failures")
    options = parser.parse_args(words)
    parts = options.only.split(",")
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"unknown part {unknown[0]!r}; allowed: {', '.join(PARTS)}")
    ledger = read_ledger(LEDGER)
    prepare()
    end, rows = time.monotonic() + 60 * options.minutes, []
    with tempfile.TemporaryDirectory(prefix="campaign-") as work:
        for number, part in enumerate(parts):
            seconds = max(end - time.monotonic(), 1.0) / (len(parts) - number)
            folder = Path(work) / part
            folder.mkdir()
            module, function = PARTS[part]
            make = getattr(importlib.import_module(f"tests.campaign.{module}"), function)
            cases = make(folder, options.seed)
            rows.append(carry_out(part, cases, folder, seconds, options.seed, ledger))
    return report(rows, Path(options.out), options.seed)


def read_ledger(file: Path) -> set[tuple[str, str]]:
    """(part, name) of the cases whose failure is tolerated. Raises ValueError for an entry without a reason."""
    entries = yaml.safe_load(file.read_text()) or []
    for entry in entries:
        if set(entry) != {"part", "name", "reason"} or not entry["reason"]:
            raise ValueError(f"an entry of {file.name} needs part, name and reason, got {entry}")
    return {(entry["part"], entry["name"]) for entry in entries}


def carry_out(
    part: str, cases: list[Case], folder: Path, seconds: float, seed: int, tolerated: set[tuple[str, str]]
) -> dict[str, Any]:
    """Try the cases, in an order that the seed chooses, for so many seconds. Returns figures and failures."""
    row: dict[str, Any] = {"part": part, **dict.fromkeys(FIGURES, 0), "cases": len(cases), "failures": []}
    random.Random(seed).shuffle(cases)
    deadline = time.monotonic() + seconds
    for case in tqdm(cases, desc=part, unit="case", mininterval=0.5 if sys.stderr.isatty() else 30):
        if time.monotonic() > deadline:
            break
        complaint = in_scratch(folder, case.check)
        row["tried"] += 1
        if not complaint or (part, case.name) in tolerated:
            row["tolerated" if complaint else "passed"] += 1
            continue
        tqdm.write(f"{part} {case.name}: {complaint}")
        row["failed"] += 1
        reduced = case.reduce and time.monotonic() < deadline + REDUCING
        command = in_scratch(folder, case.reduce, complaint) if reduced else case.command
        row["failures"].append({"part": part, "name": case.name, "complaint": complaint, "command": command})
    return row


def in_scratch(folder: Path, function: Any, *arguments: str) -> str:
    """`function` of an empty folder that goes away, and of the arguments."""
    with tempfile.TemporaryDirectory(dir=folder, prefix="case-", ignore_cleanup_errors=True) as name:
        return function(Path(name), *arguments)


def report(rows: list[dict[str, Any]], out: Path, seed: int) -> int:
    """Print and write the figures. Returns the exit code, 1 if a failure is not tolerated."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"seed": seed, "parts": rows}, indent=1) + "\n")
    print(f"\n{'part':<10}" + "".join(f"{name:>10}" for name in FIGURES))
    for row in rows:
        print(f"{row['part']:<10}" + "".join(f"{row[name]:>10}" for name in FIGURES))
    failures = [failure for row in rows for failure in row["failures"]]
    for failure in failures:
        print(f"\n{failure['part']} {failure['name']} (seed {seed}): {failure['complaint']}\n  {failure['command']}")
    print(f"\nwrote {out}")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
