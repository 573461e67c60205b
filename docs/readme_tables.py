"""Write the tables of README.md and docs/*.md from docs/results/NAME.json, between the lines
`<!-- results:NAME -->` and `<!-- /results -->`, and draw three figures of docs/pictures: quality, experiments-h100 and
dit-cifar10.

With --check: exit 1 if they do not hold the tables that the files give (a test runs this).
"""

import argparse
import json
import math
import re
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))  # where the benchmarks are

from benchmarks import report  # noqa: E402
from benchmarks.quality_plots import draw_denoisers, draw_quality, draw_tradeoff  # noqa: E402

MARKED = re.compile(r"(<!-- results:([\w-]+) -->\n).*?(<!-- /results -->)", re.DOTALL)


def quality(result: dict) -> str:
    """Tables of the quality runs scored on test images."""
    return experiments({"rows": [row for row in result["rows"] if "held out" not in row["data"]]})


def held_out(result: dict) -> str:
    """Tables of the quality runs scored on held-out training images: the choices."""
    return experiments({"rows": [row for row in result["rows"] if "held out" in row["data"]]})


def experiments(result: dict) -> str:
    """Tables of classification runs: one line per mixer from scratch, one line per converted mixer with its stages."""
    scratch = [row for row in result["rows"] if row["source"] == "scratch"]
    converted = [row for row in result["rows"] if row["source"] != "scratch"]
    return "\n\n".join(table(rows) for rows, table in ((scratch, from_scratch), (converted, conversions)) if rows)


def named(row: dict) -> str:
    """A mixer with its options."""
    return " ".join([row["mixer"], *(f"{k}={str(v).replace(' ', '')}" for k, v in row["options"].items())])


def grouped(rows: list[dict], *names: str) -> dict[tuple, list[dict]]:
    """Rows with the same mixer, options and these columns, in the order of the file."""
    return grouped_by([row | {"named": named(row)} for row in rows], *names, "named")


def spread(values: list[float]) -> str:
    """Mean, and the range if there are several."""
    mean = f"{statistics.mean(values):.2f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.2f} to {max(values):.2f})"


def differences(rows: list[dict], others: list[dict]) -> str:
    """Mean difference to the run of the same seed, and the range."""
    other = {row["seed"]: row["value"] for row in others}
    found = [row["value"] - other[row["seed"]] for row in rows if row["seed"] in other]
    return spread(found) if found else "-"


