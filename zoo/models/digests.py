"""Digests of weights: a file that ends a run holds that of its tensors in its header, and readers compare them."""

from collections.abc import Mapping
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from zoo.io import tensors_hash

DIGEST = "sha256"  # of the tensors, with their names, types and shapes
STEP = "step"  # of the run


def digest_header(tensors: Mapping[str, Tensor], step: int | None = None) -> dict[str, str]:
    """The entries of a safetensors header for these tensors, and for the step of a run."""
    found = {DIGEST: tensors_hash(sorted(tensors.items()))}
    return found if step is None else {**found, STEP: str(step)}


def check_digest(tensors: Mapping[str, Tensor], header: Mapping[str, str]) -> None:
    """Raise ValueError unless the tensors are those of which the header, if it has one, holds the digest."""
    if DIGEST in header and header[DIGEST] != tensors_hash(sorted(tensors.items())):
        raise ValueError("its tensors are not those that were written")


def add_digests(folder: Path, step: int | None) -> None:
    """Write digest and step into the header of every safetensors file in a folder."""
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            header = opened.metadata() or {}
        tensors = load_file(file)
        save_file(tensors, file, metadata={**header, **digest_header(tensors, step)})


def check_folder(folder: Path) -> None:
    """Raise ValueError for a safetensors file below a folder whose tensors are not those of its digest."""
    for file in folder.rglob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            header = opened.metadata() or {}
        if DIGEST not in header:
            continue
        try:
            check_digest(load_file(file), header)
        except ValueError as error:
            raise ValueError(f"{file.name} is damaged: {error}") from error
