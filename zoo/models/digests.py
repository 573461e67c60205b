"""Digests of final weights in the safetensors header, checked when files are read."""

from collections.abc import Mapping
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from zoo.io import tensors_hash

DIGEST = "sha256"  # header key of the digest of tensors, names, types and shapes
STEP = "step"  # header key of the step of a run


def digest_header(tensors: Mapping[str, Tensor], step: int | None = None) -> dict[str, str]:
    """Return the header entries for these tensors and the step of a run."""
    header = {DIGEST: tensors_hash(sorted(tensors.items()))}
    return header if step is None else {**header, STEP: str(step)}


def check_digest(tensors: Mapping[str, Tensor], header: Mapping[str, str]) -> None:
    """Raise ValueError if the header has a digest that does not match the tensors."""
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
    """Raise ValueError for a safetensors file in a folder or its sub-folders with a wrong digest."""
    for file in folder.rglob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            header = opened.metadata() or {}
        if DIGEST not in header:
            continue
        try:
            check_digest(load_file(file), header)
        except ValueError as error:
            raise ValueError(f"{file.name} is damaged: {error}") from error
