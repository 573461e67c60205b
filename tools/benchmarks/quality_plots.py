"""Figures of a quality file (mixers, conversions, kept softmax layers) and of a DiT file."""

from pathlib import Path
from typing import Any

import numpy as np

from zoo.conversion.cost_model import predict_times
from zoo.plotting import COLORS, legend_below, plain_axes, pyplot, save_figure

TITLES = {  # experiment -> what a reader calls it
    "cifar10": "CIFAR-10, 64 tokens",
    "cifar256": "CIFAR-10, 256 tokens",
    "imagenette256": "Imagenette, 256 tokens",
    "cifar256_convert": "CIFAR-10, 256 tokens, converted",
    "cifar256_b128_convert": "CIFAR-10, 256 tokens, converted, batch 128",
    "imagenette256_convert": "Imagenette, 256 tokens, converted",
}
IMAGES_PER_STEP = 256
TARGET = 1.05  # Fréchet distance relative to the control's
SOURCE, CONTROL = "cifar10_dit", "control-0"
RUNS = {  # run with a loss curve -> what a reader calls it
    CONTROL: "softmax (control)",
    "multipole_radius3_degree0-0": "multipole, radius 3, degree 0, distilled",
    "multipole-0": "multipole, radius 2, distilled",
    "multipole_degree0-0": "multipole, radius 2, degree 0, distilled",
    "taylor2_softmax4-0": "taylor2, 4 softmax blocks",
    "taylor2-0": "taylor2",
}
SPACES = {"Frechet ViT": ("ViT", COLORS[2]), "Frechet ResNet-18": ("ResNet-18", COLORS[3])}


def draw_quality(result: dict[str, Any], file: Path) -> None:
    """Draw the test rows of a quality file.

    Panels: each experiment from scratch with one dot per seed; each conversion before and after fine-tuning, with its
    control; top-1 over the number of softmax layers kept.
    """
    plt = pyplot()
    rows = [row for row in result["rows"] if "held out" not in row["data"]]
    scratch = _experiments([row for row in rows if row["source"] == "scratch"])
    recipes = _experiments([row for row in rows if row["metric"] == "top1 after calibration"])
    figure = plt.figure(figsize=(12, 3.3 * (1 + len(recipes))), layout="constrained")
    top, *others = figure.subfigures(1 + len(recipes), 1, squeeze=False)[:, 0]
    for axes, (name, mine) in zip(top.subplots(1, len(scratch), squeeze=False)[0], scratch.items(), strict=True):
        _dots(axes, mine, f"{TITLES.get(name, name)}, from scratch")
    for part, name in zip(others, recipes, strict=True):
        left, right = part.subplots(1, 2)
        inside = [row for row in rows if row["experiment"] == name]
        _conversions(left, inside, TITLES.get(name, name))
        _kept(right, inside)
    save_figure(figure, file, dpi=130)


