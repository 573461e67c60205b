"""Transformer of a diffusion run: building, loading, conversion, LoRA adapters and saving."""

import copy
import inspect
import json
from pathlib import Path
from typing import NamedTuple

import diffusers
from diffusers import ModelMixin, SchedulerMixin
from torch import Tensor, nn

from zoo.config import Tree, check_arguments
from zoo.diffusion.loading import TRANSFORMER, boundary_of, load_transformer, notes_of
from zoo.diffusion.objectives import ALL, Times
from zoo.errors import unknown_name
from zoo.files import replacing_folder
from zoo.mixers import MixerConfig
from zoo.models.convert import backbone_of, swap
from zoo.models.diffusers.families import known_family
from zoo.models.diffusers.models import patch_of
from zoo.models.digests import add_digests
from zoo.models.timm.model_files import UNBUILT
from zoo.train.denoising.settings import KINDS, DenoiserSettings


class ModelRequirements(NamedTuple):
    """Requirements of data and objective on the model.

    channels: number of channels of the data.  outputs: number of output channels.  size: size of the input, (H, W) or
    (T, H, W).  classes: number of classes, None for prompts.  extra_channels: number of additional input channels (of
    an image-to-video model).  image_tokens: whether the model gets tokens of an image encoder.
    """

    channels: int
    outputs: int
    size: tuple[int, ...]
    classes: int | None
    extra_channels: int = 0
    image_tokens: bool = False


def start_transformer(settings: DenoiserSettings, wanted: ModelRequirements) -> tuple[ModelMixin, ModelMixin | None]:
    """Build or load the initial model of a run: (model, host), where `host` is the model before conversion, or None if
    the checkpoint is a converted model.

    Raises ValueError for a checkpoint with other channels or another number of classes, for a size not divisible by the
    patch size, and for a converted checkpoint with another mixer than in the settings.
    """
    model = _loaded(settings) if settings.checkpoint else _random_model(settings, wanted)
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


