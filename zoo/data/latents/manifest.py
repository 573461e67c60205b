"""Folders of cached latents: manifest, shards, and resuming an interrupted extraction.

Files of a folder:
    plan.json: the manifest without the sizes of shards, written first
    shard-00000.safetensors and so on: the samples
    null.safetensors: embeddings of the empty prompt, only with prompts
    manifest.json: metadata, written last, so that a folder with a manifest is complete

Tensors of a shard:
    index [n]: numbers of the images
    latents [n, C, H, W], or [n, C, T, H, W] for clips
    flipped: latents of the mirrored images, if requested
    class_labels [n], or prompt embeddings named as the model's arguments
    inputs made from the first frame, named as the model's arguments, only for image-to-video models
"""

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from zoo.files import replacing
from zoo.io import write_json

MANIFEST, PLAN, NULL = "manifest.json", "plan.json", "null.safetensors"


@dataclass(frozen=True)
class Manifest:
    """Metadata of cached latents.

    vae: name or path of the VAE.  scaling, shift: numbers or one value per channel; latents z of the VAE are stored as
    (z - shift) * scaling.  posterior: what was stored of the posterior, mean or sample.  shape: shape of the latents of
    one sample, [C, H, W] or [C, T, H, W].  dtype: type of the stored latents.  flip: whether mirrored images were
    encoded too.  image_size: side of the images in pixels, or [frames, height, width] of the clips.  classes: class
    names, empty for prompts.  text: name or path of the pipeline with the text encoders, empty for class labels.
    max_length: tokens per prompt.  images: source of the images.  keys: columns of the image, and of the label or
    caption.  seed: seed of the posterior samples.  truncate: whether longer prompts were truncated.  fps: frame rate of
    the clips.  stride, step, crop: how clips were cut from files, see `ImageSettings`.  shards: number of samples in
    each shard.
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
    """Return the file name of a shard."""
    return f"shard-{number:05d}.safetensors"


class Writer:
    """Writer of a folder of latents: shards, each written atomically, and the manifest at the end.

    plan: the manifest without shards.  done: number of samples in each existing shard, also from an interrupted
    extraction.  next_number: number of the first image that comes after the existing shards. Raises ValueError for a
    folder begun with another plan and for a folder that holds other files.
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
            if not (folder / shard_name(0)).is_file():  # no shard was written with the other plan
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
        """Add a shard: tensors [n, ...] by name, including `latents` and `index` (the numbers of the images)."""
        _save(tensors, self.folder / shard_name(len(self.done)))
        self.done.append(len(tensors["index"]))

    def write_null(self, tensors: dict[str, Tensor]) -> None:
        """Write the embeddings of the empty prompt, tensors by name without a batch dimension."""
        _save(tensors, self.folder / NULL)

    def finish(self) -> Manifest:
        """Write the manifest, which completes the folder. Returns it."""
        whole = replace(self.plan, shards=self.done)
        write_json(asdict(whole), self.folder / MANIFEST)
        return whole


def read_manifest(folder: str | Path) -> Manifest:
    """Read the manifest of a folder of latents. Raises ValueError if the folder is incomplete or holds no latents."""
    file = Path(folder) / MANIFEST
    if not file.is_file():
        begun = (Path(folder) / PLAN).is_file()
        what = (
            "is not complete: run `zoo extract-latents` again"
            if begun
            else f"holds no latents: no {MANIFEST} (zoo extract-latents)"
        )
        raise ValueError(f"{folder} {what}")
    try:
        return Manifest(**json.loads(file.read_text()))
    except (json.JSONDecodeError, TypeError) as error:
        raise ValueError(f"{file} is not a manifest of latents: {error}") from error


def open_tensors(file: Path) -> safe_open:
    """Open a safetensors file. Raises ValueError if it is truncated."""
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{file} is truncated or damaged: {error}; delete it and extract again") from error


def _save(tensors: dict[str, Tensor], file: Path) -> None:
    with replacing(file) as temporary:
        save_file({k: v.contiguous() for k, v in tensors.items()}, temporary)
