"""Table and figure of the arena."""

import math
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from zoo.io import markdown_table
from zoo.plotting import pyplot, save_figure

Rows = list[dict[str, Any]]
Scores = dict[tuple[str, str], Rows]
FIRST = "la"  # first-order attention with the feature map `power`
GROUPS = {
    "order above one": ("hla2", "ahla", "hla3", "poly", "taylor2", "strassen", "multilinear", "resolvent"),
    "blocks": ("mhla", "mhla2", "multipole"),
    "delta rule": ("deltanet", "gdn", "hdla"),
}
CLEAR = 2  # standard errors
SCORES = """Percent right, or relative L2 error (less is better): mean +- deviation over seeds (number of seeds), at the
best learning rate that was run. Speeds are comparable only if the processes did not share a GPU."""
GAINS = """Best mixer of each group minus `la` (first order, feature map `power`), +- standard error; bold: above two
standard errors. The best mixer is chosen by the same scores, which favours groups with more mixers."""


def by_cell(result: dict[str, Any]) -> tuple[list[str], list[str], Scores]:
    """Return tasks, mixers, and the rows of each (mixer, task) at its best learning rate, in the order of the file."""
    found: dict[tuple[str, str], dict[float, Rows]] = {}
    for row in result["rows"]:
        found.setdefault((row["mixer"], title(row)), {}).setdefault(row["lr"], []).append(row)
    cells = {key: max(rates.values(), key=lambda r: (len(r), quality(r))) for key, rates in found.items()}
    mixers, tasks = (list(dict.fromkeys(key[i] for key in cells)) for i in range(2))
    return tasks, mixers, cells


def title(row: dict[str, Any]) -> str:
    """Name a task with its size, its form and the depth of the network."""
    form = ", causal" if row["causal"] else ""
    return f"{row['task']} {row['size']} ({row['layers']} layers{form})"


def quality(found: Rows) -> float:
    """Mean accuracy, or the negative mean error."""
    return mean(row["score"] for row in found) * (1 if is_accuracy(found) else -1)


def is_accuracy(found: Rows) -> bool:
    return found[0]["measure"] == "accuracy"


def text(result: dict[str, Any]) -> str:
    """Return Markdown: scores, and the gains of higher orders, blocks and delta rules over first order."""
    tasks, mixers, cells = by_cell(result)
    constant = {task: row["constant"] for (_, task), found in cells.items() for row in found}
    lines = [[m, *(cell(cells.get((m, t), [])) for t in tasks), *costs(m, cells)] for m in mixers]
    lines.append(["constant answer", *(f"{constant[t]:.4g}" for t in tasks), "-", "-"])
    parts = ["\n".join(markdown_table(["mixer", *tasks, "parameters", "tokens/s"], lines)), SCORES]
    if differences := gains(tasks, cells):
        parts += [differences, GAINS]
    return "\n\n".join(parts)


def cell(found: Rows) -> str:
    """Format the scores of one mixer on one task: percent right, or relative L2 error."""
    if not found:
        return "-"
    scores = [row["score"] for row in found]
    digits = 1 if is_accuracy(found) else 4
    spread = f" +- {stdev(scores):.{digits}f}" if len(scores) > 1 else ""
    return f"{mean(scores):.{digits}f}{spread} ({len(scores)})"


def costs(mixer: str, cells: Scores) -> list[str]:
    """Return the range of parameters and of tokens per second of a mixer over its tasks."""
    own = [row for (name, _), found in cells.items() if name == mixer for row in found]
    ranges = ([row[key] for row in own] for key in ("parameters", "tokens_per_second"))
    return [f"{min(r):,} to {max(r):,}" for r in ranges]


def gains(tasks: list[str], cells: Scores) -> str:
    """Return a table of the best mixer of each group minus `la`; bold from 2 standard errors of the difference."""
    lines = []
    for task in tasks:
        first = cells.get((FIRST, task), [])
        if len(first) < 2:
            continue
        best = {group: best_of(names, task, cells) for group, names in GROUPS.items()}
        lines.append([task, cell(first), *(gain(name, cells.get((name, task), []), first) for name in best.values())])
    return "\n".join(markdown_table(["task", FIRST, *GROUPS], lines)) if lines else ""


def best_of(names: tuple[str, ...], task: str, cells: Scores) -> str:
    """Return the mixer (with options) among `names` with the best score, or an empty string."""
    own = [m for m, t in cells if t == task and m.partition(" ")[0] in names]
    return max(own, key=lambda m: quality(cells[m, task]), default="")


def gain(mixer: str, found: Rows, first: Rows) -> str:
    """Format the difference of two mean scores and the ratio of parameters."""
    if not found:
        return "-"
    own, other = ([row["score"] for row in part] for part in (found, first))
    digits = 1 if is_accuracy(found) else 4
    shown = f"{mean(own) - mean(other):+.{digits}f}"
    if len(own) > 1:
        error = math.hypot(*(stdev(scores) / len(scores) ** 0.5 for scores in (own, other)))
        clear = abs(mean(own) - mean(other)) > CLEAR * error
        shown = f"**{shown}** +- {error:.{digits}f}" if clear else f"{shown} +- {error:.{digits}f}"
    return f"{mixer} {shown}, parameters x {found[0]['parameters'] / first[0]['parameters']:.2f}"


def draw(result: dict[str, Any], file: Path) -> None:
    """Draw mixers against tasks: the mean score in each cell, its colour from the worst to the best of the task."""
    tasks, mixers, cells = by_cell(result)
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(1.2 + 1.1 * len(tasks), 1.5 + 0.35 * len(mixers)))
    for x, task in enumerate(tasks):
        found = {m: cells[m, task] for m in mixers if (m, task) in cells}
        values = {m: quality(rows) for m, rows in found.items()}
        low, high = min(values.values()), max(values.values())
        for y, mixer in enumerate(mixers):
            if mixer in found:
                place = (values[mixer] - low) / (high - low) if high > low else 0.5
                color = plt.get_cmap("YlGn")(0.1 + 0.7 * place)
                axes.add_patch(plt.Rectangle((x - 0.5, y - 0.5), 1, 1, color=color))
                shown = f"{abs(values[mixer]):.1f}" if is_accuracy(found[mixer]) else f"{abs(values[mixer]):.3f}"
                axes.text(x, y, shown, ha="center", va="center", fontsize=8)
    axes.set(xlim=(-0.5, len(tasks) - 0.5), ylim=(len(mixers) - 0.5, -0.5))
    axes.set_yticks(range(len(mixers)), mixers, fontsize=8)
    axes.set_xticks(range(len(tasks)), [t.replace(" (", "\n(") for t in tasks], fontsize=7, rotation=40, ha="right")
    axes.set_title("Percent right, or relative L2 error", fontsize=9)
    figure.tight_layout()
    save_figure(figure, file, dpi=130)
