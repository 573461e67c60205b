"""Converted timm models: subclasses that set the token grid of their attention layers.

Blocks implement gradient checkpointing themselves and restore the grid of their forward pass before recomputation, so
that gradients are exact even if one backward pass covers several resolutions. `CONVERTED_MODELS`, `CONVERTED_STAGES`
and `CONVERTED_BLOCKS` list the classes of timm.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from timm.layers import PatchDropout, PatchDropoutWithIndices
from timm.models._manipulate import checkpoint
from timm.models.deit import VisionTransformerDistilled
from timm.models.eva import Eva, EvaBlock, EvaBlockPostNorm
from timm.models.fastvit import AttentionBlock, FastVit, RepMixerBlock
from timm.models.metaformer import MetaFormer, MetaFormerBlock, MetaFormerStage
from timm.models.naflexvit import NaFlexVit
from timm.models.pit import PoolingVisionTransformer
from timm.models.pit import Transformer as PoolingStage
from timm.models.vision_transformer import Block, ParallelThingsBlock, ResPostBlock, VisionTransformer
from torch import Tensor, nn
from torch.fx import Proxy

from zoo.grid import Grid, integers
from zoo.models import Conversion
from zoo.models.checkpoint_tags import match_checkpoint, no_torchscript
from zoo.models.saved_config import architecture_of, recorded_arguments
from zoo.models.timm.attention import Host, Site, blocks_of, stages_of

TimmModel: TypeAlias = Any  # of a class of CONVERTED_MODELS


def set_grid(module: nn.Module, grid: Grid | None) -> None:
    """Set the token grid of each site in `module`; None if the tokens have no layout."""
    grid = grid and integers(grid)
    for child in module.modules():
        if isinstance(child, Site):
            child.grid = grid


def drops_patches(model: TimmModel) -> bool:
    """Whether `patch_drop_rate` > 0: training uses random subsets of the patches, which have no layout."""
    return isinstance(getattr(model, "patch_drop", None), PatchDropout | PatchDropoutWithIndices)


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
        for part in (self, *stages_of(self).values()):
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
        """Clear the grid, which the next forward pass sets."""
        for stage in stages_of(self).values():
            set_grid(stage, None)


class HLAStage(Host):
    """Mixin of a stage of MetaFormer or PiT, which sets the grid of its attention layers.

    x: [B, C, H, W] before the convolution that shrinks it, in PiT with class tokens.
    """

    def forward(self, x: Tensor | tuple[Tensor, Tensor]) -> Tensor | tuple[Tensor, Tensor]:
        image = x[0] if isinstance(x, tuple) else x
        if not isinstance(image, Proxy):
            before = self.pool if isinstance(self, PoolingStage) else self.downsample
            stride = before.conv.stride[0] if hasattr(before, "conv") else 1
            set_grid(self.blocks, tuple(-(-n // stride) for n in image.shape[2:]))
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
    PoolingVisionTransformer: StageModel,  # PiT
}
CONVERTED_STAGES = (MetaFormerStage, PoolingStage)  # FastViT's attention layers compute their grid
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
