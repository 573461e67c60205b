"""Two tiny runs (a ViT that classifies, a DiT that draws): their settings, results, and comparison bit by bit."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import yaml

from tests.campaign.harness import TABLES, Result, call, succeed
from tests.helpers.runs import MEASURED
from zoo.config import merge
from zoo.train.metrics_log import read_rows

Tree = dict[str, Any]
RUNS: dict[str, Tree] = yaml.safe_load((TABLES / "runs.yaml").read_text())
TOOL = {"vit": "train_vit", "dit": "finetune_dit"}
TRACKED = "hla-zoo/"  # of trackers, whose files are named by time
EVENTS = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate"}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def write_config(kind: str, file: Path, changes: Tree | None = None) -> Path:
    """The settings of a run as YAML."""
    file.write_text(yaml.safe_dump(merge(RUNS[kind], changes or {})))
    return file


def words(file: Path, folder: Path) -> list[str]:
    """The words that start the run of `file` in `folder`, or continue it."""
    return [str(file), f"run.folder={folder}", "run.resume=true"]


def start(kind: str, file: Path, folder: Path, **options: Any) -> Result:
    """Start or continue a run in a forked child."""
    return call(TOOL[kind], words(file, folder), cwd=folder.parent, **options)


def resume(kind: str, file: Path, run: Path, whole: Path) -> str:
    """Continue a run; the complaint if it does not end as the run `whole` did."""
    result = start(kind, file, run)
    if result.code:
        return f"not resumed, exit {result.code}: {result.err[-300:]}"
    return "; ".join(differences(whole, run))


@dataclass
class Durable:
    """Counts what a run does to the files of its folder, and kills the process before number `kill_at` (from 1).

    An operation is whatever opens for writing, renames, removes, makes or syncs; a file of weights or of state counts
    twice, untouched and torn in half.  report: gets the count, written at every operation.
    """

    folder: Path
    kill_at: int = 0
    report: Path | None = None
    count: int = 0

    def install(self) -> None:
        """Watch this process; for a child only, since audit hooks stay."""
        self.log = os.open(self.report, os.O_WRONLY | os.O_CREAT) if self.report else None
        sys.addaudithook(self._hear)
        os.fsync = self._wrapped(os.fsync)
        torch.save = self._wrapped(torch.save, torn=True)
        safetensors.torch.serialize_file = self._wrapped(safetensors.torch.serialize_file, torn=True)  # type: ignore

    def _tick(self, file: Path | None = None) -> None:
        self.count += 1
        if self.log is not None:
            os.pwrite(self.log, b"%d" % self.count, 0)
        if self.count == self.kill_at:
            if file is not None:
                os.truncate(file, file.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            ours = isinstance(args[2], int) and bool(args[2] & WRITING) and str(self.folder) in str(args[0])
        else:
            relative = event in ("os.remove", "os.rmdir") and args[1] not in (-1, None)  # of shutil.rmtree
            ours = event in EVENTS and (relative or str(self.folder) in str(args[0]))
        if ours:
            self._tick()

    def _wrapped(self, function: Callable[..., Any], torn: bool = False) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._tick()
            found = function(*args, **kwargs)
            if torn:  # torch.save is given an open file
                self._tick(Path(args[1].name if hasattr(args[1], "write") else args[1]))
            return found

        return call


def counted(kind: str, file: Path, folder: Path) -> tuple[Result, int]:
    """A whole run and the number of its durable operations."""
    number = folder.with_name(f"{folder.name}.operations")
    result = start(kind, file, folder, before=Durable(folder, report=number).install)
    return result, int(number.read_text() or 0)


def whole_run(kind: str, folder: Path, name: str, changes: Tree | None = None) -> Path:
    """The settings of a run that was carried out in `folder`/NAME. Raises RuntimeError if it failed."""
    file = write_config(kind, folder / f"{name}.yaml", changes)
    succeed(start(kind, file, folder / name))
    return file


def differences(whole: Path, other: Path) -> Iterator[str]:
    """What of the result of two runs is not the same, bit for bit: final weights, pictures, record, names of files."""
    names = [{n for n in files_below(run) if not n.startswith(TRACKED)} for run in (whole, other)]
    if names[0] != names[1]:
        yield f"files: missing {sorted(names[0] - names[1])[:3]}, left over {sorted(names[1] - names[0])[:3]}"
    for name in sorted(names[0] & names[1]):
        compared = name.endswith((".safetensors", ".png")) and "curves" not in name
        if compared and not same_file(whole / name, other / name):
            yield f"{name} differs"
    for name, read in {"metrics.jsonl": record, "result.json": result}.items():
        if read(whole / name) != read(other / name):
            yield f"{name} differs"


def files_below(folder: Path) -> set[str]:
    """The relative names of all files."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def same_file(one: Path, two: Path) -> bool:
    """Whether two files hold the same bytes; the keys of a safetensors header have no order."""
    if one.suffix != ".safetensors":
        return one.read_bytes() == two.read_bytes()
    a, b = (safetensors.torch.load_file(path) for path in (one, two))
    same_types = a.keys() == b.keys() and all(a[k].dtype == b[k].dtype for k in a)
    return same_types and all(torch.equal(a[k].view(torch.uint8), b[k].view(torch.uint8)) for k in a)


def record(file: Path) -> list[Tree]:
    """The rows without measured times; a kill may come between a checkpoint and its row."""
    rows = [row for row in read_rows(file) if row["kind"] != "checkpoint"]
    return [{k: v for k, v in row.items() if k not in MEASURED} for row in rows]


def result(file: Path) -> Tree:
    """result.json without measured times."""
    return {k: v for k, v in json.loads(file.read_text()).items() if k not in MEASURED}
