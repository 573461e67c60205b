"""Conversion: swap the softmax attention of a timm model for a mixer, inherit every weight, report what was done.

There is one path. A registered name (`vit_ahla_tiny_patch16_224`) builds its softmax host and converts it here too.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from timm.layers import AttentionPoolLatent, is_scriptable
from torch import nn

from zoo.backbones import CONVERTED
from zoo.backbones.checkpoints import no_torchscript
from zoo.backbones.hosts import BLOCKS, MODELS, drops_patches
from zoo.backbones.record import record_architecture
from zoo.backbones.refusals import check_family
from zoo.backbones.select import Keep, Layers, choose, plain_layers
from zoo.backbones.sites import SITES, Site, attention_layers, kv_heads
from zoo.mixers import build_mixer
from zoo.names import unknown_name

FROM_HOST = ("dim", "num_heads", "head_dim", "num_kv_heads", "scale", "attn_drop", "fused", "device", "dtype")
STEP = ("mixer", "layers", "keep_softmax", "options")  # the keys of one recorded conversion


@dataclass(frozen=True)
class Row:
    """One attention layer: its mixer before and after, the parameters it kept and got, and why it stayed if it did."""

    layer: str
    old: str
    new: str
    kept: int
    added: int
    reason: str = ""


@dataclass(frozen=True)
class Report:
    """What a conversion did, one row a layer; `print(report)` shows a table, `report.to_dict()` goes into JSON."""

    model: str
    rows: tuple[Row, ...]

    @property
    def swapped(self) -> list[Row]:
        return [row for row in self.rows if not row.reason]

    @property
    def skipped(self) -> list[Row]:
        return [row for row in self.rows if row.reason]

    @property
    def added(self) -> int:
        """Number of new parameters."""
        return sum(row.added for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        return {"model": self.model, "rows": [asdict(row) for row in self.rows]}

    def __str__(self) -> str:
        head = ("layer", "old", "new", "inherited", "added", "skipped because")
        cells = [head] + [(r.layer, r.old, r.new, f"{r.kept:,}", f"{r.added:,}", r.reason) for r in self.rows]
        widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells
        ]
        total = f"{len(self.swapped)} of {len(self.rows)} attention layers swapped, {self.added:,} new parameters"
        return "\n".join([f"{self.model}: {total}", *lines])


def convert(
    model: nn.Module, mixer: str = "ahla", *, layers: Layers = None, keep_softmax: Keep = None, **options
) -> Report:
    """Swap softmax attention in `model` for `mixer`, in place; print and return the report.

    model: a timm VisionTransformer (also distilled) or Eva, pretrained or not, or an already converted one.
    layers: block indices, a pattern of module names ("blocks.[0-5].attn"), or a mapping pattern -> mixer, which then
        takes the place of `mixer` (the first pattern that matches a layer counts). None: all of them.
    keep_softmax: layers that are left as they are: block indices, a pattern of module names, or "every:3" for the
        blocks 0, 3, 6, ...
    options: those of the mixer, see `zoo.mixers.MixerOptions`.

    Weights are all inherited, new parameters lie under `.mixer.` only, and `mixer="softmax"` is the host bit for bit.
    The model may be saved by `timm.models.save_for_hf` and reloads exactly, also after several conversions. A timm
    before 1.0.31 forgets all arguments of `create_model`: give it `model_args={..., **model.hla_args}`.
    Raises ValueError, and leaves the model as it was, for a family where it means nothing, an unknown mixer or option,
    an option that follows from the host (`device`), a pattern without a match of its own, options the model cannot
    feed (a grid under `patch_drop_rate`), and nothing to swap.
    """
    report = swap(model, mixer, layers=layers, keep_softmax=keep_softmax, **options)
    print(report)
    return report


def swap(model: Any, mixer: str, *, layers: Layers = None, keep_softmax: Keep = None, **options) -> Report:
    """`convert` without the printing."""
    if is_scriptable():
        no_torchscript(model)
    check_family(model)
    _check_options(options)
    found = attention_layers(model)
    if not found:
        kinds = sorted({type(m).__name__ for n, m in model.blocks.named_modules() if n.endswith("attn")})
        raise ValueError(f"cannot convert attention of type {', '.join(kinds)}: it is not softmax(q k') v")
    where, keep = plain_layers(layers, "layers"), plain_layers(keep_softmax, "keep_softmax")
    chosen, kept = choose(list(found), mixer, where, keep)
    if not chosen:
        raise ValueError(
            f"nothing to swap in {type(model).__name__}: {len(found)} attention layers, layers={where!r}, "
            f"keep_softmax={keep!r}"
        )
    mixers = {name: _build(model, found[name], new, options) for name, new in chosen.items()}
    plain = _plain_options(options)
    rows = [_row(name, site, chosen.get(name), mixers.get(name), name in kept) for name, site in found.items()]
    _install(model, found, chosen, mixers, plain)
    model.hla_config.append({"mixer": mixer, "layers": where, "keep_softmax": keep, "options": plain})
    record_architecture(model)
    return Report(_model_name(model), (*rows, *_pooling_rows(model)))


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
        raise ValueError('conversions is empty: give at least one, such as [{"mixer": "ahla"}]')
    for step in steps:
        options = {str(name): value for name, value in (step.get("options") or {}).items()}
        _check_options(options)
        swap(model, step["mixer"], layers=step.get("layers"), keep_softmax=step.get("keep_softmax"), **options)


def _check_options(options: Mapping[str, Any]) -> None:
    for name in options:
        if name in FROM_HOST:
            raise ValueError(f"{name}= cannot be chosen: mixers take it from the model that is converted")
        if name in STEP or name == "model":
            raise ValueError(f"{name}= is an argument of the conversion, not an option of the mixer")


def _plain_options(options: dict[str, Any]) -> dict[str, Any]:
    """A copy fit for JSON, which is how options are saved with the model (tuples become lists)."""
    try:
        return json.loads(json.dumps(options))
    except TypeError as error:
        raise ValueError(f"options of a mixer must be plain numbers, text and lists, got {options!r}") from error


def _build(model: nn.Module, attn: Any, name: str, options: dict[str, Any]) -> nn.Module:
    weight = attn.proj.weight
    first = attn.qkv if attn.qkv is not None else attn.q_proj
    sizes: dict[str, Any] = {"dim": first.in_features, "num_heads": attn.num_heads, "head_dim": attn.head_dim}
    host: dict[str, Any] = {"num_kv_heads": kv_heads(attn), "device": weight.device, "dtype": weight.dtype}
    if name == "softmax":
        host |= {"attn_drop": attn.attn_drop.p, "fused": attn.fused_attn}
    elif attn.attn_drop.p > 0:
        raise ValueError(
            f"attn_drop_rate={attn.attn_drop.p} drops entries of the attention matrix, which the mixer {name!r} "
            "never forms; use proj_drop_rate or drop_path_rate"
        )
    mixer = build_mixer(name, **sizes, **options, **host)
    resolved = getattr(mixer, "options", None)
    if getattr(resolved, "grid_dims", 2) != 2:
        raise ValueError("grid_dims=3 is for video; the tokens of an image model lie on a 2-D grid")
    if getattr(resolved, "needs_grid", False) and drops_patches(model):
        raise ValueError(
            f"patch_drop_rate > 0 trains on random patches without a layout, but {name!r} with depthwise or causal "
            "needs the token grid; set patch_drop_rate=0 or drop those options"
        )
    return mixer


def _row(name: str, attn: Any, new: str | None, mixer: nn.Module | None, kept: bool) -> Row:
    old = getattr(attn, "mixer_name", "softmax")
    inherited = sum(p.numel() for n, p in attn.named_parameters() if not n.startswith("mixer."))
    if new is None or mixer is None:
        return Row(name, old, old, inherited, 0, "kept by keep_softmax" if kept else "not selected by layers")
    return Row(name, old, new, inherited, sum(p.numel() for p in mixer.parameters()))


def _pooling_rows(model: nn.Module) -> list[Row]:
    reason = "pooling attention: one query an image, its cost is linear already"
    pools = [(n, m) for n, m in model.named_modules() if isinstance(m, AttentionPoolLatent)]
    return [Row(n, "softmax", "softmax", sum(p.numel() for p in m.parameters()), 0, reason) for n, m in pools]


def _install(
    model: Any, found: dict[str, Any], chosen: dict[str, str], mixers: dict[str, nn.Module], options: dict[str, Any]
) -> None:
    if type(model) in MODELS:
        checkpointing = model.grad_checkpointing
        model.hla_base = (getattr(model, "pretrained_cfg", None) or {}).get("architecture") or ""
        model.__class__ = MODELS[type(model)]
        model.hla_config = []
        for block in model.blocks:
            block.__class__ = BLOCKS[type(block)]
        model.set_grad_checkpointing(checkpointing)
    for name, new in chosen.items():
        site = found[name]
        if not isinstance(site, Site):
            site.__class__ = SITES[type(site)]
        site.install(new, mixers[name].train(site.training), options)
        site.prefix = model.num_prefix_tokens
    model.sync_grid()


def _model_name(model: Any) -> str:
    name = (getattr(model, "pretrained_cfg", None) or {}).get("architecture")
    return (model.hla_base if name == CONVERTED else name) or type(model).__name__
