"""The folder of cached latents: manifest, shards, and how an interrupted extraction goes on.

manifest.json: how everything was made; written last, so that a folder with it is complete.
plan.json: the same without the shards; written first.
shard-00000.safetensors: index [n], the numbers of the images; latents [n, C, H, W], of clips [n, C, T, H, W]; flipped,
the same of mirrored images, if asked for; class_labels [n] or the embeddings of prompts, under the names of the model's
arguments; of clips for a model from image to video, what it reads of the first frame.
null.safetensors: the embeddings of the empty prompt (text only).
"""

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from zoo.files import replacing
from zoo.io import write_json

MANIFEST, PLAN, NULL = "manifest.json", "plan.json", "null.safetensors"


@dataclass(frozen=True)
class Manifest:
    """How latents were made.

    vae: name or path of the VAE. scaling, shift: stored = (z - shift) * scaling, numbers or one a channel.
    posterior: mean or sample. shape: [C, H, W] of one latent, [C, T, H, W] of a clip. dtype: of the stored latents.
    flip: whether mirrored images were encoded too. image_size: side of the images in pixels, of clips [frames,
    height, width]. fps: frames a second of clips. stride, step: how clips were cut out of files. crop: which part of
    their frames. classes: names, empty for prompts. text: name or path of the text encoders, with `max_length` tokens a
    prompt; empty for labels. images: where they lay. keys: the columns they came from. seed: of the draws. truncate:
    whether long prompts were cut. shards: samples in each.
    """

    vae: str
    scaling: float | list[float]
    shift: float | list[float]
    posterior: str
    shape: list[int]
    dtype: str
    flip: bool
    image_size: int | list[int]
    classes: list[str] = field(default_factory=list)
    text: str = ""
    max_length: int = 0
    images: str = ""
    keys: list[str] = field(default_factory=list)
    seed: int = 0
    truncate: bool = False
    fps: float = 0.0
    stride: int = 0
    step: int = 0
    crop: str = "center"
    shards: list[int] = field(default_factory=list)


def shard_name(number: int) -> str:
    """The file of a shard."""
    return f"shard-{number:05d}.safetensors"


class Writer:
    """Writes shards into a folder, each complete or absent, and the manifest at the end.

    Opened again after an interruption, `done` holds the sizes of the shards that are there, and `next_number` is the
    first image that is in none of them. Raises ValueError when the
    folder was begun with another plan, or is no folder of latents.
    """

    def __init__(self, folder: Path, plan: Manifest) -> None:
        self.folder, self.plan = folder, plan
        file = folder / PLAN
        if folder.is_dir() and any(folder.iterdir()) and not file.is_file():
            raise ValueError(f"{folder} holds other files: choose an empty folder for the latents")
        folder.mkdir(parents=True, exist_ok=True)
        if file.is_file():
            begun = json.loads(file.read_text())
            wrong = sorted(k for k, v in asdict(plan).items() if begun.get(k) != v)
            if not (folder / shard_name(0)).is_file():  # nothing was made by the other plan
                write_json(asdict(plan), file)
            elif wrong:
                raise ValueError(f"{folder} was begun with another {', '.join(wrong)}: choose another folder")
        else:
            write_json(asdict(plan), file)
        self.done: list[int] = []
        self.next_number = 0
        while (shard := folder / shard_name(len(self.done))).is_file():
            with open_tensors(shard) as opened:
                numbers = opened.get_tensor("index")
            self.done.append(len(numbers))
            self.next_number = int(numbers[-1]) + 1

    def write(self, tensors: dict[str, Tensor]) -> None:
        """Add a shard: tensors [n, ...] by name, among them `latents` and the numbers of the images, `index`."""
        _save(tensors, self.folder / shard_name(len(self.done)))
        self.done.append(len(tensors["index"]))

    def write_null(self, tensors: dict[str, Tensor]) -> None:
        """The embeddings of the empty prompt, without a batch dimension."""
        _save(tensors, self.folder / NULL)

    def finish(self) -> Manifest:
        """Write the manifest: from now on the folder can be trained on."""
        whole = replace(self.plan, shards=self.done)
        write_json(asdict(whole), self.folder / MANIFEST)
        return whole


def read_manifest(folder: str | Path) -> Manifest:
    """The manifest of a folder of latents. Raises ValueError if it is missing, incomplete or of another kind."""
    file = Path(folder) / MANIFEST
    if not file.is_file():
        begun = (Path(folder) / PLAN).is_file()
        what = (
            "is not complete: run tools/extract_latents.py again"
            if begun
            else f"holds no latents: no {MANIFEST} (zoo extract-latents)"
        )
        raise ValueError(f"{folder} {what}")
    try:
        return Manifest(**json.loads(file.read_text()))
    except (json.JSONDecodeError, TypeError) as error:
        raise ValueError(f"{file} is not a manifest of latents: {error}") from error


def open_tensors(file: Path) -> Any:
    """An open safetensors file. Raises ValueError if it is truncated."""
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{file} is truncated or damaged: {error}; delete it and extract again") from error


def _save(tensors: dict[str, Tensor], file: Path) -> None:
    with replacing(file) as temporary:
        save_file({k: v.contiguous() for k, v in tensors.items()}, temporary)
