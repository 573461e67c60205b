"""Options of mixers as earlier files hold them: only those that differed from the defaults of their time.

They are read with those defaults, `EARLIER_DEFAULTS`, so that a model keeps its feature map and its blocks when the
defaults change. Files that are written now hold every option (`zoo.mixers.MixerConfig.plain_options`).
"""

from collections.abc import Mapping
from typing import Any

from timm.models import model_entrypoint

from zoo.mixers import MIXERS
from zoo.mixers.block_mixing import DIVIDING

# What a file without these options means: the defaults when files held only what differed from them. Never changed, and
# not extended: files that are written now hold every option.
EARLIER_DEFAULTS: dict[str, dict[str, Any]] = {
    **{name: {"feature_map": "elu1"} for name in ("la", "hla2", "ahla", "hla3")},
    **{name: {"feature_map": "elu1", "blocks": DIVIDING} for name in ("mhla", "mhla2")},
    "poly": {"feature_map": "identity", "normalize": False, "center": "k", "mean_path": True},
}


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
