"""Table and figure of the arena."""

import math
from pathlib import Path
from statistics import geometric_mean, mean, stdev
from typing import Any

from zoo.io import markdown_table
from zoo.plotting import pyplot, save_figure

Rows = list[dict[str, Any]]
Scores = dict[tuple[str, str], Rows]
Rates = dict[tuple[str, str], float]  # mixer, task -> tokens per second
FIRST = "la"  # first-order attention with the feature map `power`
GROUPS = {
    "order above one": ("hla2", "ahla", "hla3", "poly", "taylor2", "strassen", "multilinear", "resolvent"),
    "blocks": ("mhla", "mhla2", "multipole"),
    "delta rule": ("deltanet", "gdn", "hdla"),
}
ORDERS = {  # of the figure
    "softmax, low rank": ("softmax", "mega", "multipole", "flare", "linformer", "nystrom"),
    "order 1": ("la", "mhla", "mala", "rala", "inline", "efficient", "performer", "rfa"),
    "order 1, decays": ("retnet", "gla", "mamba2"),
    "order 1, delta rule": ("deltanet", "gdn", "hdla"),
    "order 2": ("hla2", "ahla", "mhla2", "taylor2", "strassen", "multilinear", "triple", "simplex2"),
    "orders to 3": ("poly", "hla3"),
    "all orders": ("resolvent", "mesa"),
}
GAP = 0.4  # rows between orders
LEAST_ERROR = 0.03  # with the colour of 100 % right
CLEAR = 2  # standard errors
SCORES = """Percent right, or relative L2 error (less is better): mean +- deviation over seeds (number of seeds), at the
best learning rate that was run. Parameters: smallest and largest network. State: numbers per head, without vectors,
that are kept of earlier tokens; without a causal form, what a query reads of all tokens (N tokens, D channels,
M blocks, latents or means, R random features). Tokens/s: training steps of a process that has the GPU alone ("-": not
timed)."""
GAINS = """Best mixer of each group minus `la` (first order, feature map `power`), +- standard error; bold: above two
standard errors and not rounded to zero. The best mixer is chosen by the same scores, which favours groups with more
mixers. Cost relative to `la`: parameters{measured}."""


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


def text(result: dict[str, Any], speeds: Rows | None = None, states: dict[str, str] | None = None) -> str:
    """Return Markdown: scores, and the gains of higher orders, blocks and delta rules over first order.

    speeds: rows of processes that had a GPU alone; without them, the rows of the result. states: mixer -> numbers per
    head of its state, a column of the table.
    """
    tasks, mixers, cells = by_cell(result)
    rates = speeds_of(result["rows"] if speeds is None else speeds)
    constant = {task: row["constant"] for (_, task), found in reversed(cells.items()) for row in found}  # of the first
    timed = list(dict.fromkeys(task for _, task in rates))
    head = ["mixer", *tasks, "parameters", *["state"] * bool(states), *(f"tokens/s, {task}" for task in timed)]
    lines = [
        [m, *(cell(cells.get((m, t), [])) for t in tasks), parameters(m, cells)]
        + [(states or {}).get(m.partition(" ")[0], "-")] * bool(states)
        + [f"{rates[m, t]:,.0f}" if (m, t) in rates else "-" for t in timed]
        for m in mixers
    ]  # fmt: skip
    lines.append(["constant answer", *(f"{constant[t]:.4g}" for t in tasks), *["-"] * (len(head) - 1 - len(tasks))])
    parts = ["\n".join(markdown_table(head, lines)), SCORES, *elsewhere(result)]
    return "\n\n".join([*parts, *against_first_order(result, speeds)])


def elsewhere(result: dict[str, Any]) -> list[str]:
    """Say which scores are of another machine than the others."""
    found: dict[str, dict[str, dict[str, None]]] = {}
    for row in result["rows"]:
        if "hardware" in row:
            found.setdefault(row["hardware"], {}).setdefault(row["mixer"], {})[title(row)] = None
    return [
        f"On {machine}: " + "; ".join(f"{mixer} on {', '.join(tasks)}" for mixer, tasks in mixers.items()) + "."
        for machine, mixers in found.items()
    ]


