"""Registered timm names: models built by timm's entrypoints, converted before weights are loaded.

timm's entrypoint (`vit_small_patch16_224`) sets the hyper-parameters and calls `_create_vision_transformer`, with
the checkpoint filter. Both run unchanged, with `build_model_with_cfg` replaced by one that also converts the model and
sets the registered name. No hyper-parameters are copied, and `save_for_hf` stores the registered name.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import FunctionType, MappingProxyType
from typing import Any

from timm.models import (
    PretrainedCfg,
    build_model_with_cfg,
    generate_default_cfgs,
    get_pretrained_cfg,
    is_model,
    is_model_pretrained,
    model_entrypoint,
    register_model,
)
from torch import nn

from zoo.mixers import MIXERS
from zoo.models import Conversion, hla_name
from zoo.models.convert import apply_conversions
from zoo.models.saved_config import record_architecture
from zoo.models.stored_options import restored_options
from zoo.models.timm.backbone import with_block_size
from zoo.models.timm.models import HLAModel

REGISTERED_MIXERS = tuple(name for name in MIXERS if name != "softmax")
ANY_SIZE = ("metaformer", "fastvit", "vlt")  # modules of models with stages
SOURCES = ("url", "file", "state_dict", "hf_hub_id", "hf_hub_filename", "source", "architecture", "tag", "license")
DESCRIPTIONS = ("description", "origin_url", "paper_name", "paper_ids", "notes")


def untrained_cfgs(bases: Iterable[str]) -> dict[str, PretrainedCfg]:
    """Return the timm default configs of our names: input, transform and head of the base, but no weights."""
    cleared: dict[str, object] = {**dict.fromkeys([*SOURCES, *DESCRIPTIONS]), "custom_load": False}
    return generate_default_cfgs(
        {hla_name(base, mixer): replace(_base_cfg(base), **cleared) for base in bases for mixer in REGISTERED_MIXERS}
    )


def _base_cfg(base: str) -> PretrainedCfg:
    cfg = get_pretrained_cfg(base)
    assert cfg is not None, f"timm has no model {base}"
    return cfg


def register_family(module: str, bases: Iterable[str], usual: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Register the names of `bases` with every mixer in the module called `module`, which holds `default_cfgs`.

    usual: default options of all mixers.
    """
    for base in bases:
        for mixer in REGISTERED_MIXERS:
            create = _entrypoint(base, mixer, usual)
            create.__module__ = module
            setattr(sys.modules[module], create.__name__, register_model(create))


def _entrypoint(base: str, mixer: str, usual: Mapping[str, Any]) -> Callable[..., nn.Module]:
    name = hla_name(base, mixer)

    def create(pretrained: bool = False, *, mixer_options=None, keep_softmax=None, **kwargs) -> nn.Module:
        own = sorted(set(kwargs) & set(vars(MIXERS[mixer].defaults)))
        if own:
            raise ValueError(f"{', '.join(own)}: pass options of the mixer as mixer_options={{{own[0]!r}: ...}}")
        if not isinstance(mixer_options, dict | None):
            raise ValueError(f"mixer_options is a dict such as {{'lepe': 3}}, got {mixer_options!r}")
        options = {**usual, **(mixer_options or {})}
        if is_stored(kwargs):
            saved = (kwargs.get("pretrained_model_args") or {}).get("mixer_options")
            options = {**restored_options(mixer, saved), **options}
        conversion: Conversion = {"mixer": mixer, "keep_softmax": keep_softmax, "options": options}
        model = build_converted(base, name, [conversion], pretrained, kwargs)
        if isinstance(model, HLAModel):
            record_architecture(model)  # the general name, if blocks differ between stages
        return model

    create.__name__ = create.__qualname__ = name
    create.mixer, create.base = mixer, base  # type: ignore[attr-defined]
    default = f", by default {dict(usual)}" if usual else ""
    create.__doc__ = f"""timm's `{base}` with the mixer `{mixer}` instead of softmax attention.

    mixer_options: options of the mixer (`zoo.mixers.MixerOptions`) as a dict{default}. keep_softmax: blocks that keep
    softmax, as in `zoo.convert`. All other keywords are passed to the base. Raises ValueError for an unknown option."""
    return create


