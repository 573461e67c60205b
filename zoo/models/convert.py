"""Conversion of timm and diffusers models: attention layers get a mixer and keep all weights.

All conversions use this module: registered names (`vit_mhla_tiny_patch16_224`) build their softmax host and convert it,
and saved diffusers models are converted when loaded. `Backbone` covers the differences between the libraries.
"""

import copy
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

from zoo.errors import unknown_name
from zoo.mixers import LayerSpec, MixerConfig
from zoo.models import Backbone, Conversion, Swap
from zoo.models.layer_selection import Keep, Layers, choose, plain_layers
from zoo.models.timm.backbone import TIMM

CONVERSION_KEYS = tuple(Conversion.__annotations__)


@dataclass(frozen=True)
class LayerReport:
    """Result for one attention layer.

    old, new: mixer before and after. kept, added: number of inherited and new parameters. reason: why the layer was
    skipped, "" if it was swapped. blocks: division of the token grid, if any.
    """

    layer: str
    old: str
    new: str
    kept: int
    added: int
    reason: str = ""
    blocks: str = ""


@dataclass(frozen=True)
class Report:
    """Report of a conversion, one row per layer; `print(report)` shows a table, `to_dict()` is JSON.

    note: what was skipped because it has no attention, "" if nothing.
    """

    model: str
    rows: tuple[LayerReport, ...]
    note: str = ""

    @property
    def swapped(self) -> list[LayerReport]:
        return [row for row in self.rows if not row.reason]

    @property
    def skipped(self) -> list[LayerReport]:
        return [row for row in self.rows if row.reason]

    @property
    def added(self) -> int:
        """Total number of new parameters."""
        return sum(row.added for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        return {"model": self.model, "rows": [asdict(row) for row in self.rows], "note": self.note}

    def __str__(self) -> str:
        header = ("layer", "old", "new", "inherited", "added", "blocks", "skipped because")
        cells = [header]
        cells += [(r.layer, r.old, r.new, f"{r.kept:,}", f"{r.added:,}", r.blocks, r.reason) for r in self.rows]
        widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
        if not any(r.blocks for r in self.rows):
            widths[header.index("blocks")] = 0
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True) if width).rstrip()
            for row in cells
        ]
        total = f"{len(self.swapped)} of {len(self.rows)} attention layers swapped, {self.added:,} new parameters"
        note = f"; {self.note}" if self.note else ""
        return "\n".join([f"{self.model}: {total}{note}", *lines])


def convert(
    model: "nn.Module | DiffusionPipeline",
    mixer: str,
    *,
    layers: Layers = None,
    keep_softmax: Keep = None,
    **options,
) -> Report:
    """Replace the self-attention of `model` by `mixer`, in place; print and return the report.

    model: a timm VisionTransformer (also distilled), Eva, NaFlexVit, MetaFormer, FastVit or PiT, or a subclass that
        keeps the token layout; a diffusers transformer (`zoo.models.diffusers`) or a pipeline with such transformers.
        It may be pretrained or already converted.
    layers: block indices, a pattern of module names ("blocks.[0-5].attn"), or a mapping pattern -> mixer, which
        overrides `mixer`; the first matching pattern is used. None: all layers.
    keep_softmax: layers that are not converted: block indices, a pattern of module names, or "every:3" for blocks 0, 3,
        6, ...
    options: options of the mixer, see its options class in `zoo.mixers`.

    All weights are kept, new parameters have names with `.mixer.`, and `mixer="softmax"` equals the host bit for bit.
    Save a timm model with `timm.models.save_for_hf` and a diffusers model with `save_pretrained`; both reload exactly,
    also after several conversions. `zoo.revert` undoes all conversions. timm before 1.0.31 does not save the arguments
    of `create_model`: pass `model_args={..., **model.hla_args}` to `save_for_hf`. A timm model built from its class
    instead of `timm.create_model` has no architecture name: save its `state_dict`, and convert a new model before
    loading it.

    Raises ValueError, without changing the model, for an unsupported model, an unknown mixer or option, an option that
    is derived from the model (`device`), a pattern that selects no layer, options that do not fit the model (a grid
    with `patch_drop_rate`), or if no layer is selected.
    """
    report = swap(model, mixer, layers=layers, keep_softmax=keep_softmax, **options)
    print(report)
    return report


def swap(
    model: "nn.Module | DiffusionPipeline",
    mixer: str,
    *,
    layers: Layers = None,
    keep_softmax: Keep = None,
    **options,
) -> Report:
    """Convert like `convert`, without printing the report."""
    backbone = backbone_of(model)
    models = backbone.submodels(model)
    _check_options(options)
    conversion: Conversion = {
        "mixer": mixer,
        "layers": plain_layers(layers, "layers"),
        "keep_softmax": plain_layers(keep_softmax, "keep_softmax"),
        "options": _plain_options(options),
    }
    plans = {name: _plan(backbone, submodel, conversion, options) for name, submodel in models.items()}
    rows = []
    for name, (swaps, reports) in plans.items():
        backbone.install(models[name], swaps, copy.deepcopy(conversion))
        backbone.update_saved_config(models[name])
        prefix = f"{name}." if name else ""
        rows += [replace(row, layer=prefix + row.layer) for row in reports]
    if "" not in models:
        backbone.update_saved_config(model)
    return Report(backbone.name(model), tuple(rows), "; ".join(filter(None, map(backbone.note, models.values()))))


