"""Conversion: swap the attention of a timm or diffusers model for a mixer, inherit every weight, report what was done.

There is one path. A registered name (`vit_mhla_tiny_patch16_224`) builds its softmax host and converts it here too,
and so does a saved diffusers model when it is loaded. What differs between the two kinds is behind `Backbone`.
"""

import copy
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import nn

from zoo.errors import unknown_name
from zoo.mixers import LayerSpec, MixerConfig
from zoo.models import Backbone, Swap
from zoo.models.layer_selection import Keep, Layers, choose, plain_layers
from zoo.models.timm.models import TIMM

STEP = ("mixer", "layers", "keep_softmax", "options")  # the keys of one recorded conversion


@dataclass(frozen=True)
class LayerReport:
    """One attention layer: its mixer before and after, the parameters it kept and got, why it stayed if it did, and the
    blocks of its tokens if the mixer has blocks."""

    layer: str
    old: str
    new: str
    kept: int
    added: int
    reason: str = ""
    blocks: str = ""


@dataclass(frozen=True)
class Report:
    """What a conversion did, one row a layer; `print(report)` shows a table, `report.to_dict()` goes into JSON."""

    model: str
    rows: tuple[LayerReport, ...]

    @property
    def swapped(self) -> list[LayerReport]:
        return [row for row in self.rows if not row.reason]

    @property
    def skipped(self) -> list[LayerReport]:
        return [row for row in self.rows if row.reason]

    @property
    def added(self) -> int:
        """Number of new parameters."""
        return sum(row.added for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        return {"model": self.model, "rows": [asdict(row) for row in self.rows]}

    def __str__(self) -> str:
        head = ("layer", "old", "new", "inherited", "added", "blocks", "skipped because")
        cells = [head] + [(r.layer, r.old, r.new, f"{r.kept:,}", f"{r.added:,}", r.blocks, r.reason) for r in self.rows]
        widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
        if not any(r.blocks for r in self.rows):
            widths[head.index("blocks")] = 0
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True) if width).rstrip()
            for row in cells
        ]
        total = f"{len(self.swapped)} of {len(self.rows)} attention layers swapped, {self.added:,} new parameters"
        return "\n".join([f"{self.model}: {total}", *lines])


def convert(
    model: nn.Module, mixer: str = "la", *, layers: Layers = None, keep_softmax: Keep = None, **options
) -> Report:
    """Swap the self-attention in `model` for `mixer`, in place; print and return the report.

    model: a timm VisionTransformer (also distilled), Eva or NaFlexVit, or a subclass that does not override where its
        tokens lie; a transformer of diffusers (`zoo.models.diffusers`) or a pipeline with such transformers;
        pretrained or not, also an already converted one.
    layers: block indices, a pattern of module names ("blocks.[0-5].attn"), or a mapping pattern -> mixer, which then
        takes the place of `mixer` (the first pattern that matches a layer counts). None: all of them.
    keep_softmax: layers that are left as they are: block indices, a pattern of module names, or "every:3" for the
        blocks 0, 3, 6, ...
    options: the mixer's options, see the class beside it in `zoo.mixers`.

    Weights are all inherited, new parameters lie under `.mixer.` only, and `mixer="softmax"` is the host bit for bit.
    The model is saved by `timm.models.save_for_hf`, one of diffusers by `save_pretrained`, and reloads exactly, also
    after several conversions; `zoo.revert` undoes all of them. A timm before 1.0.31 forgets all arguments of
    `create_model`: give it `model_args={..., **model.hla_args}`. A model that was made by its class, not by
    `timm.create_model`, has no name in timm's format: save its `state_dict`, and convert a new one before loading it.
    Raises ValueError, and leaves the model as it was, for a family where it means nothing, an unknown mixer or option,
    an option that follows from the host (`device`), a pattern without a match of its own, options the model cannot
    feed (a grid under `patch_drop_rate`), and nothing to swap.
    """
    report = swap(model, mixer, layers=layers, keep_softmax=keep_softmax, **options)
    print(report)
    return report


def swap(model: Any, mixer: str, *, layers: Layers = None, keep_softmax: Keep = None, **options) -> Report:
    """`convert` without the printing."""
    backbone = backbone_of(model)
    parts = backbone.submodels(model)
    _check_options(options)
    step = {
        "mixer": mixer,
        "layers": plain_layers(layers, "layers"),
        "keep_softmax": plain_layers(keep_softmax, "keep_softmax"),
        "options": _plain_options(options),
    }
    plans = {name: _plan(backbone, part, step, options) for name, part in parts.items()}
    rows = []
    for part, (swaps, found) in plans.items():
        backbone.install(parts[part], swaps)
        parts[part].hla_config.append(copy.deepcopy(step))
        backbone.update_saved_config(parts[part])
        prefix = f"{part}." if part else ""
        rows += [replace(row, layer=prefix + row.layer) for row in found]
    if "" not in parts:
        backbone.update_saved_config(model)
    return Report(backbone.name(model), tuple(rows))


