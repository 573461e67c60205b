"""Initial model of a classification run."""

import math
from dataclasses import replace

import timm
from timm.layers import resample_abs_pos_embed
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from zoo.mixers import MixerConfig
from zoo.models.timm.model_files import (
    Recipe,
    build_host,
    convert_model,
    has_stages_of_any_size,
    load_strict,
    read_recipe,
    read_weights,
    timm_classes,
    with_resolved_options,
)
from zoo.train.settings import ModelSettings


def plan(settings: ModelSettings, n_classes: int | None = None) -> tuple[Recipe, Recipe | None]:
    """Determine which model to build: (recipe of the model, recipe of the checkpoint or None).

    n_classes: number of classes; None takes it from the checkpoint, or else from timm. Raises ValueError for a missing
    or damaged checkpoint, and if neither the settings nor the checkpoint name the model.
    """
    if settings.checkpoint and settings.pretrained:
        raise ValueError("model.checkpoint and model.pretrained both name weights; give one of them")
    found = read_recipe(settings.checkpoint) if settings.checkpoint else None
    recipe = Recipe(settings.name, settings.kwargs, settings.img_size)
    own = timm.model_entrypoint(settings.name) if timm.is_model(settings.name) else None
    if settings.mixer and own is not None and hasattr(own, "mixer"):
        raise ValueError(
            f"model.name={settings.name} has the mixer {own.mixer!r} already: leave model.mixer empty, or name the "
            f"softmax model, {own.base}"
        )
    if not settings.name:
        if found is None:
            raise ValueError("model.name is empty and no checkpoint says which model it is; give model.name=TIMM_NAME")
        recipe = found.host() if settings.img_size is None else replace(found.host(), img_size=settings.img_size)
    if has_stages_of_any_size(recipe):
        recipe = _with_block_size(recipe, settings, found)
    classes = n_classes or (found.num_classes if found else timm_classes(recipe.name))
    options = settings.mixer_options
    if found and found.mixer == settings.mixer and "blocks" in found.mixer_options:  # also for another image size
        options = {"blocks": found.mixer_options["blocks"], **options}
    recipe = replace(recipe, num_classes=classes, mixer=settings.mixer, mixer_options=options)
    return replace(recipe, layers=settings.layers, keep_softmax=settings.keep_softmax), found


def _with_block_size(recipe: Recipe, settings: ModelSettings, found: Recipe | None) -> Recipe:
    """Add the image size for which blocks are chosen: the one of a converted checkpoint, else the one of the model."""
    size = recipe.img_size
    if found and (found.mixer or (timm.is_model(found.name) and hasattr(timm.model_entrypoint(found.name), "mixer"))):
        size = found.kwargs.get("img_size")
    size = settings.kwargs.get("img_size", size)
    return recipe if size is None else replace(recipe, kwargs={**recipe.kwargs, "img_size": size})


def start_classifier(settings: ModelSettings, n_classes: int | None = None) -> tuple[nn.Module, nn.Module, Recipe]:
    """Build the initial model of a run: (model, host, recipe), where `host` is the softmax model before conversion.

    The weights of both come from `settings.checkpoint`, from timm, or are random. If the checkpoint is a converted
    model, only `model` gets its weights. Position embeddings of another image size are resampled. Raises ValueError for
    a truncated checkpoint or one with another mixer or number of classes, and for unknown names.
    """
    recipe, found = plan(settings, n_classes)
    host = build_host(recipe, settings.pretrained)
    if settings.checkpoint and not (found and found.mixer):
        load_strict(host, _start_weights(settings, host, found, recipe.num_classes), settings.checkpoint)
    model = build_host(recipe)
    model.load_state_dict(host.state_dict())
    convert_model(model, recipe)
    if found and found.mixer:
        _check_mixer(recipe, found, settings.checkpoint)
        load_strict(model, _start_weights(settings, model, found, recipe.num_classes), settings.checkpoint)
    return model, host, with_resolved_options(model, recipe)


def _check_mixer(recipe: Recipe, found: Recipe, where: str) -> None:
    for key in ("mixer", "layers", "keep_softmax"):
        have, want = getattr(found, key), getattr(recipe, key)
        if have != want:
            raise ValueError(f"{where} is a checkpoint of another mixer: it has model.{key} {have!r}, the run {want!r}")
    have, want = (MixerConfig.parse(recipe.mixer, r.mixer_options).plain_options() for r in (found, recipe))
    theirs, ours = ({k: v for k, v in a.items() if v != b[k]} for a, b in ((have, want), (want, have)))
    if theirs:
        raise ValueError(
            f"{where} is a checkpoint of another mixer: it has model.mixer_options {theirs!r}, the run {ours!r}"
        )


def _start_weights(
    settings: ModelSettings, model: nn.Module, found: Recipe | None, n_classes: int
) -> dict[str, Tensor]:
    weights = _resampled(read_weights(settings.checkpoint), model)
    if settings.reset_classifier:
        head = tuple(f"{part}." for part in _classifiers(model))
        own = model.state_dict()
        return {k: own[k] if k.startswith(head) else v for k, v in weights.items()}
    if found and found.num_classes != n_classes:
        raise ValueError(
            f"{settings.checkpoint} has {found.num_classes} classes, but the data has {n_classes}; "
            "set model.reset_classifier=true to start with a new classifier"
        )
    return weights


def _resampled(weights: dict[str, Tensor], model: VisionTransformer) -> dict[str, Tensor]:
    """Resample position embeddings [1, tokens, C] of a square grid to the grid of the model, as timm does. Other
    weights are returned unchanged."""
    have, want = weights.get("pos_embed"), model.state_dict().get("pos_embed")
    if have is None or want is None or have.shape == want.shape or have.shape[-1] != want.shape[-1]:
        return weights
    prefix = 0 if getattr(model, "no_embed_class", False) else model.num_prefix_tokens
    side = math.isqrt(have.shape[1] - prefix)
    if side**2 != have.shape[1] - prefix:
        return weights
    grid = model.patch_embed.grid_size
    print(f"position embeddings resampled from {side} x {side} to {grid[0]} x {grid[1]}", flush=True)
    return {**weights, "pos_embed": resample_abs_pos_embed(have, list(grid), num_prefix_tokens=prefix)}


def _classifiers(model: nn.Module) -> list[str]:
    names = model.pretrained_cfg["classifier"]  # type: ignore[index]
    return [names] if isinstance(names, str) else list(names)
