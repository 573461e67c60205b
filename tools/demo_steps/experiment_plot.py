"""Figure of an experiment: learning curves, accuracies and attention maps."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from zoo.eval.attention.plots import mark_token
from zoo.plotting import COLORS, legend_below, plain_axes, pyplot, save_figure


@dataclass
class Panel:
    """Data of one model in the figure.

    name: title. accuracies: top-1 in percent by stage. curve: (images seen, top-1). maps: attention maps [H, W] of one
    query token by title.
    """

    name: str
    bars: dict[str, float] = field(default_factory=dict)
    curve: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    attention: dict[str, np.ndarray] = field(default_factory=dict)


def draw_experiment(panels: list[Panel], image: np.ndarray, query: tuple[float, float], title: str, file: Path) -> None:
    """Write a PNG with learning curves and accuracies above, the image and attention maps below.

    image: [H, W] or [H, W, 3]. query: (row, column) of the query token on the grid of the attention maps.
    """
    plt = pyplot()
    figure = plt.figure(figsize=(11, 5.8), layout="constrained")
    top, bottom = figure.subfigures(2, 1, height_ratios=(1.8, 1))
    left, right = top.subplots(1, 2, width_ratios=(1, 1.15))
    _curves(left, panels)
    _bars(right, panels)
    _attention(bottom, panels, image, query)
    figure.suptitle(title, fontsize=12)
    save_figure(figure, file, dpi=150)


def _curves(axes: Any, panels: list[Panel]) -> None:
    for panel, color in zip(panels, COLORS, strict=False):
        axes.plot(*panel.curve, color=color, label=panel.name, marker="o", markersize=3)
    axes.set(xlabel="images seen", ylabel="top-1 accuracy (%)", title="Training, then fine-tuning")
    legend_below(axes, len(panels))
    plain_axes(axes)


def _bars(axes: Any, panels: list[Panel]) -> None:
    labels, values, colors = [], [], []
    for panel, color in zip(panels, COLORS, strict=False):
        for stage, value in panel.bars.items():
            labels.append(f"{panel.name}\n{stage}")
            values.append(value)
            colors.append((color, 0.4 if stage == "zero-shot" else 1.0))
    places = np.arange(len(values))
    axes.bar(places, values, color=colors, width=0.72)
    for place, value in zip(places, values, strict=True):
        axes.text(place, value + 1, f"{value:.1f}", ha="center", fontsize=8)
    axes.set_xticks(places, labels, fontsize=7.5)
    axes.set(ylim=(0, 108), ylabel="top-1 accuracy (%)", title="Before and after fine-tuning")
    plain_axes(axes, "y")


def _attention(figure: Any, panels: list[Panel], image: np.ndarray, query: tuple[float, float]) -> None:
    maps = {title: picture for panel in panels for title, picture in panel.attention.items()}
    grid = next(iter(maps.values())).shape
    axes = figure.subplots(1, len(maps) + 1)
    for place, (title, picture) in zip(axes, {"image and query token": image, **maps}.items(), strict=True):
        place.imshow(picture, cmap="gray" if picture is image else "magma")
        place.set_title(title, fontsize=8)
        mark_token(place, query, grid, picture.shape)
        place.set_axis_off()
    figure.suptitle("Attention of one head for one query token, before (softmax) and after conversion", fontsize=11)
