"""A model and its weights on disk: one safetensors file that says in its header how to rebuild the model, mixer
included."""

import json
import os
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import timm
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from timm.models import save_for_hf
from torch import Tensor, nn

from zoo.config import from_tree
from zoo.errors import shortened, unknown_name
from zoo.files import replacing
from zoo.models.checkpoint_tags import sites_of
from zoo.models.convert import swap
from zoo.models.digests import check_digest, digest_header
from zoo.models.model_card import write_card
from zoo.models.stored_options import restored_arguments, restored_options

MIXER_PREFIX = ".mixer."  # in the names of all parameters that a mixer adds to its host
HEADER = "hla_zoo"  # the key of the safetensors header that holds a Recipe as JSON
WEIGHTS = "model.safetensors"
PICKLED = "pytorch_model.bin"  # of timm's save_for_hf(safe_serialization=False), read with weights_only=True
HUB_CONFIG = "config.json"  # of timm's save_for_hf
EMA_WEIGHTS = "model_ema.safetensors"
FILES = {"checkpoint_path", "pretrained_cfg", "cache_dir"}  # keywords with which timm reads files
OVERLAY = "pretrained_cfg_overlay"  # may say what images a model reads, not where its weights are
OVERLAY_KEYS = {"input_size", "mean", "std", "interpolation", "crop_pct", "crop_mode"}
# what timm, torch and diffusers raise for sizes and names that make no sense
UNBUILT = (
    TypeError,
    NameError,
    AssertionError,
    ArithmeticError,
    LookupError,
    AttributeError,
    RuntimeError,
    MemoryError,
)


@dataclass(frozen=True)
class Recipe:
    """What is needed to build a model again: the timm name and keywords, the mixer and its options, the input it
    wants."""

    name: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    img_size: int | None = None
    num_classes: int = 1000
    mixer: str = ""
    mixer_options: dict[str, Any] = field(default_factory=dict)
    layers: list[int] | str = field(default_factory=list)
    keep_softmax: list[int] | str = field(default_factory=list)
    input: dict[str, Any] = field(default_factory=dict)
    classes: list[str] = field(default_factory=list)

    def host(self) -> "Recipe":
        """The same model before its mixers were changed."""
        return replace(self, mixer="", mixer_options={}, layers=[], keep_softmax=[])

    def describe(self) -> str:
        """Name and mixer in a few words."""
        return f"{self.name} with the mixer {self.mixer}" if self.mixer else self.name


def build(recipe: Recipe, pretrained: bool = False) -> nn.Module:
    """The model of a recipe with fresh (or timm's published) weights. Raises ValueError for an unknown name or
    option."""
    return convert_model(build_host(recipe, pretrained), recipe)


def build_host(recipe: Recipe, pretrained: bool = False) -> nn.Module:
    """The timm model of a recipe, before `convert_model`. Raises ValueError for an unknown name, a bad keyword or
    weights out of reach."""
    if not timm.is_model(recipe.name):
        raise unknown_name("timm model", recipe.name, timm.list_models())
    _check_no_files(recipe.kwargs)
    size = {} if recipe.img_size is None else {"img_size": recipe.img_size}
    try:
        model = timm.create_model(
            recipe.name, pretrained=pretrained, num_classes=recipe.num_classes, **size, **recipe.kwargs
        )
    except OSError as error:  # what huggingface_hub raises is one
        raise ValueError(f"timm cannot load the weights of {recipe.name}: {str(error).splitlines()[0]}") from error
    except UNBUILT as error:
        if pretrained and "No pretrained weights" in str(error):
            raise ValueError(f"timm has no published weights for {recipe.name}; leave out model.pretrained") from error
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ValueError(f"timm cannot build {recipe.name} with {_keywords(recipe)}: {reason}") from error
    _check_patches(model, recipe)
    return model


def _check_no_files(kwargs: dict[str, Any]) -> None:
    """Raise ValueError for keywords that make timm read files."""
    if files := sorted(FILES & kwargs.keys()):
        raise ValueError(f"model.kwargs must not hold {files[0]}: name weights with model.checkpoint")
    overlay = kwargs.get(OVERLAY, {})
    if not isinstance(overlay, dict) or (others := sorted(overlay.keys() - OVERLAY_KEYS)):
        wrong = repr(overlay) if not isinstance(overlay, dict) else others[0]
        raise ValueError(f"model.kwargs.{OVERLAY} may hold {', '.join(sorted(OVERLAY_KEYS))} only, got {wrong}")


def _keywords(recipe: Recipe) -> object:
    return shortened({"model.img_size": recipe.img_size, "model.kwargs": recipe.kwargs})


