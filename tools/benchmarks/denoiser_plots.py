"""Figure of a DiT file: losses of the fine-tuning, and Fréchet distances relative to the control."""

from pathlib import Path
from typing import Any

from zoo.plotting import COLORS, legend_below, plain_axes, pyplot, save_figure

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