def revert(model: "nn.Module | DiffusionPipeline") -> None:
    """Restore the original timm or diffusers model or pipeline from a converted one, in place.

    The host's classes, configuration and checkpoint keys are restored and the mixer parameters removed. If the
    weights were not trained after the conversion, outputs equal the original bit for bit. Raises ValueError for a model
    that is not converted.
    """
    backbone = backbone_of(model)
    models = backbone.submodels(model)
    for submodel in models.values():
        backbone.revert(submodel)
    if "" not in models:
        backbone.update_saved_config(model)


def backbone_of(model: object) -> Backbone:
    """Return the backbone of the library that `model` comes from; diffusers is imported only if needed."""
    if any(base.__module__.partition(".")[0] == "diffusers" for base in type(model).__mro__):
        from zoo.models.diffusers import DIFFUSERS

        return DIFFUSERS
    return TIMM


def _plan(
    backbone: Backbone, model: nn.Module, conversion: Conversion, options: dict[str, Any]
) -> tuple[list[Swap], list[LayerReport]]:
    """Build the mixers of one model and its rows of the report, without changing the model."""
    found, layers, keep = backbone.layers(model), conversion["layers"], conversion["keep_softmax"]
    chosen, kept = choose(backbone.blocks(model), conversion["mixer"], layers, keep)
    if not chosen:
        raise ValueError(
            f"nothing to swap in {type(model).__name__}: {len(found)} attention layers, layers={layers!r}, "
            f"keep_softmax={keep!r}"
        )
    given = {"grid_dims": backbone.grid_dims(model), **options}
    configs = {mixer: MixerConfig.parse(mixer, given, ("layers", "keep_softmax")) for mixer in set(chosen.values())}
    swaps, rows = [], []
    for index, (name, attn) in enumerate(found.items()):
        old, inherited = backbone.current_mixer(model, attn), _count(attn)
        if name in chosen:
            spec = backbone.layer_spec(model, attn)._replace(layer_index=index, num_layers=len(found))
            mixer = configs[chosen[name]].build(spec)
            backbone.check_options(model, attn, mixer.config)
            swaps.append(Swap(attn, mixer))
            added = sum(p.numel() for p in mixer.parameters())
            rows.append(LayerReport(name, old, mixer.name, inherited, added, blocks=mixer.layout))
        else:
            by = "kept by keep_softmax" if old == "softmax" else f"kept as {old} by keep_softmax"
            reason = by if name in kept else "not selected by layers"
            rows.append(LayerReport(name, old, old, inherited, 0, reason))
    for name, reason in backbone.skipped_layers(model).items():
        rows.append(LayerReport(name, "softmax", "softmax", _count(model.get_submodule(name)), 0, reason))
    return swaps, rows


def _count(attn: nn.Module) -> int:
    return sum(p.numel() for n, p in attn.named_parameters() if not n.startswith("mixer."))


def apply_conversions(model: nn.Module, conversions: object) -> None:
    """Apply saved conversions (a list of `Conversion`, such as the `hla_config` of another model) in order.

    Raises ValueError for malformed conversions, before the first is applied, and like `zoo.convert`.
    """
    keys = ", ".join(CONVERSION_KEYS)
    if not isinstance(conversions, Iterable) or isinstance(conversions, str | Mapping):
        raise ValueError(f"conversions is a list of dicts with the keys {keys}, got {conversions!r}")
    steps = list(conversions)
    for step in steps:
        if not isinstance(step, Mapping) or not isinstance(step.get("options") or {}, Mapping) or "mixer" not in step:
            raise ValueError(f"a conversion is a dict with the keys {keys}, got {step!r}")
        for key in step:
            if key not in CONVERSION_KEYS:
                raise unknown_name("key of a conversion", key, CONVERSION_KEYS)
    if not steps:
        raise ValueError('conversions is empty: give at least one, such as [{"mixer": "la"}]')
    for step in steps:
        options = {str(name): value for name, value in (step.get("options") or {}).items()}
        _check_options(options)
        swap(model, step["mixer"], layers=step.get("layers"), keep_softmax=step.get("keep_softmax"), **options)


def _check_options(options: Mapping[str, Any]) -> None:
    for name in options:
        if name in LayerSpec._fields:
            raise ValueError(f"{name}= cannot be set: mixers take it from the model")
        if name in CONVERSION_KEYS or name == "model":
            raise ValueError(f"{name}= is an argument of the conversion, not an option of the mixer")


def _plain_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return a copy as JSON values, the form in which options are saved (tuples become lists)."""
    try:
        return json.loads(json.dumps(options))
    except TypeError as error:
        raise ValueError(f"options of a mixer must be numbers, text and lists, got {options!r}") from error