def _check_patches(model: Any, recipe: Recipe) -> None:
    """Raise ValueError for a model without blocks or tokens, and for a size asked for that is not whole patches, whose
    last rows and columns timm would leave out."""
    if not len(getattr(model, "blocks", [None])):
        raise ValueError(f"{recipe.name} with {_keywords(recipe)} has no blocks")
    embed = getattr(model, "patch_embed", None)
    size, patch = getattr(embed, "img_size", None), getattr(embed, "patch_size", None)
    if not (isinstance(size, tuple) and isinstance(patch, tuple)):
        return
    asked = recipe.img_size is not None or bool({"img_size", "patch_size"} & recipe.kwargs.keys())
    if any(n < p or (asked and n % p) for n, p in zip(size, patch, strict=True)):
        raise ValueError(f"inputs of {size[0]} x {size[1]} pixels are not whole patches of {patch[0]} x {patch[1]}")


def convert_model(model: nn.Module, recipe: Recipe) -> nn.Module:
    """`model` with the recipe's mixer in its attention layers, in place; unchanged when the recipe names none."""
    if recipe.mixer:
        chosen = {"layers": recipe.layers or None, "keep_softmax": recipe.keep_softmax or None}
        swap(model, recipe.mixer, **chosen, **recipe.mixer_options)
    return model


def with_resolved_options(model: Any, recipe: Recipe) -> Recipe:
    """The recipe of a converted `model` with every option of its mixers, those taken from the host (blocks) too."""
    if recipe.mixer:
        options = next(site.mixer_options for _, site in sites_of(model) if site.mixer_name == recipe.mixer)
        return replace(recipe, mixer_options=options)
    return replace(recipe, kwargs={**recipe.kwargs, **getattr(model, "hla_args", {})})


def holds_weights(path: str | Path) -> bool:
    """Whether `path` is a folder with weights of a timm model."""
    return any((Path(path) / name).is_file() for name in (EMA_WEIGHTS, WEIGHTS, PICKLED))


def weights_file(path: str | Path) -> Path:
    """The file of weights at `path`, which may also be a folder: of the EMA if it holds one, else model.safetensors;
    pytorch_model.bin only in a folder of timm's save_for_hf. Raises ValueError if none."""
    file = Path(path)
    if file.is_dir():
        names = (EMA_WEIGHTS, WEIGHTS, *([PICKLED] if (file / HUB_CONFIG).is_file() else []))
        file = next((file / name for name in names if os.path.lexists(file / name)), file / WEIGHTS)
    if not file.is_file():
        raise ValueError(f"there is no checkpoint {file}")
    if file.suffix != ".safetensors" and file.name != PICKLED:
        raise ValueError(f"checkpoints are .safetensors files, got {file}")
    return file


def read_recipe(path: str | Path) -> Recipe | None:
    """The recipe in the header of a checkpoint, or in the config.json of timm's save_for_hf; None for a file that has
    neither. Raises ValueError if it is truncated or damaged."""
    file = weights_file(path)
    if file.name == PICKLED:
        return _hub_recipe(file.parent)
    try:
        with safe_open(file, framework="pt") as opened:
            header = opened.metadata() or {}
    except SafetensorError as error:
        raise ValueError(f"the checkpoint {file} is truncated or damaged: {error}") from error
    if HEADER not in header:
        return _hub_recipe(file.parent) if file.with_name(HUB_CONFIG).is_file() else None
    try:
        return _restored(from_tree(Recipe, json.loads(header[HEADER])))
    except (ValueError, *UNBUILT) as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"the header of {file} describes no model that this version knows: {reason}") from error


def _hub_recipe(folder: Path) -> Recipe:
    """The recipe of a folder of timm's save_for_hf. Raises ValueError for a config.json that describes no model."""
    try:
        stored = json.loads((folder / HUB_CONFIG).read_text())
        kwargs, cfg = dict(stored.get("model_args") or {}), dict(stored["pretrained_cfg"])
        classes, size = kwargs.pop("num_classes", stored["num_classes"]), kwargs.pop("img_size", cfg["input_size"][1:])
        size = [size, size] if isinstance(size, int) else list(size)
        tree = {"name": stored["architecture"], "kwargs": kwargs, "num_classes": classes}
        if size[0] == size[1]:
            tree["img_size"] = size[0]
        else:
            kwargs["img_size"] = size
        wanted = {key: cfg[key] for key in ("mean", "std", "crop_pct", "interpolation", "crop_mode")}
        tree |= {"input": {"size": size, **wanted}, "classes": list(stored.get("label_names") or [])}
        return _restored(from_tree(Recipe, tree))
    except (OSError, ValueError, *UNBUILT) as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ValueError(f"{folder} cannot be read as a folder of timm's save_for_hf: {reason}") from error


