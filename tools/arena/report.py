"""Table and figure of the arena."""

from pathlib import Path
from statistics import mean, stdev
from typing import Any

from zoo.io import markdown_table
from zoo.plotting import pyplot, save_figure

Scores = dict[tuple[str, str], list[dict[str, Any]]]


def by_cell(result: dict[str, Any]) -> tuple[list[str], list[str], Scores]:
    """Return tasks, mixers, and the rows of each (mixer, task), in the order of the file."""
    cells: Scores = {}
    for row in result["rows"]:
        cells.setdefault((row["mixer"], title(row)), []).append(row)
    mixers, tasks = (list(dict.fromkeys(key[i] for key in cells)) for i in range(2))
    return tasks, mixers, cells


def title(row: dict[str, Any]) -> str:
    """Name a task with its size and the depth of the network."""
    limited = f", {row['samples']} examples" if row["samples"] else ""
    return f"{row['task']} {row['size']} ({row['layers']} layers{limited})"


def text(result: dict[str, Any]) -> str:
    """Return Markdown: mean of the scores over seeds, +- their deviation, (number of seeds); and speed."""
    tasks, mixers, cells = by_cell(result)
    lines = [[m, *(cell(cells.get((m, t), [])) for t in tasks), *costs(m, cells)] for m in mixers]
    return "\n".join(markdown_table(["mixer", *tasks, "parameters", "tokens/s"], lines))


def cell(found: list[dict[str, Any]]) -> str:
    """Format the scores of one mixer on one task: percent right, or relative L2 error."""
    if not found:
        return "-"
    scores = [row["score"] for row in found]
    digits = 1 if found[0]["measure"] == "accuracy" else 4
    spread = f" +- {stdev(scores):.{digits}f}" if len(scores) > 1 else ""
    return f"{mean(scores):.{digits}f}{spread} ({len(scores)})"


def costs(mixer: str, cells: Scores) -> list[str]:
    """Return the range of parameters and of tokens per second of a mixer over its tasks."""
    own = [row for (name, _), found in cells.items() if name == mixer for row in found]
    ranges = ([row[key] for row in own] for key in ("parameters", "tokens_per_second"))
    return [f"{min(r):,} to {max(r):,}" for r in ranges]


def draw(result: dict[str, Any], file: Path) -> None:
    """Draw mixers against tasks: the mean score in each cell, its colour from the worst to the best of the task."""
    tasks, mixers, cells = by_cell(result)
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(1.2 + 1.1 * len(tasks), 1.5 + 0.35 * len(mixers)))
    for x, task in enumerate(tasks):
        scores = {m: mean(row["score"] for row in cells[m, task]) for m in mixers if (m, task) in cells}
        accuracy = cells[next(iter(scores)), task][0]["measure"] == "accuracy"
        low, high = min(scores.values()), max(scores.values())
        for y, mixer in enumerate(mixers):
            if mixer in scores:
                place = (scores[mixer] - low) / (high - low) if high > low else 0.5
                color = plt.get_cmap("YlGn")(0.1 + 0.7 * (place if accuracy else 1 - place))
                axes.add_patch(plt.Rectangle((x - 0.5, y - 0.5), 1, 1, color=color))
                shown = f"{scores[mixer]:.1f}" if accuracy else f"{scores[mixer]:.3f}"
                axes.text(x, y, shown, ha="center", va="center", fontsize=8)
    axes.set(xlim=(-0.5, len(tasks) - 0.5), ylim=(len(mixers) - 0.5, -0.5))
    axes.set_yticks(range(len(mixers)), mixers, fontsize=8)
    axes.set_xticks(range(len(tasks)), [t.replace(" (", "\n(") for t in tasks], fontsize=7, rotation=40, ha="right")
    axes.set_title("Percent right, or relative L2 error", fontsize=9)
    figure.tight_layout()
    save_figure(figure, file, dpi=130)
