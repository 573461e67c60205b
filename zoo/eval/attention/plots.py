"""Plots of effective attention: rank and entropy per layer, and maps of query tokens."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from PIL import Image

from zoo.config import Tree
from zoo.plotting import COLORS, legend_below, plain_axes, pyplot, save_figure


class Maps(NamedTuple):
    """Attention maps of one layer for an image.

    rows: a map [H, W] on the token grid per query token (row, column).
    """

    layer: int
    mixer: str
    image: Image.Image
    rows: dict[tuple[int, int], np.ndarray]


def draw_profile(rows: list[Tree], file: Path) -> None:
    """Plot rank, effective rank, entropy and token share per layer, as mean and range over heads, and write a PNG."""
    plt = pyplot()
    figure, axes = plt.subplots(1, 4, figsize=(16, 3.6), layout="constrained")
    titles = {"rank": "rank", "effective_rank": "effective rank", "entropy": "entropy (nats)"}
    titles["token_share"] = "share of the output that depends on the token"
    models = list(dict.fromkeys(row["model"] for row in rows))
    for place, (name, title) in zip(axes, titles.items(), strict=True):
        for number, model in enumerate(models):
            layers = sorted({row["layer"] for row in rows if row["model"] == model})
            heads = [[r[name] for r in rows if (r["model"], r["layer"]) == (model, layer)] for layer in layers]
            color = COLORS[number % len(COLORS)]
            place.plot(layers, [np.mean(h) for h in heads], color=color, marker="o", markersize=3, label=model)
            place.fill_between(layers, [min(h) for h in heads], [max(h) for h in heads], color=color, alpha=0.15)
        place.set(xlabel="layer", title=title)
        place.xaxis.get_major_locator().set_params(integer=True)
        plain_axes(place)
    axes[0].set_ylabel("mean and range over heads")
    legend_below(axes[0], 2)
    save_figure(figure, file, dpi=120)


def draw_maps(maps: list[Maps], title: str, file: Path) -> None:
    """Plot one row per query token, with the marked image and the attention map of each layer, and write a PNG."""
    if not maps:
        return
    plt = pyplot()
    queries = list(maps[0].rows)
    shape = (len(queries), len(maps) + 1)
    figure, axes = plt.subplots(*shape, figsize=(1.7 * shape[1], 1.9 * shape[0]), layout="constrained", squeeze=False)
    for line, query in zip(axes, queries, strict=True):
        line[0].imshow(maps[0].image, cmap="gray")
        line[0].set_title(f"query {query[0]}:{query[1]}", fontsize=8)
        mark_token(line[0], query, maps[0].rows[query].shape, np.asarray(maps[0].image).shape)
        for place, found in zip(line[1:], maps, strict=True):
            place.imshow(found.rows[query], cmap="magma")
            place.set_title(f"layer {found.layer}, {found.mixer}", fontsize=8)
            mark_token(place, query, found.rows[query].shape, found.rows[query].shape)
    for place in axes.flat:
        place.set_axis_off()
    figure.suptitle(f"{title}: weights of each query token, mean over heads; each map has its own scale", fontsize=10)
    save_figure(figure, file, dpi=120)


def mark_token(axes: Axes, query: tuple[float, float], grid: tuple[int, ...], pixels: tuple[int, ...]) -> None:
    """Mark a query token (row, column) of a grid in an image of these pixels."""
    row, column = ((q + 0.5) * s / g - 0.5 for q, s, g in zip(query, pixels, grid, strict=False))
    edge = "#4cc9f0"
    axes.plot(column, row, marker="s", markersize=6, markerfacecolor="none", markeredgecolor=edge, markeredgewidth=1.4)
