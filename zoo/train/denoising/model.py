"""The transformer of a run: built or loaded, converted at the start, adapted, saved as a folder of diffusers."""

import copy
import inspect
import json
from pathlib import Path
from typing import Any, NamedTuple

import diffusers
import torch
from torch import nn

from zoo.config import check_arguments
from zoo.diffusion.loading import boundary_of
from zoo.diffusion.objectives import ALL, Times
from zoo.errors import unknown_name
from zoo.files import replacing_folder
from zoo.mixers import MixerConfig
from zoo.models.convert import backbone_of, swap
from zoo.models.diffusers.families import ANY_MODEL, class_named, known_family
from zoo.models.diffusers.models import patch_of
from zoo.models.diffusers.reading import read_config, read_folder
from zoo.models.digests import add_digests
from zoo.models.timm.model_files import UNBUILT
from zoo.train.denoising.settings import KINDS, DenoiserSettings

PART = "transformer"  # the folder of the model in a run and, unless settings name another, in a pipeline
AVERAGE = "transformer_ema"
ABOUT = "input.json"  # in the folder of a run: what the model was trained on


class Wanted(NamedTuple):
    """What data and objective ask of a model: channels of what it denoises and of the output, size of the input (H, W)
    or (T, H, W), number of classes (None for prompts), channels of the input beside those (image to video), and whether
    tokens of an image encoder come with them."""

    channels: int
    outputs: int
    size: tuple[int, ...]
    classes: int | None
    beside: int = 0
    sees: bool = False


def start(settings: DenoiserSettings, wanted: Wanted) -> tuple[Any, Any]:
    """(model, host) to start a run with: `host` is the model before its mixers were changed, None if it has some.

    Raises ValueError for a checkpoint with other channels or another number of classes, a size that the patches do not
    divide, and for a mixer on a checkpoint that has been converted to another one.
    """
    model = _loaded(settings) if settings.checkpoint else _fresh(settings, wanted)
    check(model, wanted, settings.checkpoint or f"model.kind={settings.kind}")
    without_label_dropout(model)
    if hasattr(model, "hla_config"):
        _check_mixer(model, settings)
        return model, None
    host = copy.deepcopy(model)
    if settings.mixer:
        chosen = {"layers": settings.layers or None, "keep_softmax": settings.keep_softmax or None}
        swap(model, settings.mixer, **chosen, **_options(model, settings, wanted))
    return model, host


