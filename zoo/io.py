"""Result files (JSON, CSV, Markdown tables) and metadata of hardware and software."""

import contextlib
import csv
import datetime
import hashlib
import json
import os
import platform
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import timm
import torch
from torch import Tensor, nn

from zoo.config import Tree
from zoo.files import replacing

PACKAGES = ("torch", "torch-fidelity", "timm", "numpy", "diffusers")


def hardware() -> str:
    """Return the name of the GPU, or the number of CPU cores."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} CPU cores"


def result_file(command: str, rows: Sequence[object]) -> Tree:
    """Make the content of a result file: rows, with the command, date, hardware and versions that made them."""
    versions = {"python": platform.python_version(), "torch": torch.__version__, "timm": timm.__version__}
    today = datetime.date.today().isoformat()
    return {"command": command, "date": today, "hardware": hardware(), "versions": versions, "rows": rows}


def write_text(text: str, file: Path) -> None:
    """Write a text file atomically, and create its folder if needed."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as temporary:
        temporary.write_text(text)


def write_json(content: object, file: Path) -> None:
    """Write indented JSON atomically, and create its folder if needed."""
    write_text(json.dumps(content, indent=1) + "\n", file)


def write_csv(head: Sequence[str], rows: Iterable[Sequence[object]], file: Path) -> None:
    """Write a CSV file atomically, and create its folder if needed. head: column names."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as temporary, temporary.open("w", newline="", encoding="utf-8") as opened:
        csv.writer(opened, lineterminator="\n").writerows([head, *rows])


def package_versions(*names: str) -> dict[str, str]:
    """Return the versions of the installed packages among `names`."""
    versions = {}
    for name in names:
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def environment() -> Tree:
    """Return metadata: date, hardware, and versions of python and packages."""
    versions = {"python": platform.python_version(), **package_versions(*PACKAGES)}
    return {"date": datetime.date.today().isoformat(), "hardware": hardware(), "versions": versions}


def weights_hash(module: nn.Module) -> str:
    """SHA-256 of the names and values of all parameters and buffers of a module."""
    return tensors_hash(sorted(module.state_dict().items()))


def tensors_hash(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """SHA-256 of tensors with their names, types and shapes, in the given order."""
    found = hashlib.sha256()
    for name, value in tensors:
        found.update(f"{name} {value.dtype} {list(value.shape)}".encode())
        found.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def markdown_table(head: list[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Make the lines of a Markdown table. head: column names."""
    return [f"| {' | '.join(map(str, cells))} |" for cells in [head, ["---"] * len(head), *rows]]