def against_first_order(result: dict[str, Any], speeds: Rows | None = None) -> list[str]:
    """Return the table of gains, its legend, and where a group is clearly better than `la`; nothing without `la`."""
    tasks, _, cells = by_cell(result)
    rates = speeds_of(result["rows"] if speeds is None else speeds)
    table = gains(tasks, cells, rates)
    timed = ", ".join(dict.fromkeys(task for _, task in rates))
    measured = f", and speed, the geometric mean over {timed}, or over the tasks that it names" if timed else ""
    return [table, GAINS.format(measured=measured), answers(tasks, cells, rates)] if table else []


def speeds_of(found: Rows) -> Rates:
    """Return the largest number of tokens per second of each mixer and task."""
    rates: Rates = {}
    for row in (row for row in found if "hardware" not in row):
        key = row["mixer"], title(row)
        rates[key] = max(rates.get(key, 0), row["tokens_per_second"])
    return rates


def cell(found: Rows) -> str:
    """Format the scores of one mixer on one task: percent right, or relative L2 error."""
    if not found:
        return "-"
    scores = [row["score"] for row in found]
    digits = 1 if is_accuracy(found) else 4
    spread = f" +- {stdev(scores):.{digits}f}" if len(scores) > 1 else ""
    return f"{mean(scores):.{digits}f}{spread} ({len(scores)})"


def parameters(mixer: str, cells: Scores) -> str:
    """Return the range of parameters of a mixer over its tasks."""
    counts = [row["parameters"] for (name, _), found in cells.items() if name == mixer for row in found]
    return " to ".join(f"{n:,}" for n in dict.fromkeys((min(counts), max(counts))))


def gains(tasks: list[str], cells: Scores, rates: Rates) -> str:
    """Return a table of the best mixer of each group minus `la`; bold from 2 standard errors of the difference."""
    lines = []
    for task in (task for task in tasks if (FIRST, task) in cells):
        best = [best_of(names, task, cells) for names in GROUPS.values()]
        lines.append(
            [task, cell(cells[FIRST, task]), *(gain(name, task, cells, rates) if name else "-" for name in best)]
        )
    return "\n".join(markdown_table(["task", FIRST, *GROUPS], lines)) if lines else ""


def answers(tasks: list[str], cells: Scores, rates: Rates) -> str:
    """Say on which tasks the best mixer of a group is clearly better than `la`, and on which none is."""
    better, equal, unknown = [], [], []
    for task in (task for task in tasks if (FIRST, task) in cells):
        best = {group: best_of(names, task, cells) for group, names in GROUPS.items()}
        found = {group: difference(name, task, cells) for group, name in best.items() if name}
        clear = [
            group
            for group, (change, error) in found.items()
            if change > 0 and error is not None and is_clear(change, error, is_accuracy(cells[FIRST, task]))
        ]
        if clear:
            said = "; ".join(f"{group}: {gain(best[group], task, cells, rates)}" for group in clear)
            better.append(f"- {task}: {said}.")
        elif all(error is None for _, error in found.values()):  # with one seed
            unknown += [task] if found else []
        else:
            equal.append(task)
    parts = ["Clearly better than first order:\n\n" + "\n".join(better)] if better else []
    parts += [f"No group is clearly better than first order on {', '.join(equal)}."] if equal else []
    parts += [f"One seed, so that nothing is clear: {', '.join(unknown)}."] if unknown else []
    return "\n\n".join(parts)


def best_of(names: tuple[str, ...], task: str, cells: Scores) -> str:
    """Return the mixer (with options) among `names` with the best score, or an empty string."""
    own = [m for m, t in cells if t == task and m.partition(" ")[0] in names]
    return max(own, key=lambda m: quality(cells[m, task]), default="")


