"""Options of mixers as they are stored with a model: every one of them, whatever its default.

Files of models that were written before that hold only the options that differed from the defaults of their time. They
are read with those defaults, `EARLIER_DEFAULTS`, so that a model keeps its feature map when the default changes.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from timm.models import model_entrypoint
from torch import nn

from zoo.errors import unknown_name
from zoo.mixers import MIXERS
from zoo.mixers.options import LocalOptions, resolve_options

# What a file without these options means: the defaults when files held only what differed from them. Never changed, and
# not extended: files that are written now hold every option.
EARLIER_DEFAULTS: dict[str, dict[str, Any]] = {
    **{name: {"feature_map": "elu1"} for name in ("la", "hla2", "ahla", "hla3", "mhla", "mhla2")},
    "poly": {"feature_map": "identity", "normalize": False, "center": "k", "mean_path": True},
}


def stored_options(mixer: nn.Module) -> dict[str, Any]:
    """All options of a live mixer, fit for JSON (tuples become lists)."""
    options: Any = mixer.options
    return json.loads(json.dumps(asdict(options)))


def full_options(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the mixer `name` that were given, with today's defaults for the others, fit for JSON. Raises
    ValueError for an unknown mixer, and an option that it does not have."""
    if name not in MIXERS:
        raise unknown_name("mixer", name, MIXERS)
    defaults = getattr(MIXERS[name], "defaults", LocalOptions())
    return json.loads(json.dumps(asdict(resolve_options(defaults, dict(options)))))


def restored_options(name: str, stored: Mapping[str, Any] | None) -> dict[str, Any]:
    """The options with which the mixer `name` of a stored model is built again."""
    return {**EARLIER_DEFAULTS.get(name, {}), **(stored or {})}


def restored_conversions(conversions: Any) -> Any:
    """Stored conversions with the options of their mixers; what is no list of conversions is returned as it is."""
    if not isinstance(conversions, list | tuple):
        return conversions
    return [
        {**step, "options": restored_options(step["mixer"], step.get("options"))} if _is_step(step) else step
        for step in conversions
    ]


def restored_arguments(name: str, stored: Mapping[str, Any]) -> dict[str, Any]:
    """The stored arguments of `timm.create_model` for the model `name`, with the options of its mixers."""
    arguments = dict(stored)
    mixer = getattr(model_entrypoint(name), "mixer", None)
    if mixer is not None:
        arguments["mixer_options"] = restored_options(mixer, arguments.get("mixer_options"))
    if "conversions" in arguments:
        arguments["conversions"] = restored_conversions(arguments["conversions"])
    return arguments


def _is_step(step: Any) -> bool:
    return isinstance(step, Mapping) and step.get("mixer") in MIXERS and isinstance(step.get("options") or {}, Mapping)