def _options(model: ModelMixin, settings: DenoiserSettings, wanted: ModelRequirements) -> Tree:
    """Return the options of the mixer. Options that depend on the token grid (blocks) are computed from the size of
    the data, since a video model has no fixed grid."""
    grid = tuple(n // p for n, p in zip(wanted.size, patch_of(model.config), strict=True))
    given = {"grid_dims": len(grid), **settings.mixer_options}
    return MixerConfig.parse(settings.mixer, given).for_grid(grid).plain_options()


def times_of(settings: DenoiserSettings) -> Times:
    """Return the time range that the model denoises: the full range, or the range of one expert for a two-expert
    pipeline (Wan 2.2 A14B, whose `boundary_ratio` separates the ranges) and for a run that trained one of its experts.

    Raises ValueError for `model.subfolder=transformer_2` of a checkpoint with one transformer.
    """
    if noted := notes_of(settings.checkpoint).get("times"):
        return tuple(noted)
    path, part = Path(settings.checkpoint), settings.subfolder
    alone = bool(settings.checkpoint) and (path / "config.json").is_file()  # the folder of a transformer
    boundary = boundary_of(str(path.parent) if alone else settings.checkpoint)
    part = path.name if alone and boundary is not None else part
    if boundary is None and part != TRANSFORMER:
        raise ValueError(f"{settings.checkpoint or 'a model from scratch'} has no {part}: leave model.subfolder out")
    return ALL if boundary is None else (boundary, 1.0) if part == TRANSFORMER else (0.0, boundary)


def _loaded(settings: DenoiserSettings) -> ModelMixin:
    model = load_trainable(settings.checkpoint, settings.subfolder)
    for key, value in settings.kwargs.items():
        if model.config.get(key) != value:
            raise ValueError(f"{settings.checkpoint} has {key}={model.config.get(key)!r}, model.kwargs has {value!r}")
    return model


def _check_mixer(model: ModelMixin, settings: DenoiserSettings) -> None:
    """Raise ValueError if the settings name a mixer that the converted `model` does not have."""
    if not settings.mixer:
        return
    have = [dict(step) for step in model.config.conversions]
    given, theirs = settings.mixer_options, have[0].get("options", {}) if have else {}
    taken = {k: theirs[k] for k in ("blocks", "grid_dims") if k in theirs}  # computed at conversion, if not given
    step: Tree = {"mixer": settings.mixer, "layers": settings.layers, "keep_softmax": settings.keep_softmax}
    step["options"] = MixerConfig.parse(settings.mixer, {**taken, **given}).plain_options()
    if have != [{k: v for k, v in step.items() if v}]:
        raise ValueError(
            f"{settings.checkpoint} is converted already, by {json.dumps(have)}; "
            "leave model.mixer empty to go on with it"
        )


def load_trainable(where: str, part: str = TRANSFORMER) -> ModelMixin:
    """Load a transformer in float32 by `load_transformer`. Raises ValueError as it does, and for a transformer that
    cannot be trained here."""
    model = load_transformer(where, part=part)
    allowed = [cls.__name__ for f in KINDS.values() for cls in (f.host, f.converted)]
    if type(model).__name__ not in allowed:
        raise unknown_name("class of a transformer", type(model).__name__, allowed)
    return model


def _random_model(settings: DenoiserSettings, wanted: ModelRequirements) -> ModelMixin:
    """Build a model with random weights."""
    family = KINDS[settings.kind]
    cls = family.host
    given = {"in_channels": wanted.channels + wanted.extra_channels, "out_channels": wanted.outputs}
    if family.sized:
        given["sample_size"] = wanted.size[-1]
    if family.classes and not (family.class_tokens and wanted.classes is None):
        given[family.classes] = wanted.classes or 0
    twice = sorted(given.keys() & settings.kwargs.keys())
    if twice:
        raise ValueError(f"model.kwargs must not give {', '.join(twice)}: it follows from the data and the objective")
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


def _check_size(size: tuple[int, ...], patch: tuple[int, ...], name: str) -> None:
    """Raise ValueError unless the input size is divisible by the patch size in each dimension."""
    if len(size) != len(patch):
        makes, data = (("videos", "images"), ("images", "videos"))[len(patch) == 2]
        raise ValueError(f"{name} makes {makes}, but the data are {data}")
    if wrong := [p for p in patch if not isinstance(p, int) or p < 1]:
        raise ValueError(f"patch_size of {name} must be 1 or more, got {wrong[0]}")
    if any(n % p for n, p in zip(size, patch, strict=True)):
        data, step = (" x ".join(map(str, n)) for n in (size, patch))
        whole = patch[0] if len(set(patch)) == 1 else step
        raise ValueError(f"inputs of {data} are not divisible by the patch size {whole}")


def check(model: ModelMixin, wanted: ModelRequirements, name: str) -> None:
    """Raise ValueError if the model does not fit the data or the objective."""
    config = model.config
    _check_size(wanted.size, patch_of(config), name)
    if config.in_channels != wanted.channels + wanted.extra_channels:
        has = f"{wanted.channels + wanted.extra_channels}" + (
            f", {wanted.extra_channels} of them of the first frame" * bool(wanted.extra_channels)
        )
        raise ValueError(f"{name} takes {config.in_channels} channels, but the data has {has}")
    if wanted.image_tokens != bool(getattr(config, "image_dim", None)):
        which, has = ("no", "some") if wanted.image_tokens else ("the", "none")
        raise ValueError(
            f"{name} reads {which} tokens of an image encoder, but the data has {has}: "
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
            f"{name} also reads the resolution and aspect ratio of each image, which the samples do not have; allowed: "
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
    """Disable label dropout in the model, since the run drops labels itself; DiT of diffusers would drop them again in
    each block."""
    for module in model.modules():
        if isinstance(module, diffusers.models.embeddings.LabelEmbedding):
            module.dropout_prob = 0.0


def save_transformer(model: ModelMixin, folder: Path, scheduler: SchedulerMixin, step: int | None = None) -> None:
    """Write the model as a folder for diffusers' `from_pretrained`, with its scheduler in `folder`/scheduler, where
    `zoo sample` finds it.

    The weights store their digest and the step of the run. After a crash the folder is the old or the new one.
    """
    with replacing_folder(folder) as temporary:
        model.save_pretrained(temporary)
        add_digests(temporary, step)
        scheduler.save_pretrained(temporary / "scheduler")


# Low-rank adapters


def add_adapters(model: nn.Module, rank: int, alpha: int, targets: list[str]) -> None:
    """Freeze all weights except new parameters of mixers, and add adapters to the linear layers named by `targets`.

    Raises ValueError without the package peft, and for targets that name no layer of the model.
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


def merged(model: nn.Module) -> nn.Module:
    """Return a copy of the model with its adapters merged into the weights, or the model itself if it has none."""
    layers = [name for name, m in model.named_modules() if hasattr(m, "lora_A")]
    if not layers:
        return model
    model = copy.deepcopy(model)
    for name in layers:
        layer = model.get_submodule(name)
        layer.merge()  # type: ignore[operator]
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, layer.base_layer)
    return model.requires_grad_(True)


def adapter_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights of the adapters and of the new parameters of mixers, by name."""
    return {k: v for k, v in model.state_dict().items() if "lora_" in k or ".mixer." in k}
