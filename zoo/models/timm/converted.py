"""Registered name `hla_converted` of all converted timm models without a name of their own.

`timm.create_model("hla_converted", base="vit_small_patch16_dinov3", conversions=[{"mixer": "mhla"}])` builds such a
model. It covers all bases and several mixers per model; saved models reload through it.
"""

from collections.abc import Sequence
from dataclasses import asdict

from timm.models import PretrainedCfg, get_pretrained_cfg, is_model, list_models, model_entrypoint, register_model
from torch import nn

from zoo.errors import nearest
from zoo.models import CONVERTED, Conversion
from zoo.models.stored_options import restored_conversions
from zoo.models.timm.registry import build_converted, is_stored

__all__: list[str] = []


@register_model
def hla_converted(
    pretrained: bool = False, *, base: str | None = None, conversions: Sequence[Conversion] | None = None, **kwargs
) -> nn.Module:
    """Build the timm model `base` (with or without tag) and apply `conversions` in order.

    conversions: dicts with the arguments of `zoo.convert`: "mixer", and optionally "layers", "keep_softmax", "options".
    pretrained: load the weights of the base. All other keywords are passed to the base.
    Raises ValueError for an unknown base and like `zoo.convert`.
    """
    name, _, tag = _check_base(base).partition(".")
    cfg = kwargs.pop("pretrained_cfg", None)
    if cfg is None or isinstance(cfg, str):
        cfg = get_pretrained_cfg(".".join(filter(None, [name, cfg or tag]))) or PretrainedCfg()
    cfg = dict(cfg) if isinstance(cfg, dict) else asdict(cfg)
    kwargs["pretrained_cfg"] = {**cfg, "architecture": CONVERTED}
    stored = restored_conversions(conversions) if is_stored(kwargs) else conversions
    return build_converted(name, CONVERTED, stored or (), pretrained, kwargs)


def _check_base(base: str | None) -> str:
    if base is None:
        raise ValueError(
            f'{CONVERTED} needs a timm model and its conversions, such as base="vit_small_patch16_dinov3", '
            'conversions=[{"mixer": "mhla"}]'
        )
    name = base.partition(".")[0] if isinstance(base, str) else ""
    if not is_model(name):
        near = nearest(str(base), list_models())
        hint = f"; did you mean {near[0]!r}?" if near else ", see timm.list_models()"
        raise ValueError(f"base={base!r} is not the name of a timm model{hint}")
    if name == CONVERTED or hasattr(model_entrypoint(name), "mixer"):
        raise ValueError(f"base={base!r} is already converted: give its timm base model")
    return base
