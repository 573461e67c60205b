"""Mixer options in files of earlier versions, which stored only values that differed from the defaults.

`EARLIER_DEFAULTS` holds the defaults of those versions, so that earlier models keep their feature map and blocks, and
`multipole` from before its option `select` keeps near tokens. Files written now hold all options
(`zoo.mixers.MixerConfig.plain_options`).
"""

from collections.abc import Mapping
from typing import Any, TypeGuard

from timm.models import model_entrypoint

from zoo.mixers import MIXERS
from zoo.mixers.block_mixing import DIVIDING

# Defaults of the versions that did not store these options; never changed.
EARLIER_DEFAULTS: dict[str, dict[str, Any]] = {
    **{name: {"feature_map": "elu1"} for name in ("la", "hla2", "ahla", "hla3")},
    **{name: {"feature_map": "elu1", "blocks": DIVIDING} for name in ("mhla", "mhla2")},
    "multipole": {"select": "near"},
    "poly": {"feature_map": "identity", "normalize": False, "center": "k", "mean_path": True},
}


def restored_options(name: str, stored: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return all options of the mixer `name` of a stored model."""
    return {**EARLIER_DEFAULTS.get(name, {}), **(stored or {})}


def restored_conversions(conversions: Any) -> Any:
    """Return stored conversions (of any JSON type) with all options of their mixers, if they are a list."""
    if not isinstance(conversions, list | tuple):
        return conversions
    return [
        {**step, "options": restored_options(step["mixer"], step.get("options"))} if _is_conversion(step) else step
        for step in conversions
    ]


def restored_arguments(name: str, stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return stored `timm.create_model` arguments of the model `name` with all options of its mixers."""
    arguments = dict(stored)
    mixer = getattr(model_entrypoint(name), "mixer", None)
    if mixer is not None:
        arguments["mixer_options"] = restored_options(mixer, arguments.get("mixer_options"))
    if "conversions" in arguments:
        arguments["conversions"] = restored_conversions(arguments["conversions"])
    return arguments


def _is_conversion(step: object) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(step, Mapping) and step.get("mixer") in MIXERS and isinstance(step.get("options") or {}, Mapping)
