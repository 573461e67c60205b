"""Figures: matplotlib backend, colors, axes and atomic PNG files."""

from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

from zoo.files import replacing

COLORS = ("#30343f", "#8d99ae", "#00798c", "#edae49", "#d1495b", "#66a182", "#8d6a9f", "#a3623a")


def pyplot() -> ModuleType:
    """Import matplotlib.pyplot with the Agg backend."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def save_figure(figure: "Figure", file: Path, dpi: int) -> None:
    """Write `figure` as a PNG file atomically, and close it; creates its folder."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as temporary:
        figure.savefig(temporary, dpi=dpi, format="png")
    pyplot().close(figure)


def plain_axes(axes: "Axes", axis: Literal["both", "x", "y"] = "both") -> None:
    """Set a light grid behind the data, along one axis or both, and remove the top and right spines."""
    axes.grid(alpha=0.3, axis=axis)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def legend_below(axes: "Axes", columns: int = 4) -> None:
    """Put the legend under the label of the x axis, where it covers nothing."""
    axes.legend(frameon=False, fontsize=8, ncols=columns, loc="upper center", bbox_to_anchor=(0.5, -0.2))
