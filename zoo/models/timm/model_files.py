"""Model files: safetensors with weights and, in the header, the recipe that rebuilds the model."""

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
from zoo.files import RUN_CONFIG, replacing
from zoo.mixers import MixerConfig
from zoo.models import CONVERTED
from zoo.models.checkpoint_tags import check_tags, sites_of
from zoo.models.convert import swap
from zoo.models.digests import check_digest, digest_header
from zoo.models.model_card import write_card
from zoo.models.stored_options import restored_arguments, restored_options
from zoo.models.timm.backbone import with_block_size
from zoo.models.timm.registry import takes_any_size

MIXER_PREFIX = ".mixer."  # in the names of all mixer parameters
HEADER = "hla_zoo"  # key of the safetensors header that holds a Recipe as JSON
WEIGHTS = "model.safetensors"
PICKLED = "pytorch_model.bin"  # written by timm's save_for_hf(safe_serialization=False); read with weights_only=True
HUB_CONFIG = "config.json"  # written by timm's save_for_hf and diffusers' save_pretrained
PIPELINE = "model_index.json"  # in each pipeline folder of diffusers
EMA_WEIGHTS = "model_ema.safetensors"
FILE_KEYWORDS = {"checkpoint_path", "pretrained_cfg", "cache_dir"}  # keywords that make timm read files
OVERLAY = "pretrained_cfg_overlay"  # may change the input of a model, not the location of its weights
OVERLAY_KEYS = {"input_size", "mean", "std", "interpolation", "crop_pct", "crop_mode"}
# errors of timm, torch and diffusers for invalid sizes and names
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
    """Everything needed to rebuild a model: timm name and keywords, mixer and options, input size and transform."""

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
        """Return the recipe of the unconverted model."""
        return replace(self, mixer="", mixer_options={}, layers=[], keep_softmax=[])

    def describe(self) -> str:
        """Describe the model by name and mixer."""
        return f"{self.name} with the mixer {self.mixer}" if self.mixer else self.name


def build(recipe: Recipe, pretrained: bool = False) -> nn.Module:
    """Build the model of a recipe, with timm's weights if `pretrained`. Raises ValueError for unknown names."""
    return convert_model(build_host(recipe, pretrained), recipe)


def build_host(recipe: Recipe, pretrained: bool = False) -> nn.Module:
    """Build the unconverted timm model of a recipe.

    Raises ValueError for an unknown name, an invalid keyword or unavailable weights.
    """
    if not timm.is_model(recipe.name):
        raise unknown_name("timm model", recipe.name, timm.list_models())
    _check_no_files(recipe.kwargs)
    kwargs, size = dict(recipe.kwargs), None
    if not has_stages_of_any_size(recipe):
        kwargs |= {} if recipe.img_size is None else {"img_size": recipe.img_size}
    elif not hasattr(timm.model_entrypoint(recipe.name), "mixer") and recipe.name != CONVERTED:
        size = kwargs.pop("img_size", None)
    try:
        model = timm.create_model(recipe.name, pretrained=pretrained, num_classes=recipe.num_classes, **kwargs)
        with_block_size(model, size)
    except OSError as error:  # includes the errors of huggingface_hub
        raise ValueError(f"timm cannot load the weights of {recipe.name}: {str(error).splitlines()[0]}") from error
    except UNBUILT as error:
        if pretrained and "No pretrained weights" in str(error):
            raise ValueError(f"timm has no published weights for {recipe.name}; leave out model.pretrained") from error
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ValueError(f"timm cannot build {recipe.name} with {_keywords(recipe)}: {reason}") from error
    _check_patches(model, recipe)
    return model


def has_stages_of_any_size(recipe: Recipe) -> bool:
    """Whether the model takes images of any size; then the keyword img_size is the size for which blocks are chosen."""
    return takes_any_size(str(recipe.kwargs.get("base", recipe.name)).partition(".")[0])


def _check_no_files(kwargs: dict[str, Any]) -> None:
    """Raise ValueError for keywords that make timm read files."""
    if files := sorted(FILE_KEYWORDS & kwargs.keys()):
        raise ValueError(f"model.kwargs must not hold {files[0]}: name weights with model.checkpoint")
    overlay = kwargs.get(OVERLAY, {})
    if not isinstance(overlay, dict) or (others := sorted(overlay.keys() - OVERLAY_KEYS)):
        wrong = repr(overlay) if not isinstance(overlay, dict) else others[0]
        raise ValueError(f"model.kwargs.{OVERLAY} may hold {', '.join(sorted(OVERLAY_KEYS))} only, got {wrong}")


