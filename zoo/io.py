"""Result files: JSON, tables in Markdown, and the environment that made them."""

import datetime
import hashlib
import json
import os
import platform
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

from zoo.files import replacing

PACKAGES = ("torch", "torch-fidelity", "timm", "numpy", "diffusers")


def hardware() -> str:
    """The name of the GPU, or how many CPU cores there are."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} CPU cores"


def result_file(command: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The content of a file of docs/results: the rows with the command, date, hardware and versions that made them."""
    versions = {"python": platform.python_version(), "torch": torch.__version__, "timm": timm.__version__}
    today = datetime.date.today().isoformat()
    return {"command": command, "date": today, "hardware": hardware(), "versions": versions, "rows": rows}


def write_json(content: Any, file: Path) -> None:
    """Write JSON, indented, making the folder if needed; the file is complete or as it was."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as temporary:
        temporary.write_text(json.dumps(content, indent=1) + "\n")


def environment() -> dict[str, Any]:
    """Date, hardware and versions, for a card."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {"date": datetime.date.today().isoformat(), "hardware": hardware(), "versions": versions}


def weights_hash(module: nn.Module) -> str:
    """SHA-256 of all parameters and buffers of a module, with their names, whatever file they came from."""
    return tensors_hash(sorted(module.state_dict().items()))


def tensors_hash(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """SHA-256 of tensors with their names, types and shapes, in this order."""
    found = hashlib.sha256()
    for name, value in tensors:
        found.update(f"{name} {value.dtype} {list(value.shape)}".encode())
        found.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def markdown_table(head: list[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """Lines of a Markdown table."""
    return [f"| {' | '.join(map(str, cells))} |" for cells in [head, ["---"] * len(head), *rows]]
