"""Opt-in: tiles and warps that were measured, in the place of those of the static table, kept in a JSON file.

What is tried are entries of the static table alone, those that it has for other calls of the same kernel, and only such
entries are taken from a file: what runs is always a shipped configuration. An entry belongs to one device, version of
Triton, operator with its options, dtype, widths and class of sizes (powers of two), {class: {kernel: tiles}}.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..spec import ORDERS, Spec, widths

Config = dict[str, int]
Work = Callable[[], list[Tensor]]
Place = tuple[str, str]  # class of calls, kernel
MAPS: tuple[dict[str, Any], ...] = ({}, {"feature_map": "elu1"}, {"feature_map": "softmax"})
USES: tuple[dict[str, Any], ...] = ({}, {"normalize": True}, {"center": "k", "mean_path": True})
SPECS = tuple(Spec(op, **more, **use) for op in ORDERS for more in MAPS for use in USES)
WIDTHS = tuple(widths(Spec("ahla"), d, d) for d in (32, 64, 72, 96, 128))
GAIN = 0.98  # of the time before: less is noise
CLOSE = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4}  # roundings in another order


class Tuned(NamedTuple):
    """What `hla_kernels.tune` found: milliseconds of the calls before and after, and the tiles that changed."""

    before_ms: float
    after_ms: float
    changed: dict[str, Config]


class Tuning:
    """The file that is in use and what it holds; what a run of `tune` sees and tries."""

    edition = 0

    def __init__(self) -> None:
        self.file: Path | None = None
        self.table: dict[str, dict[str, Config]] = {}
        self.tried: dict[Place, Config] = {}
        self.seen: dict[Place, list[Config]] | None = None
        self.checked: dict[Place, Config | None] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        """`edition` counts the changes of them all: plans of another edition do not hold any more."""
        self.__dict__[name] = value
        self.__dict__["edition"] = self.edition + 1

    def choose(self, kernel: str, call: Any, entry: Callable[..., Config], *args: Any) -> Config:
        """The tiles of a kernel in a `launch.Call`: those of the static table, `entry(*args)`, or measured ones."""
        config = entry(*args)
        if self.file is None:
            return config
        place = class_of(call), kernel
        if self.seen is not None and place not in self.seen:
            self.seen[place] = [other for other in shipped(entry, args) if other != config]
        if place in self.tried:
            return self.tried[place]
        if place not in self.checked:
            kept = self.table.get(place[0], {}).get(kernel)
            self.checked[place] = kept if kept in shipped(entry, args) else None
        return self.checked[place] or config


STATE = Tuning()


def set_tuning(file: str | os.PathLike[str] | None) -> None:
    """Take tiles of the two-sided Triton forms from `file`, made by `tune` (it may not exist yet); None: the static
    table, as at first.

    It holds for the process: set it before the first call, and before anything is captured. Calls of a class that was
    not tuned use the static table. Raises ValueError for a file that is something else.
    """
    if file is not None and not isinstance(file, str | os.PathLike):
        raise ValueError(f"set_tuning takes the name of a file or None, got {type(file).__name__}.")
    path = None if file is None else Path(file)
    table = read(path) if path is not None and path.exists() else {}
    STATE.file, STATE.table, STATE.checked = path, table, {}


def file_in_use() -> Path:
    """That of `set_tuning`. Raises ValueError where there is none."""
    if STATE.file is None:
        raise ValueError("tune needs a file that keeps what it finds: call set_tuning(FILE) first")
    return STATE.file


def read(path: Path) -> dict[str, dict[str, Config]]:
    """The content of a file. Raises ValueError for one that is something else."""
    try:
        table = json.loads(path.read_text())
        entries = [config for kernels in table.values() for config in kernels.values()]
        good = all(isinstance(x, int) for config in entries for x in config.values())
    except (OSError, ValueError, AttributeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no file of hla_kernels.tune: {str(error)[:100]}") from error
    if not good:
        raise ValueError(f"{path} is no file of hla_kernels.tune: tiles are whole numbers")
    return table


def class_of(call: Any) -> str:
    """The calls that share tuned tiles, in words."""
    device = torch.cuda.get_device_name(call.q.device) if call.q.device.type == "cuda" else call.q.device.type
    sizes = (f"{name} <= {1 << (n - 1).bit_length()}" for name, n in (("N", call.most), ("heads", call.planned)))
    ragged = "whole" if call.n[2] is None else "ragged"
    flags = ", ".join(f"{name.lower()} {int(flag)}" for name, flag in call.flags.items())
    shape = f"D {call.q.shape[3]}, Dv {call.v.shape[3]}, groups {call.g}"
    return f"{device}, triton {_triton()}: {flags}, {call.q.dtype}, {shape}, {', '.join(sizes)}, {ragged}"


def _triton() -> str:
    import triton

    return triton.__version__


def shipped(entry: Callable[..., Config], args: tuple[Any, ...]) -> list[Config]:
    """Every entry of the static table for a kernel: those of all specs and widths, with the other arguments given."""
    found: list[Config] = []
    specs = SPECS if any(isinstance(x, Spec) for x in args) else SPECS[:1]
    for spec in specs:
        for w in WIDTHS:
            given = [spec if isinstance(x, Spec) else w if isinstance(x, dict) and "F1" in x else x for x in args]
            config = entry(*given)
            if config not in found:
                found.append(config)
    return found


def cuda_ms(work: Work) -> float:
    """Median milliseconds of `work` on the current CUDA device."""
    times = []
    for _ in range(15):
        marks = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        marks[0].record()
        work()
        marks[1].record()
        torch.cuda.synchronize()
        times.append(marks[0].elapsed_time(marks[1]))
    return statistics.median(times[5:])


def search(work: Work, timer: Callable[[Work], float] = cuda_ms) -> Tuned:
    """Try the shipped tiles of each kernel that `work` launches, one kernel after the other, and keep the fastest in
    the file in use.

    Tiles that do not compile, do not fit or whose results are not those of the static table, up to rounding, are passed
    over. Raises ValueError without a file.
    """
    file = file_in_use()
    STATE.table, STATE.checked, STATE.seen = {}, {}, {}
    best: dict[Place, Config] = {}
    try:
        expected = work()
        seen, STATE.seen = STATE.seen, None
        before = after = timer(work)
        for place, configs in seen.items():
            for config in configs:
                STATE.tried = {**best, place: config}
                ms = _time(work, expected, timer)
                if ms < GAIN * after:
                    after, best = ms, STATE.tried
    finally:
        STATE.tried, STATE.seen = {}, None
        set_tuning(file)
    _write(file, seen, best)
    set_tuning(file)
    return Tuned(before, after, {kernel: config for (_, kernel), config in best.items()})


def _time(work: Work, expected: list[Tensor], timer: Callable[[Work], float]) -> float:
    """Milliseconds with the tiles that are tried, or infinity."""
    try:
        found = work()
        good = all(_close(x, y) for x, y in zip(found, expected, strict=True))
        return timer(work) if good else math.inf
    except Exception:  # Triton, its assembler and the driver each have errors of their own for what does not fit
        return math.inf


def _close(x: Tensor, y: Tensor) -> bool:
    error, size = (x.double() - y.double()).norm(), y.double().norm()
    return bool(error <= CLOSE.get(x.dtype, 1e-4) * size)


def _write(file: Path, seen: dict[Place, list[Config]], best: dict[Place, Config]) -> None:
    """Replace the entries of the classes that were seen, all at once."""
    table = read(file) if file.exists() else {}
    table |= {name: {kernel: c for (key, kernel), c in best.items() if key == name} for name, _ in seen}
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
    os.replace(temporary, file)