def is_stored(kwargs: dict[str, Any]) -> bool:
    """Whether the keywords of an entrypoint come from a model saved in timm's hub format."""
    cfg = kwargs.get("pretrained_cfg")
    source = cfg.get("source") if isinstance(cfg, dict) else getattr(cfg, "source", None)
    return source in ("hf-hub", "local-dir")


def takes_any_size(base: str) -> bool:
    """Whether the timm model `base` takes images of any size, and no keyword img_size. For converted models this
    keyword is the size for which blocks are chosen."""
    return is_model(base) and model_entrypoint(base).__module__.rpartition(".")[2] in ANY_SIZE


def build_converted(
    base: str, name: str, conversions: Sequence[Conversion], pretrained: bool, kwargs: dict[str, Any]
) -> nn.Module:
    """Build timm's `base` as a model called `name`, converted before its weights are loaded.

    kwargs: keywords of the base. Raises ValueError like `zoo.convert`, and for weights that are missing or unreadable.
    """
    if kwargs.pop("use_naflex", False):
        raise ValueError(f"{name} has no NaFlex form: create a naflexvit_* model, or convert one")
    size = kwargs.pop("img_size", None) if takes_any_size(base) else None
    made = []

    def build(host_class: type[nn.Module], _variant: str, pretrained: bool, **build_kwargs) -> nn.Module:
        def converted(*args, **model_kwargs) -> nn.Module:
            model = with_block_size(host_class(*args, **model_kwargs), size)
            apply_conversions(model, conversions)
            made.append(base)
            setattr(model, "hla_base", base)  # noqa: B010  nn.Module declares no such attribute
            return model

        return _build_with_cfg()(converted, name, pretrained, **build_kwargs)

    entrypoint = model_entrypoint(base)
    creators = {n: f for n, f in entrypoint.__globals__.items() if n.startswith("_create_") and hasattr(f, "__code__")}
    ours = {n: with_globals(f, build_model_with_cfg=build, _USE_NAFLEX_DEFAULT=False) for n, f in creators.items()}
    create = with_globals(entrypoint, build_model_with_cfg=build, **ours)
    try:
        model = create(pretrained, **kwargs)
    except RuntimeError as error:
        if not any(words in str(error) for words in ("No pretrained weights", "Invalid pretrained tag")):
            raise
        mixer, tag = conversions[0]["mixer"], kwargs.get("pretrained_cfg")
        source = f"{base}.{tag}" if isinstance(tag, str) else base
        way = f"model = timm.create_model({source!r}, pretrained=True); zoo.convert(model, {mixer!r})"
        hint = f": convert the base model, {way}" if is_model_pretrained(base) else ", nor of its base model"
        raise ValueError(f"there are no published weights of {name}{hint}") from error
    if not made:
        raise ValueError(f"{name} cannot be built from {base}: its timm entrypoint is not supported")
    return model


def _build_with_cfg() -> Callable[..., nn.Module]:
    """Return timm's builder with a ValueError for weights that cannot be read."""
    load = build_model_with_cfg.__globals__["load_pretrained"]
    readers = ("load_state_dict", "load_state_dict_from_path")
    guarded = {n: with_load_errors(load.__globals__[n]) for n in readers if n in load.__globals__}
    return with_globals(build_model_with_cfg, load_pretrained=with_globals(load, **guarded))


def with_load_errors(read: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `read(path, ...)` to raise ValueError for a file that is missing, truncated or not a checkpoint."""

    def guarded(path: str, *args, **kwargs) -> Any:
        try:
            return read(path, *args, **kwargs)
        except FileNotFoundError as error:
            raise ValueError(f"there is no checkpoint {path}") from error
        except Exception as error:  # torch, zipfile, pickle and safetensors raise different errors
            reason = (str(error).splitlines() or [""])[0] or type(error).__name__
            raise ValueError(f"the checkpoint {path} is truncated, damaged or not one of tensors: {reason}") from error

    return guarded


def with_globals(function: FunctionType, **names: object) -> Callable[..., Any]:
    """Return a copy of `function` in which the globals `names` are replaced; `function` is unchanged."""
    copy = FunctionType(
        function.__code__,
        {**function.__globals__, **names},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