def from_scratch(rows: list[dict]) -> str:
    """One line per mixer: top-1, and the difference per seed to softmax with the same depthwise options."""
    head = ["experiment", "data", "budget", "mixer", "top-1 (%)", "against softmax", "against la", "seeds", "seconds"]
    groups = grouped(rows, "experiment", "data", "budget")
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for key, runs in sorted(groups.items(), key=lambda group: group[0][:3]):  # stable: as in the file
        local = "".join(f" {k}={v}" for k, v in runs[0]["options"].items() if k in ("depthwise", "lepe"))
        against = [differences(runs, groups.get((*key[:3], name + local), [])) for name in ("softmax", "la")]
        cells = [*key, spread([r["value"] for r in runs]), *against, str(len(runs)), mean_seconds(runs)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def mean_seconds(rows: list[dict]) -> str:
    """Mean time of the runs."""
    return f"{statistics.mean(row['wall_s'] for row in rows):.0f}"


def conversions(rows: list[dict]) -> str:
    """One line per mixer: top-1 at each stage, the gap to softmax trained for the same further budget (control), and
    recovery, (converted - floor) / (control - floor) with the floor from random attention weights. Gaps and recoveries
    are computed per seed, then averaged."""
    stages = {m: f"top1 after {m}" for m in ("conversion", "calibration", "transfer")}
    head = ["experiment", "data", "budget", "mixer", *(f"after {m}" for m in stages), "top-1 (%)", "against control"]
    head += ["floor", "recovery", "seeds", "seconds"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for place, inside in grouped_by(rows, "experiment", "data").items():
        tuned = [row for row in inside if row["metric"] == "top1"]
        controls = [row for row in tuned if row["source"] == "control"]
        for key, runs in grouped([r for r in tuned if r["source"] == "converted"], "budget").items():
            mine = [row for row in inside if named(row) == key[-1]]
            floors = [row for row in mine if row["source"] == "floor"]
            early = [[r["value"] for r in mine if r["metric"] == name] for name in stages.values()]
            cells = [*place, *key, *(spread(values) if values else "-" for values in early)]
            cells += [spread([r["value"] for r in runs]), differences(runs, controls)]
            cells += [spread([r["value"] for r in floors]) if floors else "-", recovery(runs, controls, floors)]
            lines.append(f"| {' | '.join([*cells, str(len(runs)), mean_seconds(runs)])} |")
        for key, runs in grouped(
            [r for r in tuned if r["source"] in ("teacher", "control")], "source", "budget"
        ).items():
            values = spread(list({row["seed"]: row["value"] for row in runs}.values()))
            seeds = str(len({row["seed"] for row in runs}))
            cells = [*place, key[1], f"softmax ({key[0]})", "-", "-", "-", values, "-", "-", "-", seeds]
            lines.append(f"| {' | '.join([*cells, mean_seconds(runs)])} |")
    return "\n".join(lines)


def grouped_by(rows: list[dict], *names: str) -> dict[tuple, list[dict]]:
    """Rows with the same values in these columns, in the order of the file."""
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return groups


def recovery(runs: list[dict], controls: list[dict], floors: list[dict]) -> str:
    """The mean over seeds of (converted - floor) / (control - floor)."""
    control, floor = ({row["seed"]: row["value"] for row in rows} for rows in (controls, floors))
    found = [
        (row["value"] - floor[row["seed"]]) / (control[row["seed"]] - floor[row["seed"]])
        for row in runs
        if row["seed"] in floor and control.get(row["seed"], floor[row["seed"]]) != floor[row["seed"]]
    ]
    return f"{statistics.mean(found):.3f}" if found else "-"


def diffusion(result: dict) -> str:
    """One line per model and one column per metric: mean and range over seeds; Frechet distances also relative to the
    control. The last line holds the distances of the test images, if there are scores."""
    metrics = list(dict.fromkeys(row["metric"] for row in result["rows"]))
    arms = grouped(result["rows"], "source", "budget", "experiment")
    several = len({row["experiment"].removesuffix("_tune") for row in result["rows"]}) > 1
    control = [row for row in result["rows"] if row["source"] == "control"]
    controls = {m: [row["value"] for row in control if row["metric"] == m] for m in metrics}
    head = [*(["experiment"] if several else []), "mixer", "source", "budget", "seeds", "seconds", *metrics]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for (source, budget, experiment, name), runs in arms.items():
        by_metric = {m: [row["value"] for row in runs if row["metric"] == m] for m in metrics}
        cells = [distances(m, by_metric[m], controls[m] if source == "converted" else []) for m in metrics]
        seconds = statistics.mean(row["wall_s"] for row in runs)
        seeds = str(len({row["seed"] for row in runs}))
        about = [*([experiment] if several else []), name, source, budget, seeds, f"{seconds:.0f}"]
        lines.append(f"| {' | '.join(about + cells)} |")
    if "floor" in result:
        floor = " | ".join(f"{result['floor'][m]:.4g}" if m in result["floor"] else "-" for m in metrics)
        lines.append(f"| - | test images | - | - | - | {floor} |")
    return "\n".join(lines)


def finetuning(result: dict) -> str:
    """One line per run: seconds and memory per step, relative to softmax without a teacher."""
    head = ["mixer", "teacher", "seconds per step", "times softmax", "peak GiB"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    (softmax,) = [row for row in result["rows"] if row["mixer"] == "softmax"]
    for row in result["rows"]:
        times = f"{softmax['seconds_per_step'] / row['seconds_per_step']:.2f}" if row is not softmax else ""
        cells = [row["mixer"], "softmax" if row["teacher"] else "-", f"{row['seconds_per_step']:.2f}", times]
        cells.append(f"{row['peak_mib'] / 1024:.1f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def two_kernels(result: dict) -> str:
    """One line per shape, one column per operator: the sketch's time over the package's, and both in microseconds."""
    lines = []
    for (shape,), rows in grouped_by(result["rows"], "shape").items():
        if not lines:
            lines = ["| " + " | ".join(["shape", *(row["op"] for row in rows)]) + " |", "|---" * (len(rows) + 1) + "|"]
        timed = "{ratio:.2f} ({sketch_us:.0f}, {package_us:.0f})"
        cells = [timed.format(**row) if "ratio" in row else "-" for row in rows]
        lines.append(f"| {' | '.join([shape, *cells])} |")
    return "\n".join(lines)


def fidelity(result: dict) -> str:
    """One line per number of tokens and options: KL and top-1 at each density, means over seeds."""
    lines = []
    rounded = [row | {"round": 2 ** round(math.log2(row["density"]))} for row in result["rows"]]
    groups = grouped_by(rounded, "tokens", "select", "far", "q_tile", "k_tile")
    densities = sorted({row["round"] for rows in groups.values() for row in rows})
    for (tokens, select, *options), rows in sorted(groups.items()):
        cells = [str(tokens), select, *("-" if select == "near" else str(x) for x in options)]
        for density in densities:
            some = [row for row in rows if row["round"] == density]
            kl, top1 = ([row[key] for row in some] for key in ("kl", "top1"))
            cells.append(f"{statistics.mean(kl):.3f}, {statistics.mean(top1):.1f}" if some else "-")
        softmax = statistics.mean(row["softmax_top1"] for row in rows)
        lines.append(f"| {' | '.join([*cells, f'{softmax:.1f}', str(len({row['seed'] for row in rows}))])} |")
    head = ["tokens", "select", "far", "q_tile", "k_tile", *(f"1/{1 / x:g}: KL, top-1" for x in densities)]
    head += ["softmax's top-1", "seeds"]
    return "\n".join([f"| {' | '.join(head)} |", "|---" * len(head) + "|", *lines])


def adaptive_kernels(result: dict) -> str:
    """One line per shape and options: times and speed-ups over cuDNN."""
    head = ["tokens [B, H, N, D]", "select", "density", "k_tile", "forward, us", "forward + backward, us"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in result["rows"]:
        timed = [
            f"{row[f'{p}_us']} ({row[f'cudnn_{p}_us'] / row[f'{p}_us']:.2f}x)" for p in ("forward", "forward_backward")
        ]
        cells = [tuple(row["sizes"]), row["select"], f"{row['density']:g}", row["k_tile"], *timed]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def distances(metric: str, values: list[float], control: list[float]) -> str:
    """Mean, range if there are several values, and for a Frechet distance its ratio to the control's mean."""
    if not values:
        return "-"
    text = f"{statistics.mean(values):.4g}"
    if len(values) > 1:
        text += f" ({min(values):.4g} to {max(values):.4g})"
    if control and metric.startswith("Frechet"):
        text += f", x {statistics.mean(values) / statistics.mean(control):.2f}"
    return text


RENDER = {
    "quality": quality,
    "quality-held-out": held_out,
    "quality-digits": experiments,
    "power-h100": experiments,
    "denoisers-h100": diffusion,
    "experiments-h100": report.models,
    "dit-cifar10": diffusion,
    "fidelity-h200": fidelity,
    "adaptive-kernels-h200": adaptive_kernels,
    "kernels-h200": report.main_kernels,
    "kernels-h200-short": report.two_sided,
    "kernels-h200-all": report.kernels,
    "multipole-h200": report.multipole,
    "models-h200": report.models,
    "video-h200": report.video,
    "video-clips": diffusion,
    "wan-finetuning": finetuning,
    "two-kernels-h100": two_kernels,
}


def command(text: str) -> str:
    """One command as part of a sentence, several lines as a folded code block."""
    folded = f"\n\n<details markdown=\"1\"><summary>Commands</summary>\n\n```\n{text}\n```\n\n</details>"
    return folded if "\n" in text else f" Command: `{text}`."


def block(name: str, folder: Path) -> str:
    """Figure, table and origin of a result file for a document in this folder, or a sentence while the file is missing.

    Names that end in -all or -held-out have no figure. Together with those that end in -short they have no commands
    and notes, which another page shows.
    """
    stem = re.sub("-(all|short|held-out)$", "", name)
    file = ROOT / "docs" / "results" / f"{stem}.json"
    if not file.is_file():
        return f"`python tools/benchmark.py {name.partition('-')[0]}` was not run yet.\n"
    result = json.loads(file.read_text())
    picture = ROOT / "docs" / "pictures" / f"{stem}.png"
    drawn = picture.is_file() and not name.endswith(("-all", "-held-out"))
    head = f"![{stem}]({picture.relative_to(folder)})\n\n" if drawn else ""
    return f"{head}{RENDER[name](result)}\n\n{origin(result, stem != name)}".rstrip() + "\n"


def origin(result: dict, short: bool) -> str:
    """Hardware, date and versions; the commands and notes too, unless `short`."""
    where = f"{result['hardware']}, {result['date']}"
    if short:
        return f"{where}."
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    notes = "\n".join(f"- {note}" for note in result.get("note", []))
    return f"{where}, {versions}.{command(result['command'])}\n\n{notes}"


def main() -> int:
    """Rewrite (or with --check compare) the marked parts of the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()

    docs = ROOT / "docs"
    if not args.check and (docs / "results" / "quality.json").is_file():
        draw_quality(json.loads((docs / "results" / "quality.json").read_text()), docs / "pictures" / "quality.png")
        names = "power-h100", "experiments-h100", "dit-cifar10"
        *files, denoisers = (json.loads((docs / "results" / f"{name}.json").read_text()) for name in names)
        draw_tradeoff(*files, docs / "pictures" / "experiments-h100.png")
        draw_denoisers(denoisers, docs / "pictures" / "dit-cifar10.png")
    changed = 0
    for file in (ROOT / "README.md", *sorted(docs.glob("*.md"))):
        old = file.read_text()
        new = MARKED.sub(lambda m, folder=file.parent: m[1] + block(m[2], folder) + m[3], old)
        changed |= new != old
        if not args.check:
            file.write_text(new)
    return int(changed and args.check)


if __name__ == "__main__":
    sys.exit(main())