def _keywords(recipe: Recipe) -> object:
    return shortened({"model.img_size": recipe.img_size, "model.kwargs": recipe.kwargs})


def _check_patches(model: nn.Module, recipe: Recipe) -> None:
    """Raise ValueError for a model without blocks and for an input size that is not a multiple of the patch size."""
    if not len(getattr(model, "blocks", (None,))):
        raise ValueError(f"{recipe.name} with {_keywords(recipe)} has no blocks")
    embed = getattr(model, "patch_embed", None)
    size, patch = getattr(embed, "img_size", None), getattr(embed, "patch_size", None)
    if not (isinstance(size, tuple) and isinstance(patch, tuple)):
        return
    explicit = recipe.img_size is not None or bool({"img_size", "patch_size"} & recipe.kwargs.keys())
    if any(n < p or (explicit and n % p) for n, p in zip(size, patch, strict=True)):
        raise ValueError(f"inputs of {size[0]} x {size[1]} pixels are not whole patches of {patch[0]} x {patch[1]}")


def convert_model(model: nn.Module, recipe: Recipe) -> nn.Module:
    """Convert `model` in place to the mixer of the recipe, if any; return it."""
    if recipe.mixer:
        chosen = {"layers": recipe.layers or None, "keep_softmax": recipe.keep_softmax or None}
        swap(model, recipe.mixer, **chosen, **recipe.mixer_options)
    return model


def with_resolved_options(model: nn.Module, recipe: Recipe) -> Recipe:
    """Return the recipe of a converted `model` with all options of its mixers, including derived ones (blocks).

    Options that differ between layers, as blocks do between stages, keep the value from which they were derived.
    """
    if recipe.mixer:
        return replace(recipe, mixer_options=_common_options(model, recipe.mixer, recipe.mixer_options))
    arguments = getattr(model, "hla_args", {})
    if "conversions" in arguments and recipe.name != CONVERTED:
        mixer, given = timm.model_entrypoint(recipe.name).mixer, recipe.kwargs.get("mixer_options") or {}
        arguments = {"mixer_options": _common_options(model, mixer, given)}
    return replace(recipe, kwargs={**recipe.kwargs, **arguments})