def difference(mixer: str, task: str, cells: Scores) -> tuple[float, float | None]:
    """Return by how much a mixer is better than `la`, and the standard error; None with one seed."""
    own, first = cells[mixer, task], cells[FIRST, task]
    change = quality(own) - quality(first)
    if min(len(own), len(first)) < 2:
        return change, None
    return change, math.hypot(*(stdev(row["score"] for row in part) / len(part) ** 0.5 for part in (own, first)))


def is_clear(change: float, error: float, accuracy: bool) -> bool:
    """Whether a difference is above two standard errors and is not rounded to zero."""
    return abs(change) > CLEAR * error and abs(change) >= (0.05 if accuracy else 0.00005)


def gain(mixer: str, task: str, cells: Scores, rates: Rates) -> str:
    """Format the difference of two mean scores and the ratios of parameters and of speed."""
    own, first = cells[mixer, task], cells[FIRST, task]
    digits = 1 if is_accuracy(own) else 4
    change, error = difference(mixer, task, cells)
    shown = f"{change if is_accuracy(own) else -change:+.{digits}f}"
    if error is not None:
        shown = f"**{shown}**" if is_clear(change, error, is_accuracy(own)) else shown
        shown += f" +- {error:.{digits}f}"
    both = [t for m, t in rates if m == mixer and (FIRST, t) in rates]
    cost = f"parameters x {own[0]['parameters'] / first[0]['parameters']:.2f}"
    if both:
        cost += f", speed x {geometric_mean(rates[mixer, t] / rates[FIRST, t] for t in both):.2f}"
        cost += "" if len(both) == sum(m == FIRST for m, _ in rates) else f" on {', '.join(both)}"
    return f"{mixer} {shown} ({cost})"


def draw(result: dict[str, Any], file: Path) -> None:
    """Draw mixers, by order, against tasks: the mean score in each cell; equal scores have equal colours."""
    tasks, mixers, cells = by_cell(result)
    places = heights(mixers)
    plt = pyplot()
    bottom = max(places.values()) + 0.5
    figure, axes = plt.subplots(figsize=(2.4 + 1.1 * len(tasks), 1.5 + 0.35 * bottom))
    for (mixer, task), found in cells.items():
        x, y, score = tasks.index(task), places[mixer], abs(quality(found))
        color = plt.get_cmap("YlGn")(0.7 * goodness(score, is_accuracy(found)))
        axes.add_patch(plt.Rectangle((x - 0.5, y - 0.5), 1, 1, color=color))
        shown = f"{score:.1f}" if is_accuracy(found) else f"{score:.3f}"
        axes.text(x, y, shown, ha="center", va="center", fontsize=8)
    for name, members in ORDERS.items():
        if own := [places[m] for m in mixers if m.partition(" ")[0] in members]:
            axes.text(len(tasks) - 0.4, mean(own), name, va="center", fontsize=8)
            axes.axhline(max(own) + 0.5 + GAP / 2, color="0.7", linewidth=0.6)
    axes.set(xlim=(-0.5, len(tasks) - 0.5), ylim=(bottom, -0.5))
    axes.set_yticks(list(places.values()), list(places), fontsize=8)
    axes.set_xticks(range(len(tasks)), [t.replace(" (", "\n(") for t in tasks], fontsize=7, rotation=40, ha="right")
    axes.set_title("Percent right, or relative L2 error", fontsize=9)
    figure.tight_layout()
    save_figure(figure, file, dpi=130)


def heights(mixers: list[str]) -> dict[str, float]:
    """Return the row of each mixer (with options) in the figure, by order, with a gap between the orders."""
    found, y = {}, 0.0
    for members in ORDERS.values():
        own = [m for m in mixers if m.partition(" ")[0] in members]
        for mixer in sorted(own, key=lambda m: members.index(m.partition(" ")[0])):
            found[mixer], y = y, y + 1
        y += GAP * bool(own)
    return found


def goodness(score: float, accuracy: bool) -> float:
    """Return 0 for nothing right or an error of 1, and 1 for all right or the smallest error; errors by logarithm."""
    place = score / 100 if accuracy else math.log(max(score, 1e-9)) / math.log(LEAST_ERROR)
    return min(max(place, 0.0), 1.0)