def _options(model: Any, settings: DenoiserSettings, wanted: Wanted) -> dict[str, Any]:
    """The options of the mixer; those that follow from the token grid (blocks) are for the grid of the data, which a
    video model does not know."""
    patch = patch_of(model.config)
    patches = patch if isinstance(patch, list | tuple) else [patch] * len(wanted.size)
    grid = tuple(n // p for n, p in zip(wanted.size, patches, strict=True))
    given = {"grid_dims": len(grid), **settings.mixer_options}
    return MixerConfig.parse(settings.mixer, given).for_grid(grid).plain_options()


def notes_of(checkpoint: str) -> dict[str, Any]:
    """What the run that trained a checkpoint noted of its data; empty for other checkpoints."""
    source = Path(checkpoint)
    file = next((f / ABOUT for f in (source, source.parent) if checkpoint and (f / ABOUT).is_file()), None)
    return json.loads(file.read_text()) if file else {}


def times_of(settings: DenoiserSettings) -> Times:
    """The times which the model that a run starts with denoises: all, or those of one of two transformers of a pipeline
    (Wan 2.2 A14B: `boundary_ratio`), or of a run that trained it.

    Raises ValueError for `model.part=transformer_2` of a checkpoint without two.
    """
    if noted := notes_of(settings.checkpoint).get("times"):
        return tuple(noted)
    path, part = Path(settings.checkpoint), settings.part
    alone = bool(settings.checkpoint) and (path / "config.json").is_file()  # in the pipeline's folder or not
    boundary = boundary_of(str(path.parent) if alone else settings.checkpoint)
    part = path.name if alone and boundary is not None else part
    if boundary is None and part != PART:
        raise ValueError(f"{settings.checkpoint or 'a model from scratch'} has no {part}: leave model.part out")
    return ALL if boundary is None else (boundary, 1.0) if part == PART else (0.0, boundary)


def _loaded(settings: DenoiserSettings) -> Any:
    model = load_transformer(settings.checkpoint, settings.part)
    for key, value in settings.kwargs.items():
        if model.config.get(key) != value:
            raise ValueError(f"{settings.checkpoint} has {key}={model.config.get(key)!r}, model.kwargs say {value!r}")
    return model


def _check_mixer(model: Any, settings: DenoiserSettings) -> None:
    """A converted checkpoint goes on as it is: the settings must ask for nothing, or for what it has."""
    if not settings.mixer:
        return
    have = [dict(step) for step in model.config.conversions]
    given, theirs = settings.mixer_options, have[0].get("options", {}) if have else {}
    taken = {k: theirs[k] for k in ("blocks", "grid_dims") if k in theirs}  # from the host, if they were not given
    step: dict[str, Any] = {"mixer": settings.mixer, "layers": settings.layers, "keep_softmax": settings.keep_softmax}
    step["options"] = MixerConfig.parse(settings.mixer, {**taken, **given}).plain_options()
    if have != [{k: v for k, v in step.items() if v}]:
        raise ValueError(
            f"{settings.checkpoint} is converted already, by {json.dumps(have)}; "
            "leave model.mixer empty to go on with it"
        )


def load_transformer(where: str | Path, part: str = PART) -> Any:
    """The transformer in a folder (of a run, a pipeline, or its own) or on the hub, in float32. Of a run that kept an
    average of its weights that average, which is said; of a pipeline that called `part`. Raises ValueError."""
    path = Path(where)
    if not path.is_dir():
        return _from(str(where), {}, part)
    if (path / AVERAGE).is_dir():
        path = path / AVERAGE
        print(f"{where}: the average of the weights is taken, {path} (name {path.with_name(PART)} for the last ones)")
    elif (path / part).is_dir():
        path = path / part
    if not (path / "config.json").is_file():
        raise ValueError(f"{path} holds no transformer: expected config.json of diffusers or a folder {part}")
    return _from(str(path), {}, part)


def _from(where: str, more: dict[str, Any], part: str) -> Any:
    config = read_config(ANY_MODEL, where, **more)
    if config is None:
        if not more and not Path(where).is_dir():
            return _from(where, {"subfolder": part}, part)  # a pipeline on the hub
        raise ValueError(f"there is no checkpoint {where}: expected a folder of diffusers or a hub name in reach")
    name = config.get("_class_name", "")
    allowed = [cls.__name__ for f in KINDS.values() for cls in (f.host, f.converted)]
    if name not in [*allowed, *(f.legacy_class for f in KINDS.values() if f.legacy_class)]:
        raise unknown_name("class of a transformer", name, allowed)
    kind = class_named(name) or getattr(diffusers, name)  # diffusers tells apart what earlier files call alike
    model = read_folder(kind, where, **more, torch_dtype=torch.float32)
    if type(model).__name__ not in allowed:
        raise unknown_name("class of a transformer", type(model).__name__, allowed)
    return model


def _fresh(settings: DenoiserSettings, wanted: Wanted) -> Any:
    family = KINDS[settings.kind]
    cls = family.host
    given = {"in_channels": wanted.channels + wanted.beside, "out_channels": wanted.outputs}
    if family.sized:
        given["sample_size"] = wanted.size[-1]
    if family.classes and not (family.class_tokens and wanted.classes is None):
        given[family.classes] = wanted.classes or 0
    twice = sorted(given.keys() & settings.kwargs.keys())
    if twice:
        raise ValueError(f"model.kwargs must not give {', '.join(twice)}: the data and the objective say it")
    defaults = {name: p.default for name, p in inspect.signature(cls.__init__).parameters.items()}
    check_arguments(cls.__init__, settings.kwargs, "model.kwargs")
    _check_size(wanted.size, patch_of(defaults | settings.kwargs), cls.__name__)
    try:
        model = cls(**given, **settings.kwargs)
    except (ValueError, *UNBUILT) as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ValueError(f"diffusers cannot build {cls.__name__} with {settings.kwargs}: {reason}") from error
    if not backbone_of(model).layers(model) or not all(p.numel() for p in model.parameters()):
        raise ValueError(f"{cls.__name__} with {settings.kwargs} has no blocks, or parameters without a number")
    if family.initialise is not None:
        family.initialise(model)
    return model


def _check_size(size: tuple[int, ...], patch: Any, name: str) -> None:
    """Raise ValueError unless inputs of this size are whole patches, a number or one a dimension."""
    dimensions = 2 if isinstance(patch, int) else len(patch)
    if len(size) != dimensions:
        makes, data = (("videos", "images"), ("images", "videos"))[dimensions == 2]
        raise ValueError(f"{name} makes {makes}, but the data are {data}")
    each = (patch,) * dimensions if isinstance(patch, int) else tuple(patch)
    if any(not isinstance(p, int) or p < 1 for p in each):
        raise ValueError(f"patch_size of {name} must be 1 or more, got {patch}")
    if any(n % p for n, p in zip(size, each, strict=True)):
        data, step = (" x ".join(map(str, n)) for n in (size, each))
        whole = patch if isinstance(patch, int) else step
        raise ValueError(f"inputs of {data} are not divisible by the patch size {whole}")


def check(model: Any, wanted: Wanted, name: str) -> None:
    """Raise ValueError if the model does not fit the data or the objective."""
    config = model.config
    _check_size(wanted.size, patch_of(config), name)
    if config.in_channels != wanted.channels + wanted.beside:
        has = f"{wanted.channels + wanted.beside}" + (
            f", {wanted.beside} of them of the first frame" * bool(wanted.beside)
        )
        raise ValueError(f"{name} takes {config.in_channels} channels, but the data has {has}")
    if wanted.sees != bool(getattr(config, "image_dim", None)):
        which = "no" if wanted.sees else "the"
        raise ValueError(
            f"{name} reads {which} tokens of an image encoder, but the data has {'some' if wanted.sees else 'none'}: "
            "extract with encode.text= the pipeline of this model"
        )
    outputs = config.out_channels or config.in_channels
    if outputs != wanted.outputs:
        raise ValueError(
            f"{name} returns {outputs} channels for {wanted.channels}, but the objective needs {wanted.outputs}: "
            "objective.kind=ddpm learns the variance too, flow does not"
        )
    if getattr(model, "use_additional_conditions", False):  # PixArt-alpha at 1024 pixels
        raise ValueError(
            f"{name} also reads the resolution and aspect ratio of each image, which samples do not tell; allowed: "
            "models with use_additional_conditions=false, such as PixArt-Sigma"
        )
    family = known_family(model)
    classes = config[family.classes] if family.classes else None
    if family.class_tokens and wanted.classes is not None:
        if classes != wanted.classes:
            raise ValueError(
                f"{name} reads tokens of {classes} numbers, but the data has {wanted.classes} classes: a "
                "class is one token with as many numbers as there are classes (or extract prompts with encode.text)"
            )
        return
    by_class = classes is not None and not family.class_tokens
    classes = classes if by_class else None
    if classes != wanted.classes:
        ours = "prompts" if classes is None else f"{classes} classes"
        theirs = "prompts" if wanted.classes is None else f"{wanted.classes} classes"
        raise ValueError(f"{name} is a model of {ours}, but the data has {theirs}")
    if by_class and config.sample_size != wanted.size[-1]:
        wide = f"{wanted.size[-1]} wide"
        raise ValueError(f"{name} is a model of inputs {config.sample_size} wide, but the data is {wide}")


def without_label_dropout(model: nn.Module) -> None:
    """Labels are dropped by the run, once for the whole model: DiT of diffusers would drop them in each block anew."""
    for module in model.modules():
        if isinstance(module, diffusers.models.embeddings.LabelEmbedding):
            module.dropout_prob = 0.0


def save_transformer(model: Any, folder: Path, scheduler: Any, step: int | None = None) -> None:
    """Write the model as a folder that `from_pretrained` of diffusers reads, with the scheduler that samples from it in
    `folder`/scheduler, where tools/sample.py finds it. The folder is complete or as it was; its weights hold their
    digest and the step of a run."""
    with replacing_folder(folder) as temporary:
        model.save_pretrained(temporary)
        add_digests(temporary, step)
        scheduler.save_pretrained(temporary / "scheduler")


# Low-rank adapters


def add_adapters(model: nn.Module, rank: int, alpha: int, targets: list[str]) -> None:
    """Freeze every weight but the new ones of mixers, and give the linear layers that `targets` name an adapter.

    Raises ValueError without the package peft, and for targets that no layer of the model has.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ValueError("lora.rank needs the package peft: pip install 'hla-zoo[diffusion]'") from error
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets, lora_dropout=0.0)
    try:
        inject_adapter_in_model(config, model)
    except ValueError as error:
        raise ValueError(f"lora.targets {targets} name no linear layer of {type(model).__name__}") from error
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".mixer." in name or "lora_" in name)


def merged(model: nn.Module) -> Any:
    """A copy of the model with its adapters added into the weights, ready to be saved; the model itself without any."""
    layers = [name for name, m in model.named_modules() if hasattr(m, "lora_A")]
    if not layers:
        return model
    model = copy.deepcopy(model)
    for name in layers:
        layer: Any = model.get_submodule(name)
        layer.merge()
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, layer.base_layer)
    return model.requires_grad_(True)


def adapter_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """The weights of the adapters and of the new parameters of mixers, by name."""
    return {k: v for k, v in model.state_dict().items() if "lora_" in k or ".mixer." in k}
