"""Figures of the speed tables."""

import itertools
from pathlib import Path
from typing import Any

from benchmarks.report import efficiency
from benchmarks.shapes import OPS, PASSES, SHAPES
from zoo.plotting import COLORS, legend_below, plain_axes, pyplot, save_figure

Row = dict[str, Any]


def draw_kernels(result: Row, file: Path) -> None:
    """Draw bars: fraction of the memory bound of our operators with identity map; diamonds: cuDNN SDPA."""
    plt = pyplot()
    figure, panels = plt.subplots(len(PASSES), 1, figsize=(11, 6.5), layout="constrained", sharex=True)
    for axes, which in zip(panels, PASSES, strict=True):
        width = 0.8 / len(OPS)
        for place, op in enumerate(OPS):
            values = [_fraction(result["rows"], shape.sizes, op, "ours", which) for shape in SHAPES.values()]
            where = [i + (place - (len(OPS) - 1) / 2) * width for i in range(len(SHAPES))]
            axes.bar(where, [v or 0 for v in values], 0.9 * width, color=COLORS[place], label=op)
        legend = "softmax, SDPA cuDNN"
        for i, shape in enumerate(SHAPES.values()):
            cudnn = _fraction(result["rows"], shape.sizes, "softmax_attention", "sdpa_cudnn", which)
            if cudnn:
                axes.plot([i - 0.45], [cudnn], marker="D", color="black", ls="", markersize=5, label=legend)
                legend = ""
        axes.axhline(1, color="black", lw=0.8)
        axes.set(ylabel="fraction of the memory bound", title=which.replace("_", " + "), ylim=(0, 1.08))
        plain_axes(axes, "y")
    panels[-1].set_xticks(range(len(SHAPES)), [f"{s.title}\n{s.b} x {s.h} x {s.n} x {s.d}" for s in SHAPES.values()])
    panels[0].legend(frameon=False, fontsize=8, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.12))
    figure.suptitle(
        f"Two-sided operators in bfloat16, packed qkv to packed gradient, {result['hardware']}", fontsize=11
    )
    save_figure(figure, file, dpi=130)


def _fraction(rows: list[Row], sizes: list[int], op: str, impl: str, which: str) -> float | None:
    for row in rows:
        if (row["shape"], row["op"], row["impl"], row["options"], row["pass"]) == (sizes, op, impl, {}, which):
            return row["floor_us"] / row["us"]
    return None


def draw_models(result: Row, file: Path) -> None:
    """Draw lines: images per second against pixels per side, one panel per model, mode and weight dtype.

    Dashed lines are without torch.compile.
    """
    plt = pyplot()
    rows = result["rows"]
    models = sorted({row["model"] for row in rows}, reverse=True)
    modes = sorted({(row["mode"], row["weights"]) for row in rows})
    mixers = list(dict.fromkeys(row["mixer"] for row in rows))
    figure, panels = plt.subplots(
        len(models), len(modes), figsize=(5 * len(modes), 3.6 * len(models)), layout="constrained", squeeze=False
    )
    for line, model in zip(panels, models, strict=True):
        for axes, (mode, weights) in zip(line, modes, strict=True):
            if not any((row["model"], row["mode"], row["weights"]) == (model, mode, weights) for row in rows):
                axes.set_visible(False)
                continue
            for mixer, color, size in zip(mixers, COLORS, (4, 9, 4, 9), strict=False):  # curves that lie on each other
                for compiled in (True, False):
                    key = (model, mode, weights, mixer, compiled)
                    names = ("model", "mode", "weights", "mixer", "compiled")
                    chosen = [row for row in rows if tuple(row[name] for name in names) == key]
                    points = sorted((row["size"], row["per_second"]) for row in chosen)
                    style = {"color": color, "ls": "-" if compiled else "--", "marker": "o", "markersize": size}
                    label = f"{mixer}, {'compiled' if compiled else 'eager'}"
                    axes.plot([p[0] for p in points], [p[1] for p in points], label=label, **style)
            sizes = sorted({row["size"] for row in rows if row["model"] == model})
            title = f"{model}, {mode}, {weights} weights"
            axes.set(xscale="log", yscale="log", title=title, xlabel="image side (pixels)", ylabel="images per second")
            axes.set_xticks(sizes, [str(size) for size in sizes])
            axes.set_xticks([], minor=True)
            plain_axes(axes)
    legend_below(panels[-1][0], len(mixers))
    figure.suptitle(f"Computed in bfloat16, random weights, {result['hardware']}", fontsize=11)
    save_figure(figure, file, dpi=130)


