"""Figures: the one place that sets matplotlib's backend and writes figures; colors and axes."""

from pathlib import Path
from typing import Any

from zoo.files import replacing

COLORS = ("#30343f", "#8d99ae", "#00798c", "#edae49", "#d1495b", "#66a182", "#8d6a9f")


def pyplot() -> Any:
    """matplotlib.pyplot, imported when first needed, for files only."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def save_figure(figure: Any, file: Path, dpi: int) -> None:
    """Write `figure` as a PNG that is complete or as it was, making its folder if needed, and close it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as temporary:
        figure.savefig(temporary, dpi=dpi, format="png")
    pyplot().close(figure)


def plain_axes(axes: Any) -> None:
    """A light horizontal grid behind what is drawn, and no frame above and at the right."""
    axes.grid(alpha=0.3, axis="y")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
