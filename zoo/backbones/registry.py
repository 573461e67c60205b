"""Registered timm names: each is a base model of timm, built by timm's own entrypoint and converted before loading.

The base entrypoint holds the hyper-parameters, its creator the checkpoint filter and the feature getter. Both run as
they are, only with another `build_model_with_cfg`: ours builds the host, swaps its attention and gives the model our
name. So no table of sizes is copied, and saving for the hub records our name.
"""

import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from types import FunctionType
from typing import Any

from timm.models import (
    PretrainedCfg,
    build_model_with_cfg,
    generate_default_cfgs,
    get_pretrained_cfg,
    model_entrypoint,
    register_model,
)
from torch import nn

from zoo.backbones import hla_name
from zoo.convert import swap
from zoo.mixers import MIXERS

REGISTERED_MIXERS = tuple(name for name in MIXERS if name != "softmax")
SOURCES = ("url", "file", "state_dict", "hf_hub_id", "hf_hub_filename", "source", "architecture", "tag", "license")
DESCRIPTIONS = ("description", "origin_url", "paper_name", "paper_ids", "notes")


def untrained_cfgs(bases: Iterable[str]) -> dict[str, Any]:
    """timm default configs of our names: input, transform and head of the base, no weights (none are published)."""
    cleared: dict[str, Any] = {**dict.fromkeys([*SOURCES, *DESCRIPTIONS]), "custom_load": False}
    return generate_default_cfgs(
        {hla_name(base, mixer): replace(_base_cfg(base), **cleared) for base in bases for mixer in REGISTERED_MIXERS}
    )


def _base_cfg(base: str) -> PretrainedCfg:
    cfg = get_pretrained_cfg(base)
    assert cfg is not None, f"timm has no model {base}"
    return cfg


def register_family(module: str, bases: Iterable[str], creator: str) -> None:
    """Register the names of `bases` with every mixer in the module called `module`, which holds their `default_cfgs`.

    creator: the function of the base's module that its entrypoints call (`_create_vision_transformer`).
    """
    for base in bases:
        for mixer in REGISTERED_MIXERS:
            create = _entrypoint(base, mixer, creator)
            create.__module__ = module
            setattr(sys.modules[module], create.__name__, register_model(create))


def _entrypoint(base: str, mixer: str, creator: str) -> Callable[..., nn.Module]:
    name = hla_name(base, mixer)

    def create(pretrained: bool = False, *, mixer_options=None, keep_softmax=None, **kwargs) -> nn.Module:
        if kwargs.pop("use_naflex", False):
            raise ValueError(f"{name} has no NaFlex form: linear mixers cannot honour the padding mask of mixed sizes")

        def build(host_class: type[nn.Module], _variant: str, pretrained: bool, **build_kwargs) -> nn.Module:
            def converted(**model_kwargs) -> nn.Module:
                model = host_class(**model_kwargs)
                swap(model, mixer, keep_softmax=keep_softmax, **(mixer_options or {}))
                return model

            return build_model_with_cfg(converted, name, pretrained, **build_kwargs)

        entrypoint = model_entrypoint(base)
        base_creator = rebind(entrypoint.__globals__[creator], build_model_with_cfg=build, _USE_NAFLEX_DEFAULT=False)
        return rebind(entrypoint, **{creator: base_creator})(pretrained, **kwargs)

    create.__name__ = create.__qualname__ = name
    create.__doc__ = f"""timm's `{base}` with the mixer `{mixer}` in the place of softmax attention.

    mixer_options: options of the mixer (`zoo.mixers.MixerOptions`) as a dict. keep_softmax: blocks that stay softmax,
    as in `zoo.convert`. Every other keyword is the base's. Raises ValueError for an option the mixer does not have."""
    return create


def rebind(function: Any, **names: Any) -> Callable[..., Any]:
    """A copy of `function` that sees `names` in the place of those globals; `function` itself is untouched."""
    copy = FunctionType(
        function.__code__,
        {**function.__globals__, **names},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
