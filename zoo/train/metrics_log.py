"""The record of a run: metrics.jsonl, one JSON object per line, and its curves."""

import json
import math
from pathlib import Path
from typing import Any

from zoo.files import naming, replacing
from zoo.plotting import pyplot, save_figure

Row = dict[str, Any]


class Record:
    """Appends rows to `file`. Opened for a run that continues at step `step`, it first drops the rows after that
    step."""

    def __init__(self, file: Path, step: int = 0) -> None:
        self.file = file
        kept = [row for row in read_rows(file) if row["step"] <= step] if step else []
        with replacing(file) as temporary:
            temporary.write_text("".join(json.dumps(row) + "\n" for row in kept))

    def write(self, row: Row) -> None:
        """Append one row. What a kill or a full disk leaves of it is dropped when the record is read."""
        with naming(self.file), self.file.open("a") as opened:
            opened.write(json.dumps({k: _finite(v) for k, v in row.items()}) + "\n")


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: such a number becomes null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_rows(file: Path) -> list[Row]:
    """The rows of a record, each with its step. A last line that was cut off by a kill is left out; a damaged line
    elsewhere raises ValueError."""
    lines = file.read_text(errors="replace").splitlines() if file.exists() else []
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            if number < len(lines):
                raise ValueError(f"line {number} of {file} is damaged: delete it to go on without it") from error
            continue
        if not isinstance(row, dict) or type(row.get("step")) is not int:
            raise ValueError(f"line {number} of {file} is no row with a step: delete it to go on without it")
        rows.append(row)
    return rows


def draw_curves(runs: dict[str, list[Row]], file: Path, key: str = "top1", title: str = "top-1 accuracy (%)") -> None:
    """Loss and the evaluation called `key` over images seen, one line a run (named by its key), as a PNG."""
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for name, rows in runs.items():
        train = [row for row in rows if row.get("kind") == "train"]
        found = [row for row in rows if row.get("kind") == "eval"]
        left.plot([r["images_seen"] for r in train], [r["loss"] for r in train], label=name)
        right.plot([r["images_seen"] for r in found], [r[key] for r in found], label=name, marker=".")
    left.set(xlabel="images seen", ylabel="training loss")
    right.set(xlabel="images seen", ylabel=title)
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    right.legend(frameon=False, fontsize=8)
    save_figure(figure, file, dpi=150)