def _experiments(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    names = dict.fromkeys(row["experiment"] for row in rows)
    return {name: [row for row in rows if row["experiment"] == name] for name in names}


def _by_mixer(rows: list[dict[str, Any]], without: tuple[str, ...] = ()) -> dict[str, list[float]]:
    """Return the values of each mixer with its options, except the options `without`."""
    found: dict[str, list[float]] = {}
    for row in rows:
        options = [f"{k}={v}".replace(" ", "") for k, v in row["options"].items() if k not in without]
        found.setdefault(" ".join([row["mixer"], *options]), []).append(row["value"])
    return found


def _dots(axes: Any, rows: list[dict[str, Any]], title: str) -> None:
    means = {name: (float(np.mean(values)), values) for name, values in _by_mixer(rows).items()}
    for place, (name, (mean, values)) in enumerate(sorted(means.items(), key=lambda item: item[1][0])):
        color = COLORS[1] if name == "softmax" else COLORS[2]
        axes.plot(values, [place] * len(values), "o", color=color, alpha=0.5, markersize=5)
        axes.plot([mean], [place], "|", color=color, markersize=18, markeredgewidth=2.5)
    axes.set_yticks(range(len(means)), sorted(means, key=lambda name: means[name][0]), fontsize=8)
    axes.set(xlabel="top-1 (%), each seed and the mean", ylim=(-0.6, len(means) - 0.4))
    axes.set_title(title, fontsize=10)
    plain_axes(axes, "x")


def _conversions(axes: Any, rows: list[dict[str, Any]], title: str) -> None:
    early = _by_mixer([row for row in rows if row["metric"] == "top1 after calibration"])
    tuned = _by_mixer([row for row in rows if row["metric"] == "top1" and row["source"] == "converted"])
    names = sorted(tuned, key=lambda name: float(np.mean(tuned[name])))
    for place, name in enumerate(names):
        axes.barh(place, np.mean(tuned[name]), color=COLORS[2], label=None if place else "fine-tuned")
        if name in early:  # absent if a run was stopped before evaluation
            axes.barh(place, np.mean(early[name]), color=COLORS[3], label=None if place else "calibrated")
    axes.axvline(_control(rows), color=COLORS[4], linestyle="--", label="softmax, trained further (control)")
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set(xlabel="top-1 (%), mean over seeds", title=title)
    legend_below(axes, 3)
    plain_axes(axes, "x")


def _kept(axes: Any, rows: list[dict[str, Any]]) -> None:
    control = {row["seed"]: row["value"] for row in rows if row["source"] == "control"}
    gaps = [
        row | {"value": row["value"] - control[row["seed"]]}
        for row in rows
        if row["metric"] == "top1" and row["source"] == "converted"
    ]
    lines: dict[str, dict[int, float]] = {}
    for n in sorted({_layers_kept(row) for row in gaps}):
        mine = _by_mixer([row for row in gaps if _layers_kept(row) == n], ("keep_softmax",))
        for name, values in mine.items():
            lines.setdefault(name, {})[n] = float(np.mean(values))
    lines = {name: points for name, points in lines.items() if len(points) > 1}
    for color, (name, points) in zip(COLORS[2:], lines.items(), strict=False):
        axes.plot(list(points), list(points.values()), marker="o", color=color, label=name)
    axes.set_xticks(sorted({n for points in lines.values() for n in points}))
    axes.axhline(0, color="gray", linestyle="--", label="softmax in all layers (control)")
    axes.set(xlabel="softmax layers kept", ylabel="top-1 minus control (points)", title="Softmax layers kept")
    legend_below(axes, 3)
    plain_axes(axes, "y")


def _control(rows: list[dict[str, Any]]) -> float:
    """Return the mean over seeds of softmax with the same additional budget."""
    seeds = {row["seed"]: row["value"] for row in rows if row["source"] == "control"}
    return float(np.mean(list(seeds.values())))


def _layers_kept(row: dict[str, Any]) -> int:
    """Return the number of layers in keep_softmax: auto:2, or a list."""
    kept = row["options"].get("keep_softmax", [])
    return int(kept.removeprefix("auto:")) if isinstance(kept, str) else len(kept)


EXPERIMENT_MODELS = {  # title -> (experiment, model in the model table)
    "Imagenette, 1,024 tokens, 30 epochs": ("imagenette1024", "vit_width192_patch4"),
    "Imagenette, 4,096 tokens, 10 epochs": ("imagenette4096", "vit_width192_patch2"),
}


def draw_tradeoff(quality: dict[str, Any], speed: dict[str, Any], file: Path) -> None:
    """Draw accuracy from scratch over training speed, one panel per experiment that both files contain.

    Shows mean and range over the seeds of a quality file, and images per second of a models file.
    """
    plt = pyplot()
    panels = {title: _scratch_and_speed(quality, speed, *names) for title, names in EXPERIMENT_MODELS.items()}
    figure, axes = plt.subplots(1, len(panels), figsize=(4.5 * len(panels), 3.4), layout="constrained", squeeze=False)
    for panel, (name, points) in zip(axes[0], panels.items(), strict=True):
        for mixer, (values, per_second) in points.items():
            mean, color = float(np.mean(values)), COLORS[1] if mixer == "softmax" else COLORS[2]
            ends = [[mean - min(values)], [max(values) - mean]]
            panel.errorbar([per_second], [mean], yerr=ends, fmt="o", color=color, capsize=3)
            panel.annotate(mixer, (per_second, mean), textcoords="offset points", xytext=(7, 4), fontsize=9)
        panel.set(xlabel="training images per second", ylabel="top-1 (%)", title=name)
        panel.margins(0.25)
        plain_axes(panel)
    save_figure(figure, file, dpi=130)


def _scratch_and_speed(
    quality: dict[str, Any], speed: dict[str, Any], experiment: str, model: str
) -> dict[str, tuple[list[float], float]]:
    """Return (top-1 per seed, training images per second) of mixers with default options in both files."""
    timed = {r["mixer"]: r["per_second"] for r in speed["rows"] if (r["model"], r["mode"]) == (model, "train")}
    found: dict[str, tuple[list[float], float]] = {}
    for row in quality["rows"]:
        plain = row["options"] in ({}, {"feature_map": "power"})
        if (row["experiment"], row["source"]) == (experiment, "scratch") and plain and row["mixer"] in timed:
            found.setdefault(row["mixer"], ([], timed[row["mixer"]]))[0].append(row["value"])
    return found


def draw_denoisers(result: dict[str, Any], file: Path) -> None:
    """Draw the losses of seed 0 over the steps, and a dot per seed for each distance over the control's."""
    figure, (left, right) = pyplot().subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    _losses(left, result["curves"])
    _distances(right, result["rows"])
    save_figure(figure, file, dpi=130)


def _losses(axes: Any, curves: dict[str, list[list[float]]]) -> None:
    for number, (name, label) in enumerate(RUNS.items()):
        steps = [images / IMAGES_PER_STEP for images, _ in curves[name]]
        color = COLORS[1] if name == CONTROL else COLORS[(2 + number) % len(COLORS)]
        axes.plot(steps, [loss for _, loss in curves[name]], marker=".", label=label, color=color)
    axes.axhline(curves[SOURCE][-1][1], color=COLORS[0], linestyle=":", label="softmax before")
    axes.set(xlabel="steps of fine-tuning", ylabel="validation loss (EMA weights)", title="Fine-tuning, seed 0")
    axes.set_ylim(0.1728, 0.1795)
    plain_axes(axes)
    legend_below(axes, 2)


def _distances(axes: Any, rows: list[dict[str, Any]]) -> None:
    control = {(r["metric"], r["seed"]): r["value"] for r in rows if r["source"] == "control"}
    converted = [r for r in rows if r["source"] == "converted" and r["metric"] in SPACES]
    models = list(dict.fromkeys(_label(r["options"]) for r in converted))
    for number, (metric, (space, color)) in enumerate(SPACES.items()):
        mine = [r for r in converted if r["metric"] == metric]
        places = [models.index(_label(r["options"])) + 0.1 * (2 * number - 1) for r in mine]
        axes.plot([r["value"] / control[metric, r["seed"]] for r in mine], places, "o", color=color, label=space)
    axes.axvline(1, color=COLORS[1], label="softmax (control)")
    axes.axvline(TARGET, color=COLORS[4], linestyle="--", label="target")
    axes.set_yticks(range(len(models)), models)
    axes.set(xlabel="Fréchet distance relative to the control, same seed", title="Samples, three seeds")
    axes.margins(y=0.5)
    plain_axes(axes, "x")
    legend_below(axes, 4)


def _label(options: dict[str, Any]) -> str:
    distilled = "not distilled" if options.get("distill.output") == 0 else "distilled"
    return f"multipole, radius {options['radius']},\ndegree {options['degree']}, {distilled}"


def draw_densities(result: dict[str, Any], file: Path) -> None:
    """Draw the divergence of adaptive multipole over its predicted forward speed, a line per number of tokens and key
    tile, a point per density."""
    lines: dict[tuple[int, int], dict[float, list[float]]] = {}
    for row in result["rows"]:
        if (row["select"], row["far"]) == ("error", "first") and row["k_tile"] >= 16:
            points = lines.setdefault((row["tokens"], row["k_tile"]), {})
            points.setdefault(1 / round(1 / row["density"]), []).append(row["kl"])
    figure, axes = pyplot().subplots(figsize=(6, 3.6))
    for color, ((tokens, k_tile), points) in zip(COLORS[1:], sorted(lines.items()), strict=False):
        for density, kl in points.items():
            times = predict_times("multipole", {"density": density, "k_tile": k_tile}, 4, 16, tokens, 64)
            assert times.mixer_us is not None
            place = (times.softmax_us / times.mixer_us, float(np.mean(kl)))
            label = f"{tokens} tokens, key tiles of {k_tile}" if density == min(points) else None
            axes.plot(*place, marker="o", color=color, label=label)
            axes.annotate(f"1/{1 / density:g}", place, textcoords="offset points", xytext=(5, 3), fontsize=7)
    axes.set(yscale="log", xlabel="predicted forward speed, softmax = 1", ylabel="KL to softmax (nats)")
    axes.legend(fontsize=7)
    plain_axes(axes)
    figure.tight_layout()
    save_figure(figure, file, dpi=130)