def _common_options(model: nn.Module, mixer: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return all options of the layers with `mixer`; where layers differ, the `given` option or its default."""
    layers = [site.mixer_options for _, site in sites_of(model) if site.mixer_name == mixer]
    unresolved = MixerConfig.parse(mixer, given).plain_options()
    return {
        key: value if all(options[key] == value for options in layers) else unresolved[key]
        for key, value in layers[0].items()
    }


def holds_weights(path: str | Path) -> bool:
    """Whether the folder `path` holds weights of a timm model."""
    return any((Path(path) / name).is_file() for name in (EMA_WEIGHTS, WEIGHTS, PICKLED))


def holds_diffusers_model(folder: Path) -> bool:
    """Whether `folder` holds a pipeline, a transformer or a run of diffusers."""
    return any((folder / name).exists() for name in (PIPELINE, "transformer", "transformer_ema")) or (
        (folder / HUB_CONFIG).is_file() and not holds_weights(folder)
    )


def weights_file(path: str | Path) -> Path:
    """Return the weights file at `path`, a file or a folder.

    In a folder: the EMA weights if present, else model.safetensors, else pytorch_model.bin of timm's save_for_hf.
    Raises ValueError if there is none.
    """
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
    """Read the recipe of a checkpoint from its header or from the config.json of timm's save_for_hf.

    Returns None if there is neither. Raises ValueError for a truncated or damaged file.
    """
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
        raise ValueError(f"the header of {file} describes no model of this version: {reason}") from error


def _hub_recipe(folder: Path) -> Recipe:
    """Read the recipe of a folder written by timm's save_for_hf. Raises ValueError for an invalid config.json."""
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
        transform = {key: cfg[key] for key in ("mean", "std", "crop_pct", "interpolation", "crop_mode")}
        tree |= {"input": {"size": size, **transform}, "classes": list(stored.get("label_names") or [])}
        return _restored(from_tree(Recipe, tree))
    except (OSError, ValueError, *UNBUILT) as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ValueError(f"{folder} cannot be read as a folder of timm's save_for_hf: {reason}") from error


def _restored(recipe: Recipe) -> Recipe:
    """Fill in the options that files of earlier versions omit."""
    if recipe.mixer:
        return replace(recipe, mixer_options=restored_options(recipe.mixer, recipe.mixer_options))
    if timm.is_model(recipe.name):
        return replace(recipe, kwargs=restored_arguments(recipe.name, recipe.kwargs))
    return recipe


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """Read the tensors of a checkpoint on the CPU; prints if EMA weights are used.

    Raises ValueError for a truncated file, values that are not finite, and a wrong digest.
    """
    file = weights_file(path)
    if Path(path) != file and file.name == EMA_WEIGHTS:
        print(
            f"{path}: using the EMA weights {file} (for the last weights, name {WEIGHTS} in that folder)", flush=True
        )
    try:
        tensors = _tensors(file)
    except (SafetensorError, UnpicklingError, EOFError, ValueError, *UNBUILT) as error:
        raise ValueError(f"the checkpoint {file} is truncated or damaged: {error}") from error
    if wrong := [key for key, tensor in tensors.items() if not tensor.isfinite().all()]:
        raise ValueError(f"the checkpoint {file} holds values that are not finite, in {wrong[0]}")
    return tensors


def _tensors(file: Path) -> dict[str, Tensor]:
    if file.name == PICKLED:
        return torch.load(file, map_location="cpu", weights_only=True)
    with safe_open(file, framework="pt") as opened:
        found = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118  not a dict
        check_digest(found, opened.metadata() or {})
    return found


def header_of(recipe: Recipe) -> dict[str, str]:
    """Return the safetensors header that `read_recipe` reads."""
    return {HEADER: json.dumps(asdict(recipe)), "format": "pt"}


def save_tensors(tensors: dict[str, Tensor], header: dict[str, str], file: Path) -> None:
    """Write tensors to a safetensors file atomically; creates its folder."""
    file.parent.mkdir(parents=True, exist_ok=True)
    kept = {k: v.detach().cpu().contiguous() for k, v in tensors.items()}
    with replacing(file) as temporary:
        save_file(kept, temporary, metadata=header)


def save_weights(model: nn.Module, recipe: Recipe, file: Path, step: int | None = None) -> None:
    """Write the weights of `model` atomically, and a model card in the same folder.

    The header holds `recipe`, a digest of the weights and the step of a run.
    """
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
    """Raise ValueError if `folder` is a file, `source` (a folder, file or hub name) or a run, whose weights would be
    lost."""
    if folder.is_file():
        raise ValueError(f"{folder} is a file: choose a folder")
    if source and Path(source).resolve() in (folder.resolve(), folder.resolve() / WEIGHTS):
        raise ValueError(f"{folder} is the source, whose softmax weights would be lost: choose another folder")
    if any((folder / name).is_file() for name in (RUN_CONFIG, EMA_WEIGHTS)):
        raise ValueError(f"{folder} holds a run, whose weights would be lost: choose another folder")


def load_model(path: str | Path) -> tuple[nn.Module, Recipe]:
    """Build and load the model of a checkpoint; return it with its recipe.

    Raises ValueError for a checkpoint without a recipe, or a damaged one.
    """
    recipe = read_recipe(path)
    if recipe is None:
        raise ValueError(f"{path} does not say how to build its model; give the timm name with model.name")
    model = build(recipe)
    load_strict(model, read_weights(path), str(path))
    return model, recipe


def load_strict(model: nn.Module, weights: dict[str, Tensor], where: str) -> None:
    """Load weights whose keys and mixer options must match the model. Raises ValueError with the first difference."""
    try:
        check_tags(model, weights)
    except ValueError as error:
        raise ValueError(f"the checkpoint {where} does not fit the model: {error}") from error
    own = model.state_dict()
    if not any(MIXER_PREFIX in k for k in weights):  # softmax checkpoint: mixers keep their initial values
        own = {k: v for k, v in own.items() if MIXER_PREFIX not in k}
    wrong = [f"lacks {k}" for k in own.keys() - weights.keys()]
    wrong += [f"has {k}, unknown to the model" for k in weights.keys() - own.keys()]
    shared = own.keys() & weights.keys()
    wrong += [
        f"has {k} of {list(weights[k].shape)} where the model has {list(own[k].shape)}"
        for k in shared
        if own[k].shape != weights[k].shape and not k.endswith(".mixer.tag")  # tags are checked by match_checkpoint
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
    """Return the number of classes of the timm model `name`."""
    cfg = timm.get_pretrained_cfg(name, allow_unregistered=True)
    return cfg.num_classes if cfg else 1000