def _restored(recipe: Recipe) -> Recipe:
    """A recipe from a file, with the options that earlier files left out."""
    if recipe.mixer:
        return replace(recipe, mixer_options=restored_options(recipe.mixer, recipe.mixer_options))
    if timm.is_model(recipe.name):
        return replace(recipe, kwargs=restored_arguments(recipe.name, recipe.kwargs))
    return recipe


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint, on the CPU; says so when they are the average of a run. Raises ValueError if the
    file is truncated, holds values that are not finite, or has another digest."""
    file = weights_file(path)
    if Path(path) != file and file.name == EMA_WEIGHTS:
        print(
            f"{path}: the average of the weights is taken, {file} (name {WEIGHTS} there for the last ones)", flush=True
        )
    try:
        found = _tensors(file)
    except (SafetensorError, UnpicklingError, EOFError, ValueError, *UNBUILT) as error:
        raise ValueError(f"the checkpoint {file} is truncated or damaged: {error}") from error
    if wrong := [key for key, tensor in found.items() if not tensor.isfinite().all()]:
        raise ValueError(f"the checkpoint {file} holds values that are not finite, in {wrong[0]}")
    return found


def _tensors(file: Path) -> dict[str, Tensor]:
    if file.name == PICKLED:
        return torch.load(file, map_location="cpu", weights_only=True)
    with safe_open(file, framework="pt") as opened:
        found = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118  not a dict
        check_digest(found, opened.metadata() or {})
    return found


def header_of(recipe: Recipe) -> dict[str, str]:
    """The header of a file of weights, from which `read_recipe` gets the recipe again."""
    return {HEADER: json.dumps(asdict(recipe)), "format": "pt"}


def save_tensors(tensors: dict[str, Tensor], header: dict[str, str], file: Path) -> None:
    """Write tensors as a safetensors file that is complete or as it was, making its folder if needed."""
    file.parent.mkdir(parents=True, exist_ok=True)
    kept = {k: v.detach().cpu().contiguous() for k, v in tensors.items()}
    with replacing(file) as temporary:
        save_file(kept, temporary, metadata=header)


def save_weights(model: nn.Module, recipe: Recipe, file: Path, step: int | None = None) -> None:
    """Write the weights of `model` with `recipe`, their digest and the step of a run in the header, and a model card
    beside them; the file is complete or as it was."""
    tensors = model.state_dict()
    save_tensors(tensors, {**header_of(recipe), **digest_header(tensors, step)}, file)
    write_card(model, file.parent, recipe.describe(), getattr(model, "hla_base", recipe.name), "timm")


def save_model(model: Any, folder: Path) -> None:
    """Write a timm model, converted or not, as a folder of timm's `save_for_hf` with a model card. Raises ValueError
    for a model that has no timm name."""
    if not getattr(model, "pretrained_cfg", None):
        raise ValueError(
            f"{type(model).__name__} was not made by timm.create_model and has no timm name: save its state_dict"
        )
    save_for_hf(model, folder, model_args=getattr(model, "hla_args", None), safe_serialization=True)
    name = model.pretrained_cfg["architecture"]
    write_card(model, folder, name, getattr(model, "hla_base", name), "timm")


def check_output_folder(source: str, folder: Path) -> None:
    """Raise ValueError when what is written into `folder` would take the place of `source`, a folder, file or hub
    name."""
    folder = folder.resolve()
    if source and Path(source).resolve() in (folder, folder / WEIGHTS):
        raise ValueError(f"out={folder} is the source, whose softmax weights would be lost: choose another folder")
    if (folder / EMA_WEIGHTS).is_file():
        raise ValueError(f"out={folder} holds a run with an average of its weights: choose another folder")


def load_model(path: str | Path) -> tuple[nn.Module, Recipe]:
    """The model of a checkpoint that was written here, with its weights, and its recipe. Raises ValueError."""
    recipe = read_recipe(path)
    if recipe is None:
        raise ValueError(f"{path} does not say how to build its model; give the timm name with model.name")
    model = build(recipe)
    load_strict(model, read_weights(path), str(path))
    return model, recipe


def load_strict(model: nn.Module, weights: dict[str, Tensor], where: str) -> None:
    """Load weights, every key of them and of the model. Raises ValueError that names what does not fit."""
    own = model.state_dict()
    if not any(MIXER_PREFIX in k for k in weights):  # softmax weights: the mixers keep their initial values
        own = {k: v for k, v in own.items() if MIXER_PREFIX not in k}
    wrong = [f"lacks {k}" for k in own.keys() - weights.keys()]
    wrong += [f"has {k}, unknown to the model" for k in weights.keys() - own.keys()]
    shared = own.keys() & weights.keys()
    wrong += [
        f"has {k} of {list(weights[k].shape)} where the model has {list(own[k].shape)}"
        for k in shared
        if own[k].shape != weights[k].shape and not k.endswith(".mixer.tag")  # the sites compare their tags themselves
    ]
    wrong += [
        f"has {k} of {weights[k].dtype} where the model has {own[k].dtype}"
        for k in shared
        if own[k].is_floating_point() != weights[k].is_floating_point()
    ]
    if wrong:
        more = f" (and {len(wrong) - 1} more differences)" if len(wrong) > 1 else ""
        raise ValueError(f"the checkpoint {where} does not fit the model: it {sorted(wrong)[0]}{more}")
    model.load_state_dict(weights)


def timm_classes(name: str) -> int:
    """The number of classes that timm's model of this name has."""
    found = timm.get_pretrained_cfg(name, allow_unregistered=True)
    return found.num_classes if found else 1000
