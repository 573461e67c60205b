"""Conversion: swap the softmax attention of a timm model for a mixer, inherit every weight, report what was done.

There is one path. A registered name (`vit_ahla_tiny_patch16_224`) builds its softmax host and converts it here too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any

from timm.layers import AttentionPoolLatent, is_scriptable
from timm.models import is_model
from torch import nn

from zoo.backbones import hla_name
from zoo.backbones.checkpoints import no_torchscript
from zoo.backbones.hosts import BLOCKS, MODELS, drops_patches
from zoo.backbones.refusals import check_family
from zoo.backbones.sites import SITES, Site, kv_heads
from zoo.mixers import MIXERS, build_mixer
from zoo.names import unknown_name

Layers = Sequence[int] | str | Mapping[str, str] | None
Keep = Sequence[int] | str | None


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
        takes the place of `mixer`. None: all of them.
    keep_softmax: block indices that are left as they are, or "every:3" for 0, 3, 6, ...
    options: those of the mixer, see `zoo.mixers.MixerOptions`.

    Weights are all inherited, new parameters lie under `.mixer.` only, and `mixer="softmax"` is the host bit for bit.
    Raises ValueError, and leaves the model as it was, for a family where it means nothing, an unknown mixer or option,
    a pattern without a match, options the model cannot feed (a grid under `patch_drop_rate`), and nothing to swap.
    """
    report = swap(model, mixer, layers=layers, keep_softmax=keep_softmax, **options)
    print(report)
    return report


def swap(model: Any, mixer: str, *, layers: Layers = None, keep_softmax: Keep = None, **options) -> Report:
    """`convert` without the printing."""
    if is_scriptable():
        no_torchscript(model)
    check_family(model)
    found = {f"blocks.{n}": m for n, m in model.blocks.named_modules() if type(m) in SITES or isinstance(m, Site)}
    if not found:
        kinds = sorted({type(m).__name__ for n, m in model.blocks.named_modules() if n.endswith("attn")})
        raise ValueError(f"cannot convert attention of type {', '.join(kinds)}: it is not softmax(q k') v")
    chosen = _choose(list(found), mixer, layers)
    kept = _kept(list(found), keep_softmax)
    chosen = {name: new for name, new in chosen.items() if name not in kept}
    if not chosen:
        raise ValueError(
            f"nothing to swap in {type(model).__name__}: {len(found)} attention layers, layers={layers!r}, "
            f"keep_softmax={keep_softmax!r}"
        )
    mixers = {name: _build(model, found[name], new, options) for name, new in chosen.items()}
    rows = [_row(name, site, chosen.get(name), mixers.get(name), name in kept) for name, site in found.items()]
    _install(model, found, chosen, mixers)
    model.hla_config.append({"mixer": mixer, "layers": layers, "keep_softmax": keep_softmax, "options": dict(options)})
    _record_architecture(model)
    return Report(_model_name(model), (*rows, *_pooling_rows(model)))


def _block_index(name: str) -> int:
    return int(name.split(".")[1])  # blocks.<index>.attn


def _indices(names: list[str], wanted: Sequence[int], argument: str) -> set[str]:
    depth = _block_index(names[-1]) + 1
    for index in wanted:
        if isinstance(index, bool) or not isinstance(index, int) or not -depth <= index < depth:
            raise ValueError(f"{argument} lists block indices from {-depth} to {depth - 1}, got {index!r}")
    positions = {index % depth for index in wanted}
    return {name for name in names if _block_index(name) in positions}


def _choose(names: list[str], mixer: str, layers: Layers) -> dict[str, str]:
    """layer -> mixer, in the order of the model."""
    if isinstance(layers, str):
        layers = {layers: mixer}
    patterns = layers if isinstance(layers, Mapping) else {"*": mixer}
    for pattern, name in patterns.items():
        if name not in MIXERS:
            raise unknown_name("mixer", name, MIXERS)
        if not any(fnmatchcase(layer, pattern) for layer in names):
            raise ValueError(f"layers={pattern!r} matches none of the attention layers {names[0]} ... {names[-1]}")
    allowed = set(names) if layers is None or isinstance(layers, Mapping) else _indices(names, layers, "layers")
    first = {n: next((m for p, m in patterns.items() if fnmatchcase(n, p)), None) for n in names if n in allowed}
    return {name: new for name, new in first.items() if new is not None}


def _kept(names: list[str], keep: Keep) -> set[str]:
    if keep is None:
        return set()
    if not isinstance(keep, str):
        return _indices(names, keep, "keep_softmax")
    word, _, step = keep.partition(":")
    if word != "every" or not step.isdecimal() or int(step) < 2:
        raise ValueError(f'keep_softmax is a list of block indices or "every:<n>" with n of at least 2, got {keep!r}')
    return {name for name in names if _block_index(name) % int(step) == 0}


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


def _install(model: Any, found: dict[str, Any], chosen: dict[str, str], mixers: dict[str, nn.Module]) -> None:
    if type(model) in MODELS:
        checkpointing = model.grad_checkpointing
        model.__class__ = MODELS[type(model)]
        model.hla_config = []
        for block in model.blocks:
            block.__class__ = BLOCKS[type(block)]
        model.set_grad_checkpointing(checkpointing)
    for name, new in chosen.items():
        site = found[name]
        if not isinstance(site, Site):
            site.__class__ = SITES[type(site)]
        site.install(new, mixers[name].train(site.training))
        site.prefix = model.num_prefix_tokens
    model.sync_grid()


def _model_name(model: Any) -> str:
    return (getattr(model, "pretrained_cfg", None) or {}).get("architecture") or type(model).__name__


def _record_architecture(model: Any) -> None:
    """Let timm's hub format rebuild a converted model: its architecture is the name of what it has become."""
    cfg = getattr(model, "pretrained_cfg", None)
    if not cfg or len(model.hla_config) > 1:
        return
    done = model.hla_config[0]
    name = hla_name(cfg.get("architecture") or "", done["mixer"])
    if done["layers"] is None and is_model(name):
        model.pretrained_cfg = model.default_cfg = {**cfg, "architecture": name}
        arguments = {"mixer_options": done["options"], "keep_softmax": done["keep_softmax"]}
        if hasattr(model, "_model_args"):  # what timm newer than 1.0.29 records of create_model
            model._model_args = {**model._model_args, **{k: v for k, v in arguments.items() if v}}
