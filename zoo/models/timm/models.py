"""Converted timm models: subclasses that set the token grid of their attention layers.

Blocks implement gradient checkpointing themselves and restore the grid of their forward pass before recomputation, so
that gradients are exact even if one backward pass covers several resolutions. `CONVERTED_MODELS` and `CONVERTED_BLOCKS`
list the classes of timm; a new family is one entry in each.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from timm.layers import (
    Attention,
    AttentionPoolLatent,
    AttentionRope,
    PatchDropout,
    PatchDropoutWithIndices,
    is_scriptable,
)
from timm.models._manipulate import checkpoint
from timm.models.deit import VisionTransformerDistilled
from timm.models.eva import Eva, EvaAttention, EvaBlock, EvaBlockPostNorm
from timm.models.fastvit import Attention as FastVitAttention
from timm.models.fastvit import AttentionBlock, FastVit, RepMixerBlock
from timm.models.metaformer import Attention as MetaFormerAttention
from timm.models.metaformer import MetaFormer, MetaFormerBlock, MetaFormerStage
from timm.models.naflexvit import NaFlexVit
from timm.models.vision_transformer import Block, ParallelThingsBlock, ResPostBlock, VisionTransformer
from torch import Tensor, nn
from torch.fx import Proxy

from zoo.grid import Grid
from zoo.mixers import LayerSpec, MixerConfig
from zoo.models import CONVERTED, Conversion, Swap
from zoo.models.checkpoint_tags import match_checkpoint, no_torchscript
from zoo.models.saved_config import ZOO_KWARGS, architecture_of, record_architecture, recorded_arguments
from zoo.models.timm.attention import (
    SITES,
    Host,
    Site,
    attention_layers,
    block_indices,
    blocks_of,
    host_class,
    layer_spec,
)
from zoo.models.unsupported import check_is_module, refuse_block, refuse_dropout, refuse_family, refuse_rotary

TimmModel: TypeAlias = Any  # VisionTransformer, Eva, NaFlexVit, MetaFormer or FastVit
TimmAttention: TypeAlias = Attention | AttentionRope | EvaAttention | MetaFormerAttention | FastVitAttention


USUAL_SIZE = 224  # pixels for which blocks are chosen in models with stages, which do not store their input size


def set_grid(module: nn.Module, grid: Grid | None) -> None:
    """Set the token grid of each site in `module`; None if the tokens have no layout."""
    for child in module.modules():
        if isinstance(child, Site):
            child.grid = grid


def drops_patches(model: TimmModel) -> bool:
    """Whether `patch_drop_rate` > 0: training uses random subsets of the patches, which have no layout."""
    return isinstance(getattr(model, "patch_drop", None), PatchDropout | PatchDropoutWithIndices)


def usual_grid(model: TimmModel) -> Grid | None:
    """Return the token grid of the input size, or of the position embedding of NaFlexViT; None without either."""
    grid = model.embeds.pos_embed_grid_size if isinstance(model, NaFlexVit) else model.patch_embed.grid_size
    return None if grid is None else tuple(grid)


class HLAModel(Host):
    """Mixin of a converted model: gradient checkpointing, loading, architecture name.

    hla_config: all conversions of the model, as arguments of `zoo.convert`.
    hla_base: name of the timm model that was converted.
    from_softmax: whether the last loaded checkpoint was a softmax checkpoint.
    """

    hla_config: list[Conversion]
    hla_base: str
    from_softmax: bool = False

    @property
    def hla_args(self) -> dict[str, Any]:
        """Arguments of `timm.create_model` that rebuild the mixers, in addition to the host arguments.

        Saved by timm 1.0.31 and newer; for earlier versions pass them as `save_for_hf(..., model_args={...})`.
        """
        return architecture_of(self)[1]

    @property
    def _model_args(self) -> dict[str, Any]:
        """Arguments of `create_model` that timm 1.0.31 and newer save, for the current mixers.

        Raises AttributeError for a model of an older timm.
        """
        if "_model_args" not in self.__dict__:
            raise AttributeError("this timm records no arguments of create_model")
        return recorded_arguments(self, self.__dict__["_model_args"])

    @_model_args.setter
    def _model_args(self, arguments: dict[str, Any]) -> None:
        self.__dict__["_model_args"] = arguments

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Checkpoint each block; `grad_checkpointing` stays False, since the host would recompute without the grid."""
        super().set_grad_checkpointing(enable)
        for part in (self, *getattr(self, "stages", ())):
            part.grad_checkpointing = False
        for block in blocks_of(self).values():
            block.checkpointing = enable

    def _load_from_state_dict(self, state_dict, prefix, *args) -> None:
        self.from_softmax = match_checkpoint(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    __prepare_scriptable__ = no_torchscript


class GridModel(HLAModel):
    """Mixin of a model whose images have the same size within a batch."""

    def sync_grid(self) -> None:
        """Set the grid of the input size on all sites."""
        set_grid(self.blocks, None if drops_patches(self) else tuple(self.patch_embed.grid_size))

    def set_input_size(self, *args, **kwargs) -> None:
        super().set_input_size(*args, **kwargs)
        self.sync_grid()

    def _pos_embed(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor | None]:
        if self.dynamic_img_size and not drops_patches(self):
            traced = isinstance(x, Proxy)  # torch.fx: a traced graph has no sizes
            set_grid(self.blocks, None if traced else (x.shape[1], x.shape[2]))  # x [B, H, W, C]
        return super()._pos_embed(x)


class StageModel(HLAModel):
    """Mixin of a hierarchical model, whose stages or attention layers set the grid in each forward pass."""

    def sync_grid(self) -> None:
        """Clear the grid: images of any size are taken."""
        set_grid(self.stages, None)


class HLAStage(Host):
    """Mixin of a stage of MetaFormer, which sets the grid of its attention layers."""

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(x, Proxy):
            stride = 1 if isinstance(self.downsample, nn.Identity) else self.downsample.conv.stride[0]
            set_grid(self.blocks, tuple(-(-n // stride) for n in x.shape[2:]))
        return super().forward(x)


class HLANaFlexVit(HLAModel, NaFlexVit):
    """NaFlexViT: images of one size, or samples with different grids, padded to one length.

    Linear mixers get the padding as a key mask. In padded batches the tokens have no layout.
    """

    use_key_only_attn_mask: bool

    def sync_grid(self) -> None:
        """Request key masks [B, 1, 1, N], which linear mixers support; each forward pass sets the grid."""
        for site in self._sites():
            site.key_masks = site.mixer_name != "softmax"
        host = self.__dict__.setdefault("host_key_only", self.use_key_only_attn_mask)
        self.use_key_only_attn_mask = host or any(site.key_masks for site in self._sites())
        set_grid(self.blocks, None)

    def _sites(self) -> list[Site]:
        return [m for m in self.blocks.modules() if isinstance(m, Site)]

    def _forward_embeds(
        self, x: Tensor, patch_coord: Tensor | None, patch_valid: Tensor | None, attn_mask: Tensor | None
    ) -> dict[str, Any]:
        masked = attn_mask is not None and not isinstance(attn_mask, Proxy)  # torch.fx uses a Proxy for None
        if masked and any(site.key_masks for site in self._sites()):
            raise ValueError("linear mixers do not support attn_mask; mark the padding with patch_valid")
        plain = patch_coord is None and not isinstance(x, Proxy) and not drops_patches(self)
        set_grid(self.blocks, tuple(self.embeds.dynamic_feat_size(tuple(x.shape[-2:]))) if plain else None)
        return super()._forward_embeds(x, patch_coord, patch_valid, attn_mask)


class HLABlock(Host):
    """Mixin of a block that implements gradient checkpointing if `checkpointing` is set."""

    checkpointing: bool = False

    def forward(self, *args, **kwargs) -> Tensor:
        forward = super().forward
        if not self.checkpointing:
            return forward(*args, **kwargs)
        if torch.compiler.is_compiling():  # the graph contains the grid and cannot set attributes here
            return checkpoint(forward, *args, **kwargs)
        grid = next((m.grid for m in self.modules() if isinstance(m, Site)), None)

        def run(*args, **kwargs) -> Tensor:
            set_grid(self, grid)
            return forward(*args, **kwargs)

        return checkpoint(run, *args, **kwargs)


CONVERTED_MODELS: dict[type, type] = {  # class of timm -> mixin or class of the converted model
    VisionTransformer: GridModel,  # ViT, DeiT-III, FlexiViT, DINOv2, hybrids, ViTamin
    VisionTransformerDistilled: GridModel,
    Eva: GridModel,  # EVA, EVA-02, DINOv3, Perception Encoder, RoPE ViTs
    NaFlexVit: HLANaFlexVit,
    MetaFormer: StageModel,  # CAFormer, VLT
    FastVit: StageModel,
}
CONVERTED_BLOCKS = (
    *(Block, ResPostBlock, ParallelThingsBlock, EvaBlock, EvaBlockPostNorm),
    *(MetaFormerBlock, AttentionBlock, RepMixerBlock),
)


# Methods that define the token layout and run the blocks
LAYOUT_METHODS = ("_pos_embed", "_forward_embeds", "forward_features", "set_input_size", "set_grad_checkpointing")


def converted_class(kind: type) -> type | None:
    """Return the converted class of a model class; None if it is unknown.

    A subclass of a known class keeps its additions and overrides. Raises ValueError if it overrides a method of
    `LAYOUT_METHODS`.
    """
    base = next((k for k in kind.__mro__ if k in CONVERTED_MODELS), None)
    if base is None:
        return None
    changed = [name for name in LAYOUT_METHODS if getattr(kind, name, None) is not getattr(base, name, None)]
    if changed:
        raise ValueError(
            f"cannot convert {kind.__name__}, a subclass of {base.__name__} that overrides {', '.join(changed)}: its "
            f"token layout may differ. Convert a {base.__name__} and wrap it, or override forward, forward_head or "
            "forward of a block instead"
        )
    return derived(CONVERTED_MODELS[base], kind)


@functools.cache
def derived(mixin: type, kind: type) -> type:
    """Return a subclass of the classes `mixin` and `kind` whose objects can be pickled, although no module contains it.

    A `mixin` that is such a subclass is returned itself.
    """
    if issubclass(mixin, kind):
        return mixin
    return type(f"HLA{kind.__name__}", (mixin, kind), {"bases": (mixin, kind), "__reduce__": _reduce})


def _reduce(model: TimmModel) -> tuple[Callable[..., nn.Module], tuple[type, type], dict[str, Any]]:
    return _empty, model.bases, model.__dict__


def _empty(mixin: type, kind: type) -> nn.Module:
    cls: type[nn.Module] = derived(mixin, kind)
    return cls.__new__(cls)


def _is_attention(module: nn.Module) -> bool:
    return type(module) in SITES or isinstance(module, Site)


class TimmBackbone:
    """Interface of `zoo.convert` to timm models, see `zoo.models.Backbone`."""

    def submodels(self, model: TimmModel) -> dict[str, nn.Module]:
        if is_scriptable():
            no_torchscript(model)
        check_is_module(model)
        if not isinstance(model, HLAModel) and converted_class(type(model)) is None:
            refuse_family(model, tuple(CONVERTED_MODELS))
        for name, block in blocks_of(model).items():
            inside = any(map(_is_attention, block.modules()))
            if not inside and type(block) not in CONVERTED_BLOCKS and not isinstance(block, HLABlock):
                refuse_block(model, name, block)
        if not attention_layers(model):
            kinds = sorted({type(m).__name__ for n, m in model.named_modules() if n.endswith("attn")})
            if not kinds:
                raise ValueError(f"cannot convert this {type(model).__name__}: it has no attention")
            raise ValueError(f"cannot convert attention of type {', '.join(kinds)}: it is not softmax(q k') v")
        return {"": model}

    def name(self, model: TimmModel) -> str:
        name = (getattr(model, "pretrained_cfg", None) or {}).get("architecture")
        return (model.hla_base if name == CONVERTED else name) or type(model).__name__

    def layers(self, model: TimmModel) -> dict[str, nn.Module]:
        return attention_layers(model)

    def blocks(self, model: TimmModel) -> dict[str, int]:
        return block_indices(attention_layers(model))

    def current_mixer(self, model: TimmModel, attn: nn.Module) -> str:
        return getattr(attn, "mixer_name", "softmax")

    def grid_dims(self, model: TimmModel) -> int:
        return 2

    def layer_spec(self, model: TimmModel, attn: TimmAttention) -> LayerSpec:
        if not hasattr(model, "stages"):
            return layer_spec(attn, usual_grid(model), model.num_prefix_tokens)
        stage = next(i for i, stage in enumerate(model.stages) if any(m is attn for m in stage.modules()))
        return layer_spec(attn, (USUAL_SIZE // model.feature_info[stage]["reduction"],) * 2, 0)

    def note(self, model: TimmModel) -> str:
        parts = dict(getattr(model, "stages", nn.Sequential()).named_children())
        plain = [name for name, stage in parts.items() if not any(map(_is_attention, stage.modules()))]
        return f"skipped stages without attention: {', '.join(plain)}" if plain else ""

    def check_options(self, model: TimmModel, attn: TimmAttention, config: MixerConfig) -> None:
        name, options = config
        refuse_dropout(attn.attn_drop.p, name)
        refuse_rotary(name, getattr(model, "rope", None) is not None)
        if options.grid_dims != 2:
            raise ValueError("grid_dims=3 is for video; image models have a 2-D token grid")
        if options.needs_grid and drops_patches(model):
            raise ValueError(
                f"patch_drop_rate > 0 trains on random patches without a layout, but {name!r} needs the token grid "
                "(for blocks, depthwise, lepe, cpe or causal); set patch_drop_rate=0 or drop those options"
            )
        blocks = getattr(options, "blocks", None)
        if not isinstance(blocks, tuple) or getattr(model, "dynamic_img_size", True):
            return
        grid = tuple(model.patch_embed.grid_size)
        if any(m > n for m, n in zip(blocks, grid, strict=True)):
            raise ValueError(f"blocks={list(blocks)} are more than the tokens of the grid {grid} along an axis")

    def skipped_layers(self, model: TimmModel) -> dict[str, str]:
        reason = "pooling attention: one query per image, its cost is linear already"
        return {name: reason for name, m in model.named_modules() if isinstance(m, AttentionPoolLatent)}

    def install(self, model: TimmModel, swaps: list[Swap], conversion: Conversion) -> None:
        if not isinstance(model, HLAModel):
            self._to_converted_class(model)
        for attn, mixer in swaps:
            if not isinstance(attn, Site):
                attn.__class__ = SITES[type(attn)]
            assert isinstance(attn, Site)
            attn.install(mixer.train(attn.training))
            attn.prefix = getattr(model, "num_prefix_tokens", 0)
        model.sync_grid()
        model.hla_config.append(conversion)

    def _to_converted_class(self, model: TimmModel) -> None:
        stages = getattr(model, "stages", ())
        checkpointing = any(getattr(m, "grad_checkpointing", False) for m in (model, *stages))
        model.hla_base = (getattr(model, "pretrained_cfg", None) or {}).get("architecture") or ""
        model.__class__ = converted_class(type(model))
        model.hla_config = []
        for block in blocks_of(model).values():
            kind: type = type(block)
            block.__class__ = derived(HLABlock, kind)
        for stage in stages:
            kind = type(stage)
            if kind is MetaFormerStage:
                stage.__class__ = derived(HLAStage, kind)
        model.set_grad_checkpointing(checkpointing)

    def revert(self, model: TimmModel) -> None:
        if not isinstance(model, HLAModel):
            raise ValueError(f"{type(model).__name__} is not converted: there is nothing to revert")
        blocks = blocks_of(model).values()
        checkpointing = any(getattr(block, "checkpointing", False) for block in blocks)
        for site in [m for m in model.modules() if isinstance(m, Site)]:
            site.uninstall()
        for block in blocks:
            block.__dict__.pop("checkpointing", None)
            block.__class__ = host_class(block, HLABlock)
        for stage in getattr(model, "stages", ()):
            stage.__class__ = host_class(stage, HLAStage)
        own = model.__dict__
        if "host_key_only" in own:
            model.use_key_only_attn_mask = own.pop("host_key_only")
        if "_model_args" in own:
            own["_model_args"] = {key: value for key, value in own["_model_args"].items() if key not in ZOO_KWARGS}
        if getattr(model, "pretrained_cfg", None):
            model.pretrained_cfg = model.default_cfg = {**model.pretrained_cfg, "architecture": model.hla_base}
        for name in ("hla_config", "hla_base", "from_softmax"):
            own.pop(name, None)
        model.__class__ = host_class(model, HLAModel)  # type: ignore[assignment]
        model.set_grad_checkpointing(checkpointing)

    def update_saved_config(self, model: TimmModel) -> None:
        record_architecture(model)


TIMM = TimmBackbone()