def draw_video(result: Row, file: Path) -> None:
    """Draw bars: speed-up of a step over softmax with its milliseconds, one group per model and mode."""
    plt = pyplot()
    rows = [row for row in result["rows"] if row["compiled"]]
    cases = list(dict.fromkeys((row["model"], row["size"], row["mode"]) for row in rows))
    mixers = list(dict.fromkeys(row["mixer"] for row in rows))
    figure, axes = plt.subplots(figsize=(2.4 + 2.6 * len(cases), 4), layout="constrained")
    width = 0.85 / len(mixers)
    for place, (mixer, color) in enumerate(zip(mixers, itertools.cycle(COLORS), strict=False)):
        label: str | None = mixer
        for i, case in enumerate(cases):
            ms = {r["mixer"]: r["ms"] for r in rows if (r["model"], r["size"], r["mode"]) == case}
            if mixer not in ms or "softmax" not in ms:
                continue
            where, times = i + (place - (len(mixers) - 1) / 2) * width, ms["softmax"] / ms[mixer]
            axes.bar(where, times, 0.92 * width, color=color, label=label)
            axes.text(where, times, f"{ms[mixer]:.0f}", ha="center", va="bottom", fontsize=7)
            label = None
    axes.axhline(1, color="black", lw=0.8)
    axes.set_xticks(range(len(cases)), [f"{model}\n{size} px, {mode}" for model, size, mode in cases], fontsize=8)
    axes.set(title=f"One step, compiled, bfloat16, {result['hardware']}")
    axes.set_ylabel("speed relative to softmax (bars: ms per step)")
    plain_axes(axes, "y")
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    save_figure(figure, file, dpi=130)


def draw_scaling(result: Row, file: Path) -> None:
    """Draw lines: parallel efficiency against the number of GPUs, one panel per model, tokens and mode, of the rows
    with the most layers. Without rows of several GPUs, draw nothing."""
    by_layers = sorted(result["rows"], key=lambda row: row.get("layers") or 0)
    plt, most = pyplot(), {row["model"]: row.get("layers") for row in by_layers}
    rows = [row for row in result["rows"] if row.get("layers") == most[row["model"]]]
    found: dict[tuple, dict[str, dict[int, float]]] = {}  # case -> method -> GPUs -> highest of all batches per GPU
    for row in rows:
        if row["gpus"] > 1 and (pair := efficiency(rows, row)):
            lines = found.setdefault((row["model"], row["tokens"], row["mode"]), {})
            best = lines.setdefault(row["method"], {1: 1.0})
            best[row["gpus"]] = max(best.get(row["gpus"], 0.0), pair[0])
    if not found:
        return
    methods = dict.fromkeys(method for lines in found.values() for method in lines)
    colors = dict(zip(methods, COLORS, strict=False))
    figure, panels = plt.subplots(
        1, len(found), figsize=(3 * len(found), 3.4), layout="constrained", sharey=True, squeeze=False
    )
    for axes, (case, lines) in zip(panels[0], found.items(), strict=True):
        for method, best in lines.items():
            axes.plot(*zip(*sorted(best.items()), strict=True), color=colors[method], marker="o", label=method)
        gpus = sorted({row["gpus"] for row in rows})
        axes.set(title="{}, {} tokens, {}".format(*case), xlabel="GPUs", xticks=gpus, ylim=(0, 1.1))
        axes.title.set_fontsize(8)
        axes.legend(frameon=False, fontsize=8, loc="lower left")
        plain_axes(axes)
    panels[0][0].set_ylabel("efficiency T1 / (n Tn)")
    figure.suptitle(f"Scaling, {result['hardware']}", fontsize=11)
    save_figure(figure, file, dpi=130)
