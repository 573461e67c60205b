"""Curves of runs, drawn once per process of tests: runs of a second would spend a third of it on that."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@contextmanager
def drawn_once() -> Iterator[None]:
    """Draw the curves of the first run of this process, and write the same picture for the others.

    Nothing changes where the module that draws was not imported yet. Lines and axes are made each time."""
    if "zoo.train.metrics_log" not in sys.modules:
        yield
        return
    from zoo.files import replacing
    from zoo.plotting import pyplot, save_figure

    drawn: list[bytes] = []

    def once(figure: "Figure", file: Path, dpi: int) -> None:
        if not drawn:
            save_figure(figure, file, dpi)
            drawn.append(file.read_bytes())
            return
        with replacing(file) as temporary:
            temporary.write_bytes(drawn[0])
        pyplot().close(figure)

    with mock.patch("zoo.train.metrics_log.save_figure", once):
        yield
