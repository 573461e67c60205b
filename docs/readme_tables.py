"""Write the tables of README.md from docs/results/NAME.json, between `<!-- results:NAME -->` and `<!-- /results -->`.

With --check: exit 1 if the README does not hold the tables that the files give (a test runs this).
"""

import argparse
import json
import re
import statistics
import sys
from pathlib import Path

from zoo.eval.speed import report

ROOT = Path(__file__).resolve().parents[1]
GROUP = ("experiment", "data", "mixer", "source", "metric", "budget")
MARKED = re.compile(r"(<!-- results:([\w-]+) -->\n).*?(<!-- /results -->)", re.DOTALL)


def quality(result: dict) -> str:
    """Rows of a quality file as one line a mixer: mean over seeds with their range, and the time of a run."""
    groups: dict[tuple, list[dict]] = {}
    for row in result["rows"]:
        groups.setdefault(tuple(row[name] for name in GROUP), []).append(row)
    lines = [f"| {' | '.join(GROUP)} | mean (lowest to highest) | seeds | seconds |", "|---" * (len(GROUP) + 3) + "|"]
    for key, rows in sorted(
        groups.items(), key=lambda group: group[0][0]
    ):  # stable: mixers stay in the order of the file
        values = [row["value"] for row in rows]
        spread = f"{statistics.mean(values):.2f} ({min(values):.2f} to {max(values):.2f})"
        wall = statistics.mean(row["wall_s"] for row in rows)
        lines.append(f"| {' | '.join(key)} | {spread} | {len(rows)} | {wall:.0f} |")
    return "\n".join(lines)


def diffusion(result: dict) -> str:
    """Rows of a diffusion file as one line an arm, one column a metric; below them the distances of the test images, if
    there are scores."""
    metrics = list(dict.fromkeys(row["metric"] for row in result["rows"]))
    arms: dict[tuple, dict[str, float]] = {}
    for row in result["rows"]:
        arms.setdefault((row["mixer"], row["source"], row["budget"], f"{row['wall_s']:.0f}"), {})[row["metric"]] = row[
            "value"
        ]
    lines = [f"| mixer | source | budget | seconds | {' | '.join(metrics)} |", "|---" * (len(metrics) + 4) + "|"]
    for about, values in arms.items():
        lines.append(f"| {' | '.join(about)} | {' | '.join(f'{values[m]:.4g}' for m in metrics)} |")
    if "floor" in result:
        floor = " | ".join(f"{result['floor'][m]:.4g}" if m in result["floor"] else "-" for m in metrics)
        lines.append(f"| - | test images | - | - | {floor} |")
    return "\n".join(lines)


RENDER = {
    "quality": quality,
    "dit-cifar10": diffusion,
    "kernels-h200": report.kernels,
    "models-h200": report.models,
    "video-h200": report.video,
    "video-clips": diffusion,
}


def command(text: str) -> str:
    """A command as part of a sentence; several lines of them as a block of their own."""
    return f"Commands:\n\n```\n{text}\n```\n\n" if "\n" in text else f"Command: `{text}`. "


def block(name: str) -> str:
    """Picture, table and origin of a result file; a sentence while there is no such file."""
    file = ROOT / "docs" / "results" / f"{name}.json"
    if not file.is_file():
        return f"`python tools/benchmark.py {name.partition('-')[0]}` was not run yet.\n"
    result = json.loads(file.read_text())
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    source = f"{result['hardware']}, {result['date']}, {versions}. {command(result['command'])}"
    picture = f"![{name}](docs/{name}.png)\n\n" if (ROOT / "docs" / f"{name}.png").is_file() else ""
    return f"{picture}{RENDER[name](result)}\n\n{source}{result.get('note', '')}".rstrip() + "\n"


def main() -> int:
    """Rewrite (or with --check compare) the marked parts of README.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    readme = ROOT / "README.md"
    old = readme.read_text()

    def fill(match: re.Match) -> str:
        return match[1] + block(match[2]) + match[3]

    new = MARKED.sub(fill, old)
    if args.check:
        return int(new != old)
    readme.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