def revert(model: nn.Module) -> None:
    """Turn a converted model or pipeline into the model of timm or diffusers that it was, in place.

    Classes, configuration and checkpoint keys are the host's again; the parameters of the mixers are dropped.
    Weights that were not trained since the conversion give the outputs of the original bit for bit. Raises ValueError
    for a model that is not converted.
    """
    backbone = backbone_of(model)
    parts = backbone.submodels(model)
    for part in parts.values():
        backbone.revert(part)
    if "" not in parts:
        backbone.update_saved_config(model)


def backbone_of(model: Any) -> Backbone:
    """The kind of models that `model` belongs to. diffusers is imported only for what comes from there."""
    if any(base.__module__.partition(".")[0] == "diffusers" for base in type(model).__mro__):
        from zoo.models.diffusers import DIFFUSERS

        return DIFFUSERS
    return TIMM


def _plan(
    backbone: Backbone, model: Any, step: dict[str, Any], options: dict[str, Any]
) -> tuple[list[Swap], list[LayerReport]]:
    """What to put where in one model, and its rows of the report; nothing is changed yet."""
    found = backbone.layers(model)
    chosen, kept = choose(backbone.blocks(model), step["mixer"], step["layers"], step["keep_softmax"])
    if not chosen:
        raise ValueError(
            f"nothing to swap in {type(model).__name__}: {len(found)} attention layers, layers={step['layers']!r}, "
            f"keep_softmax={step['keep_softmax']!r}"
        )
    given = {"grid_dims": backbone.grid_dims(model), **options}
    configs = {mixer: MixerConfig.parse(mixer, given) for mixer in set(chosen.values())}
    swaps, rows = [], []
    for name, attn in found.items():
        old, inherited = backbone.current_mixer(model, attn), _count(attn)
        if name in chosen:
            mixer = configs[chosen[name]].build(backbone.layer_spec(model, attn))
            backbone.check_options(model, attn, mixer.config)
            swaps.append(Swap(attn, mixer))
            added = sum(p.numel() for p in mixer.parameters())
            rows.append(LayerReport(name, old, mixer.name, inherited, added, blocks=mixer.layout))
        else:
            reason = "kept by keep_softmax" if name in kept else "not selected by layers"
            rows.append(LayerReport(name, old, old, inherited, 0, reason))
    for name, reason in backbone.skipped_layers(model).items():
        rows.append(LayerReport(name, "softmax", "softmax", _count(model.get_submodule(name)), 0, reason))
    return swaps, rows


def _count(attn: nn.Module) -> int:
    return sum(p.numel() for n, p in attn.named_parameters() if not n.startswith("mixer."))


def replay(model: Any, conversions: Any) -> None:
    """Apply recorded conversions, such as another model's `hla_config`, in order.

    Raises ValueError when they are malformed, before the first, and for what `zoo.convert` refuses, at that one.
    """
    if not isinstance(conversions, Iterable) or isinstance(conversions, str | Mapping):
        raise ValueError(f"conversions is a list of dicts with the keys {', '.join(STEP)}, got {conversions!r}")
    steps = list(conversions)
    for step in steps:
        if not isinstance(step, Mapping) or not isinstance(step.get("options") or {}, Mapping) or "mixer" not in step:
            raise ValueError(f"a conversion is a dict with the keys {', '.join(STEP)}, got {step!r}")
        for key in step:
            if key not in STEP:
                raise unknown_name("key of a conversion", key, STEP)
    if not steps:
        raise ValueError('conversions is empty: give at least one, such as [{"mixer": "la"}]')
    for step in steps:
        options = {str(name): value for name, value in (step.get("options") or {}).items()}
        _check_options(options)
        swap(model, step["mixer"], layers=step.get("layers"), keep_softmax=step.get("keep_softmax"), **options)


def _check_options(options: Mapping[str, Any]) -> None:
    for name in options:
        if name in LayerSpec._fields:
            raise ValueError(f"{name}= cannot be chosen: mixers take it from the model that is converted")
        if name in STEP or name == "model":
            raise ValueError(f"{name}= is an argument of the conversion, not an option of the mixer")


def _plain_options(options: dict[str, Any]) -> dict[str, Any]:
    """A copy fit for JSON, which is how options are saved with the model (tuples become lists)."""
    try:
        return json.loads(json.dumps(options))
    except TypeError as error:
        raise ValueError(f"options of a mixer must be plain numbers, text and lists, got {options!r}") from error
