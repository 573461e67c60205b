"""Metrics of a run: metrics.jsonl (one JSON object per line), trackers, and curves."""

import json
import math
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from timm.utils import AverageMeter
from torch import Tensor

from zoo.files import naming
from zoo.io import write_text
from zoo.plotting import legend_below, plain_axes, pyplot, save_figure

Row = dict[str, Any]  # "step", "kind" and numbers


class Metrics:
    """Running averages of the losses since the last row, and the writer of rows to metrics.jsonl and the trackers.

    It exists in every process; only the main process writes.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.meters: dict[str, AverageMeter] = {}
        self.record: Record | None = None

    def open(self, file: Path, step: int, project: str, config: dict[str, str]) -> None:
        """Open `file` for a run that starts or resumes at `step`, and the trackers with the configuration `config`."""
        self.record = Record(file, step) if self.accelerator.is_main_process else None
        self.accelerator.init_trackers(project, config=config)

    def close(self) -> None:
        """Close the trackers."""
        for tracker in self.accelerator.trackers:
            tracker.finish()

    def add(self, name: str, value: Tensor, n: int) -> None:
        """Add a batch mean over n samples to the running average of this loss."""
        self.meters.setdefault(name, AverageMeter()).update(value.detach(), n)

    def state_dict(self) -> dict[str, list[float]]:
        """Return the running averages, by name: [sum averaged over processes, number of samples]. Every process."""
        out = {}
        for name, meter in self.meters.items():
            total = torch.as_tensor(meter.sum, device=self.accelerator.device, dtype=torch.float32)
            out[name] = [float(self.accelerator.reduce(total, "mean")), meter.count]
        return out

    def load_state_dict(self, state: dict[str, list[float]]) -> None:
        """Continue the running averages of a checkpoint."""
        for name, (total, count) in state.items():
            self.meters[name] = meter = AverageMeter()
            meter.sum, meter.count = torch.tensor(total, device=self.accelerator.device), count

    def averages(self) -> dict[str, float]:
        """Return the running averages and reset them. Every process."""
        out = {name: total / count for name, (total, count) in self.state_dict().items()}
        self.meters.clear()
        return out

    def write(self, row: Row) -> None:
        """Write a row, which has a step and a kind."""
        if self.record is None:
            return
        self.record.write(row)
        numbers = {f"{row['kind']}/{k}": v for k, v in row.items() if isinstance(v, (int, float))}
        self.accelerator.log(numbers, step=row["step"])


class Record:
    """Writer that appends rows to `file`. On opening it drops old rows: all for step 0, else the rows after `step`."""

    def __init__(self, file: Path, step: int = 0) -> None:
        self.file = file
        kept = [row for row in read_rows(file) if row["step"] <= step] if step else []
        write_text("".join(json.dumps(row) + "\n" for row in kept), file)

    def write(self, row: Row) -> None:
        """Append one row. `read_rows` drops a line that was cut off because the process was killed or the disk full."""
        with naming(self.file), self.file.open("a") as opened:
            opened.write(json.dumps({k: _finite(v) for k, v in row.items()}) + "\n")


def _finite(value: object) -> object:
    """Replace NaN and infinity, which JSON does not have, with None."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_rows(file: Path) -> list[Row]:
    """Read the rows of a metrics file, without an incomplete last line. Raises ValueError for other damaged lines."""
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
    """Plot the training loss and the validation metric `key` over the images seen, one line per run, as a PNG.

    runs: rows of each run, by the name for the legend.  title: axis label of the metric.
    """
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
        plain_axes(axes)
    legend_below(right, 3)
    save_figure(figure, file, dpi=150)
