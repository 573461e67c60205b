"""The name of every converted model that has none of its own: other bases, and layers of several kinds.

`timm.create_model("hla_converted", base="vit_small_patch16_dinov3", conversions=[{"mixer": "mhla"}])`. Converted models
are saved under it, so that they reload exactly.
"""

from collections.abc import Sequence
from dataclasses import asdict
from difflib import get_close_matches
from typing import Any

from timm.models import PretrainedCfg, get_pretrained_cfg, is_model, list_models, model_entrypoint, register_model
from torch import nn

from zoo.models import CONVERTED
from zoo.models.stored_options import restored_conversions
from zoo.models.timm.registry import build_converted, is_stored

__all__: list[str] = []


@register_model
def hla_converted(
    pretrained: bool = False, *, base: str | None = None, conversions: Sequence[Any] | None = None, **kwargs
) -> nn.Module:
    """timm's model `base` (a name, with tag or without) after `conversions`, applied one after the other.

    conversions: dicts with the arguments of `zoo.convert`: "mixer", and if wanted "layers", "keep_softmax", "options".
    pretrained: start from the weights of the base. Every other keyword is the base's.
    Raises ValueError for a base that timm does not have, and for what `zoo.convert` refuses.
    """
    name, _, tag = _check_base(base).partition(".")
    cfg = kwargs.pop("pretrained_cfg", None)
    if cfg is None or isinstance(cfg, str):
        cfg = get_pretrained_cfg(".".join(filter(None, [name, cfg or tag]))) or PretrainedCfg()
    cfg = dict(cfg) if isinstance(cfg, dict) else asdict(cfg)
    kwargs["pretrained_cfg"] = {**cfg, "architecture": CONVERTED}
    steps = restored_conversions(conversions) if is_stored(kwargs) else conversions
    return build_converted(name, CONVERTED, steps or (), pretrained, kwargs)


def _check_base(base: Any) -> str:
    if base is None:
        raise ValueError(
            f'{CONVERTED} needs the name of a timm model and what to do with it: base="vit_small_patch16_dinov3", '
            'conversions=[{"mixer": "mhla"}]'
        )
    name = base.partition(".")[0] if isinstance(base, str) else ""
    if not is_model(name):
        near = get_close_matches(str(base), list_models(), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ", see timm.list_models()"
        raise ValueError(f"base={base!r} is not the name of a timm model{hint}")
    if model_entrypoint(name).__module__.startswith("zoo."):
        raise ValueError(f"base={base!r} has other mixers already: give the timm model that it was made from")
    return base
