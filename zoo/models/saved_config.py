"""Architecture name and `create_model` arguments of a converted timm model, derived from its layers.

timm saves `pretrained_cfg["architecture"]` and, from 1.0.31 on, the arguments of `create_model`. Both are derived from
the current mixers, not from the history of conversions, so that a saved model reloads exactly.
"""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

from timm.models import is_model
from torch import nn

from zoo.models import CONVERTED, Conversion, hla_name
from zoo.models.timm.attention import Site, attention_layers, block_indices

ZOO_KWARGS = ("mixer_options", "keep_softmax", "base", "conversions")  # create_model arguments of ours

if TYPE_CHECKING:
    from zoo.models.timm.models import HLAModel


def live_conversions(layers: Mapping[str, nn.Module], host: str | None = "softmax") -> list[Conversion]:
    """Return the shortest list of conversions that turns the host into a model with the attention `layers`.

    One conversion per mixer and options. host: mixer of the unconverted layers, for which no conversion is needed
    unless its options add weights or change the result; None if the host has none of the mixers.
    """

    def is_converted(site: nn.Module) -> TypeGuard[Site]:
        if not isinstance(site, Site):
            return False
        changed = getattr(site.mixer.options, "causal", False) or any(True for _ in site.mixer.parameters())
        return site.mixer_name != host or bool(changed)

    groups: dict[str, list[str]] = {}
    sites = {name: site for name, site in layers.items() if is_converted(site)}
    for name, site in sites.items():
        groups.setdefault(json.dumps([site.mixer_name, site.mixer_options], sort_keys=True), []).append(name)
    conversions: list[Conversion] = []
    for names in groups.values():
        mixer, options = sites[names[0]].mixer_name, dict(sites[names[0]].mixer_options)
        chosen = None if len(names) == len(layers) else dict.fromkeys(names, mixer)
        conversions.append({"mixer": mixer, "layers": chosen, "keep_softmax": None, "options": options})
    return conversions


def architecture_of(model: "HLAModel") -> tuple[str, dict[str, Any]]:
    """Return (timm name, arguments) with which `timm.create_model` builds the mixers of `model`.

    The name is the base name if every layer is softmax, a registered name if all converted layers have the same
    mixer and options, and otherwise the general name, whose arguments are the base and a list of conversions.
    """
    groups = live_conversions(attention_layers(model))
    if not groups:
        return model.hla_base, {}
    mixer, options = groups[0]["mixer"], groups[0]["options"]
    name = hla_name(model.hla_base, mixer)
    swapped = groups[0]["layers"]
    assert swapped is None or isinstance(swapped, dict)
    kept = _kept_blocks(list(attention_layers(model)), swapped)
    if len(groups) > 1 or kept is None or not is_model(name):
        return CONVERTED, {"base": model.hla_base, "conversions": groups}
    return name, {key: value for key, value in (("mixer_options", options), ("keep_softmax", kept)) if value}


def _kept_blocks(layers: list[str], swapped: dict[str, str] | None) -> list[int] | None:
    """Return the indices of blocks without a layer in `swapped`; None if a block is partly swapped.

    swapped: layer -> mixer; None: all layers.
    """
    if swapped is None:
        return []
    index = block_indices(layers)
    kept = {index[name] for name in layers if name not in swapped}
    return None if kept & {index[name] for name in swapped} else sorted(kept)


def recorded_arguments(model: "HLAModel", given: dict[str, Any]) -> dict[str, Any]:
    """Return the `create_model` arguments `given`, with those that describe the current mixers of `model`.

    Options that were derived from the host, such as blocks, are included, so that the model loads at every size.
    """
    name, ours = architecture_of(model)
    if name != CONVERTED and model.pretrained_cfg["architecture"] == CONVERTED:  # created by the general name
        groups = live_conversions(attention_layers(model))
        ours = {"base": model.hla_base, "conversions": groups or given["conversions"]}
    return {**{k: v for k, v in given.items() if k not in ZOO_KWARGS}, **ours}


def record_architecture(model: "HLAModel") -> None:
    """Write the architecture name into the `pretrained_cfg` of `model`, if it has one."""
    cfg = getattr(model, "pretrained_cfg", None)
    if cfg:
        model.pretrained_cfg = model.default_cfg = {**cfg, "architecture": architecture_of(model)[0]}
