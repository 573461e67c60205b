"""The manifest of a checkpoint, manifest.json: its step and the SHA-256 of every other file."""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from zoo.errors import DamagedCheckpoint
from zoo.files import replacing

MANIFEST = "manifest.json"
FORMAT = 1  # of checkpoints; those without a manifest are older


def write_manifest(folder: Path, step: int) -> None:
    """Write the manifest of a checkpoint whose other files are there."""
    content = {"format": FORMAT, "step": step, "sha256": digests(sorted(folder.iterdir()))}
    with replacing(folder / MANIFEST) as temporary:
        temporary.write_text(json.dumps(content, indent=1) + "\n")


def check_manifest(folder: Path, step: int) -> bool:
    """Compare the files of a checkpoint with its manifest; False for one that has none. Raises DamagedCheckpoint for a
    file that is missing or not the one that was written, and for another step."""
    file = folder / MANIFEST
    if not file.is_file():
        return False
    content = _read(file)
    if content.get("format") != FORMAT or not isinstance(content.get("sha256"), dict):
        raise DamagedCheckpoint(f"the checkpoint {folder} is damaged: {MANIFEST} is of no known format")
    if content.get("step") != step:
        raise DamagedCheckpoint(f"the checkpoint {folder} is damaged: its {MANIFEST} is of step {content.get('step')}")
    written = content["sha256"]
    there = {path.name: path for path in sorted(folder.iterdir()) if path.name != MANIFEST and path.name[0] != "."}
    for name in written.keys() - there.keys():
        raise DamagedCheckpoint(f"the checkpoint {folder} is damaged: {name} is missing")
    for name in there.keys() - written.keys():
        raise DamagedCheckpoint(f"the checkpoint {folder} is damaged: {name} is not in its {MANIFEST}")
    for name, digest in digests(list(there.values())).items():
        if digest != written[name]:
            raise DamagedCheckpoint(
                f"the checkpoint {folder} is damaged: {name} is truncated or damaged, or of another checkpoint"
            )
    return True


def digests(files: list[Path]) -> dict[str, str]:
    """File name -> SHA-256 of the content, in hexadecimal."""
    with ThreadPoolExecutor() as pool:  # hashing does not hold the interpreter
        return dict(zip([file.name for file in files], pool.map(_digest, files), strict=True))


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text())
    except ValueError as error:
        raise DamagedCheckpoint(f"the checkpoint {file.parent} is damaged: {file.name} is no JSON") from error
    return content if isinstance(content, dict) else {}
