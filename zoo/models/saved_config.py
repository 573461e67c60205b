"""What a converted model is called and which arguments build it again, read off its live sites.

timm saves `pretrained_cfg["architecture"]` and (newer than 1.0.30) the arguments of `create_model`. Both are derived
from what the sites are now, never from the history of conversions, so that a saved model reloads as what it is.
"""

import json
from typing import Any

from timm.models import is_model

from zoo.models import CONVERTED, hla_name
from zoo.models.timm.attention import Site, attention_layers, block_index

ZOO_KWARGS = ("mixer_options", "keep_softmax", "base", "conversions")  # create_model arguments of ours


def live_conversions(layers: dict[str, Any], host: str | None = "softmax") -> list[dict[str, Any]]:
    """The shortest list of conversions that makes the attention `layers` of a model from those of its host.

    One for each mixer with its options. Layers with the mixer `host` are left out, since the host has it already, bit
    for bit (None: it has none of the mixers).
    """
    groups: dict[str, dict[str, Any]] = {}
    for name, site in layers.items():
        if isinstance(site, Site) and site.mixer_name != host:
            empty = {"mixer": site.mixer_name, "layers": {}, "keep_softmax": None, "options": dict(site.mixer_options)}
            group = groups.setdefault(json.dumps([site.mixer_name, site.mixer_options], sort_keys=True), empty)
            group["layers"][name] = site.mixer_name
    for group in groups.values():
        group["layers"] = None if len(group["layers"]) == len(layers) else group["layers"]
    return list(groups.values())


def architecture_of(model: Any) -> tuple[str, dict[str, Any]]:
    """(timm name, arguments) with which `timm.create_model` builds the mixers of `model`.

    The base's own name when every layer is softmax; a registered name when one mixer with one set of options fits;
    else the general name, which takes the base and a list of conversions.
    """
    groups = live_conversions(attention_layers(model))
    if not groups:
        return model.hla_base, {}
    mixer, options = groups[0]["mixer"], groups[0]["options"]
    name = hla_name(model.hla_base, mixer)
    kept = _kept_blocks(list(attention_layers(model)), groups[0]["layers"])
    if len(groups) > 1 or kept is None or not is_model(name):
        return CONVERTED, {"base": model.hla_base, "conversions": groups}
    return name, {key: value for key, value in (("mixer_options", options), ("keep_softmax", kept)) if value}


def _kept_blocks(layers: list[str], swapped: dict[str, str] | None) -> list[int] | None:
    """Indices of the blocks with no layer in `swapped` (None: all are); None when a block is only partly swapped."""
    if swapped is None:
        return []
    kept = {block_index(name) for name in layers if name not in swapped}
    return None if kept & {block_index(name) for name in swapped} else sorted(kept)


def recorded_arguments(model: Any, given: dict[str, Any]) -> dict[str, Any]:
    """`given`, the arguments of `create_model`, with those that say what the sites of `model` are now: what was chosen
    for a host (the blocks of a mixer) holds at every size at which the model is loaded again."""
    name, ours = architecture_of(model)
    if name != CONVERTED and model.pretrained_cfg["architecture"] == CONVERTED:  # created by the general name
        groups = live_conversions(attention_layers(model))
        ours = {"base": model.hla_base, "conversions": groups or given["conversions"]}
    return {**{k: v for k, v in given.items() if k not in ZOO_KWARGS}, **ours}


def record_architecture(model: Any) -> None:
    """Write the name where timm's hub format looks for it; nothing for a model without a timm config."""
    cfg = getattr(model, "pretrained_cfg", None)
    if cfg:
        model.pretrained_cfg = model.default_cfg = {**cfg, "architecture": architecture_of(model)[0]}
