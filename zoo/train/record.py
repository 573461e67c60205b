"""The files of a run: metrics.jsonl, one JSON object a line, always; curves; files written in full or not at all."""

import contextlib
import json
import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Row = dict[str, Any]


@contextlib.contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """A temporary path beside `file`, which becomes `file` when the block ends: also after a kill there is the old file
    or the new one."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        yield temporary
        with temporary.open("rb") as opened:
            os.fsync(opened.fileno())
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder beside `folder`, which takes its place, files that are not written anew included, when the
    block ends. After a kill `folder` is the old or the new one; between two renames it is missing, but never half."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as beside:
        new = Path(beside) / "new"  # not the temporary folder itself, which is private
        new.mkdir()
        yield new
        if folder.exists():
            folder.rename(Path(beside) / "old")
        new.rename(folder)


class Record:
    """Appends rows to `file`. Opened for a run that continues at step `step`, it first drops the rows after that
    step."""

    def __init__(self, file: Path, step: int = 0) -> None:
        self.file = file
        kept = [row for row in read_rows(file) if row["step"] <= step] if step else []
        with replacing(file) as temporary:
            temporary.write_text("".join(json.dumps(row) + "\n" for row in kept))

    def write(self, row: Row) -> None:
        """Append one row; it is on disk in full or not at all."""
        with self.file.open("a") as opened:
            opened.write(json.dumps({k: _finite(v) for k, v in row.items()}) + "\n")


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: such a number becomes null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_rows(file: Path) -> list[Row]:
    """The rows of a record. A last line that was cut off by a kill is left out; a damaged line elsewhere raises
    ValueError."""
    lines = file.read_text().splitlines() if file.exists() else []
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number < len(lines):
                raise ValueError(f"line {number} of {file} is damaged") from error
    return rows


def draw_curves(runs: dict[str, list[Row]], file: Path, key: str = "top1", title: str = "top-1 accuracy (%)") -> None:
    """Loss and the evaluation called `key` over images seen, one line a run (named by its key), as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for name, rows in runs.items():
        train = [row for row in rows if row["kind"] == "train"]
        found = [row for row in rows if row["kind"] == "eval"]
        left.plot([r["images_seen"] for r in train], [r["loss"] for r in train], label=name)
        right.plot([r["images_seen"] for r in found], [r[key] for r in found], label=name, marker=".")
    left.set(xlabel="images seen", ylabel="training loss")
    right.set(xlabel="images seen", ylabel=title)
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    right.legend(frameon=False, fontsize=8)
    figure.savefig(file, dpi=150)
    plt.close(figure)
