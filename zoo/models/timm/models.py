"""timm models that know where their tokens lie: the host's class with a mixin that keeps each site's grid up to date.

Two resolutions in one backward pass with gradient checkpointing give exact gradients, because the blocks checkpoint
themselves and set the grid of the first forward again before they recompute.
A converted model gets its class from `CONVERTED_MODELS` and its blocks from `CONVERTED_BLOCKS`; a new family is one row
in each.
"""

import functools
from typing import Any

import torch
from timm.layers import AttentionPoolLatent, PatchDropout, PatchDropoutWithIndices, is_scriptable
from timm.models._manipulate import checkpoint
from timm.models.deit import VisionTransformerDistilled
from timm.models.eva import Eva, EvaBlock, EvaBlockPostNorm
from timm.models.naflexvit import NaFlexVit
from timm.models.vision_transformer import Block, ParallelThingsBlock, ResPostBlock, VisionTransformer
from torch import Tensor, nn
from torch.fx import Proxy

from zoo.grid import Grid
from zoo.mixers import LayerSpec, MixerConfig
from zoo.models import CONVERTED, Swap
from zoo.models.checkpoint_tags import match_checkpoint, no_torchscript
from zoo.models.saved_config import ZOO_KWARGS, architecture_of, record_architecture, recorded_arguments
from zoo.models.timm.attention import (
    SITES,
    Host,
    Site,
    attention_layers,
    block_index,
    host_class,
    layer_spec,
)
from zoo.models.unsupported import check_is_module, refuse_block, refuse_dropout, refuse_family, refuse_rotary


def set_grid(module: nn.Module, grid: Grid | None) -> None:
    """Tell each site in `module` that its patch tokens lie on `grid` (None: they have no layout)."""
    for child in module.modules():
        if isinstance(child, Site):
            child.grid = grid


def drops_patches(model: Any) -> bool:
    """Whether the model trains on random subsets of the patches (`patch_drop_rate` > 0), which have no layout."""
    return isinstance(getattr(model, "patch_drop", None), PatchDropout | PatchDropoutWithIndices)


def usual_grid(model: Any) -> Grid | None:
    """The grid for which a mixer chooses its blocks: that of the input size, or of a NaFlexViT's positions; None for a
    model with neither."""
    grid = model.embeds.pos_embed_grid_size if isinstance(model, NaFlexVit) else model.patch_embed.grid_size
    return None if grid is None else tuple(grid)


class HLAModel(Host):
    """Mixin of a converted model: checkpointing, loading, name. The host does everything else.

    `hla_config` lists the conversions that made it, each as the arguments of `zoo.convert`. `hla_base` is the name of
    the timm model it was. `from_softmax` tells if the last checkpoint it loaded was one of the softmax model.
    """

    hla_config: list[dict[str, Any]]
    hla_base: str
    from_softmax: bool = False

    @property
    def hla_args(self) -> dict[str, Any]:
        """The arguments of `timm.create_model` that build its mixers again, next to those of its host.

        timm 1.0.31 and newer record them; with an older one, save with `save_for_hf(model, folder, model_args={...})`.
        """
        return architecture_of(self)[1]

    @property
    def _model_args(self) -> dict[str, Any]:
        """What timm 1.0.31 and newer save as the arguments of `create_model`: those they recorded, with our own ones as
        the sites are now. Raises AttributeError for a model of an older timm."""
        if "_model_args" not in self.__dict__:
            raise AttributeError("this timm records no arguments of create_model")
        return recorded_arguments(self, self.__dict__["_model_args"])

    @_model_args.setter
    def _model_args(self, arguments: dict[str, Any]) -> None:
        self.__dict__["_model_args"] = arguments

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Checkpoint each block. `self.grad_checkpointing` stays False: the host would checkpoint without the grid."""
        super().set_grad_checkpointing(enable)
        self.grad_checkpointing = False
        for block in self.blocks:
            block.checkpointing = enable

    def _load_from_state_dict(self, state_dict, prefix, *args) -> None:
        self.from_softmax = match_checkpoint(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    __prepare_scriptable__ = no_torchscript


class GridModel(HLAModel):
    """A converted model whose input size is fixed, or which all images of a batch share."""

    def sync_grid(self) -> None:
        """Set the grid of the fixed input size on the sites."""
        set_grid(self.blocks, None if drops_patches(self) else tuple(self.patch_embed.grid_size))

    def set_input_size(self, *args, **kwargs) -> None:
        super().set_input_size(*args, **kwargs)
        self.sync_grid()

    def _pos_embed(self, x: Tensor) -> Any:
        if self.dynamic_img_size and not drops_patches(self):
            traced = isinstance(x, Proxy)  # torch.fx: the traced graph has no sizes to give to the sites
            set_grid(self.blocks, None if traced else (x.shape[1], x.shape[2]))  # x [B, H, W, C]
        return super()._pos_embed(x)


class HLANaFlexVit(HLAModel, NaFlexVit):
    """NaFlexViT: images of one size, or samples that are padded to one length, each with a grid of its own.

    Linear mixers honour the padding as a mask of keys. In padded batches the tokens have no layout.
    """

    use_key_only_attn_mask: bool

    def sync_grid(self) -> None:
        """Ask for masks of keys alone, [B, 1, 1, N], which linear mixers can honour; each forward sets the grid."""
        for site in self._sites():
            site.key_masks = site.mixer_name != "softmax"
        host = self.__dict__.setdefault("host_key_only", self.use_key_only_attn_mask)
        self.use_key_only_attn_mask = host or any(site.key_masks for site in self._sites())
        set_grid(self.blocks, None)

    def _sites(self) -> list[Site]:
        return [m for m in self.blocks.modules() if isinstance(m, Site)]

    def _forward_embeds(self, x: Tensor, patch_coord: Any, patch_valid: Any, attn_mask: Any) -> Any:
        masked = attn_mask is not None and not isinstance(attn_mask, Proxy)  # torch.fx: one stands for None
        if masked and any(site.key_masks for site in self._sites()):
            raise ValueError("linear mixers cannot honour attn_mask; mark the padding with patch_valid")
        plain = patch_coord is None and not isinstance(x, Proxy) and not drops_patches(self)
        set_grid(self.blocks, tuple(self.embeds.dynamic_feat_size(tuple(x.shape[-2:]))) if plain else None)
        return super()._forward_embeds(x, patch_coord, patch_valid, attn_mask)


class HLABlock(Host):
    """Mixin of a block that checkpoints itself, `checkpointing` being what the model's flag would have been."""

    checkpointing: bool = False

    def forward(self, *args, **kwargs) -> Tensor:
        forward = super().forward
        if not self.checkpointing:
            return forward(*args, **kwargs)
        if torch.compiler.is_compiling():  # the graph holds the grid already, and may not write attributes here
            return checkpoint(forward, *args, **kwargs)
        grid = next((m.grid for m in self.modules() if isinstance(m, Site)), None)

        def run(*args, **kwargs) -> Tensor:
            set_grid(self, grid)
            return forward(*args, **kwargs)

        return checkpoint(run, *args, **kwargs)


class HLAVisionTransformer(GridModel, VisionTransformer):
    """ViT, DeiT, DeiT-III, FlexiViT, DINOv2, hybrids, ViTamin."""


class HLAVisionTransformerDistilled(GridModel, VisionTransformerDistilled):
    """DeiT with a distillation token."""


class HLAEva(GridModel, Eva):
    """EVA, EVA-02, DINOv3, Perception Encoder, RoPE ViTs."""


class HLAViTBlock(HLABlock, Block):
    """Pre-norm block of a ViT."""


class HLAResPostBlock(HLABlock, ResPostBlock):
    """Post-norm block of a ViT."""


class HLAParallelThingsBlock(HLABlock, ParallelThingsBlock):
    """Block with attentions side by side."""


class HLAEvaBlock(HLABlock, EvaBlock):
    """Pre-norm block of EVA."""


class HLAEvaBlockPostNorm(HLABlock, EvaBlockPostNorm):
    """Post-norm block of EVA."""


CONVERTED_MODELS: dict[type[nn.Module], type[nn.Module]] = {
    VisionTransformer: HLAVisionTransformer,
    VisionTransformerDistilled: HLAVisionTransformerDistilled,
    Eva: HLAEva,
    NaFlexVit: HLANaFlexVit,
}
CONVERTED_BLOCKS: dict[type[nn.Module], type[nn.Module]] = {
    Block: HLAViTBlock,
    ResPostBlock: HLAResPostBlock,
    ParallelThingsBlock: HLAParallelThingsBlock,
    EvaBlock: HLAEvaBlock,
    EvaBlockPostNorm: HLAEvaBlockPostNorm,
}


# What decides where the tokens of a model lie, and how its blocks are run
LAYOUT = ("_pos_embed", "_forward_embeds", "forward_features", "set_input_size", "set_grad_checkpointing")


def converted_class(kind: type) -> Any:
    """The class of a model of class `kind` once it is converted; None for one that is not known.

    A subclass of a known class keeps what it adds and overrides. Raises ValueError for one that overrides where its
    tokens lie.
    """
    base = next((k for k in kind.__mro__ if k in CONVERTED_MODELS), None)
    if base is None or kind is base:
        return CONVERTED_MODELS.get(kind)
    changed = [name for name in LAYOUT if getattr(kind, name, None) is not getattr(base, name, None)]
    if changed:
        raise ValueError(
            f"cannot convert {kind.__name__}, a subclass of {base.__name__} that overrides {', '.join(changed)}: its "
            f"tokens may lie elsewhere than mixers are told. Convert a {base.__name__} and put what is your own around "
            "it, or override forward, forward_head or forward of a block instead"
        )
    mixin: Any = CONVERTED_MODELS[base]
    return derived(mixin, kind)


def converted_block(kind: type) -> Any:
    """The class of a block of class `kind` once its model is converted."""
    return CONVERTED_BLOCKS.get(kind) or derived(HLABlock, kind)


@functools.cache
def derived(mixin: Any, kind: Any) -> Any:
    """`kind` with `mixin` in front; its objects can be pickled, though no module has the class."""
    return type(f"HLA{kind.__name__}", (mixin, kind), {"made_of": (mixin, kind), "__reduce__": _reduce})


def _reduce(model: Any) -> tuple:
    return _empty, model.made_of, model.__dict__


def _empty(mixin: type, kind: type) -> Any:
    new = derived(mixin, kind)
    return new.__new__(new)


class TimmBackbone:
    """What `zoo.convert` has to know about timm models, see `zoo.models.Backbone`."""

    def submodels(self, model: Any) -> dict[str, Any]:
        if is_scriptable():
            no_torchscript(model)
        check_is_module(model)
        if not isinstance(model, HLAModel) and converted_class(type(model)) is None:
            refuse_family(model, {*CONVERTED_MODELS, *CONVERTED_MODELS.values()})
        for name, block in model.blocks.named_children():
            inside = any(type(m) in SITES or isinstance(m, Site) for m in block.modules())
            if not inside and type(block) not in CONVERTED_BLOCKS and not isinstance(block, HLABlock):
                refuse_block(model, f"blocks.{name}", block)
        if not attention_layers(model):
            kinds = sorted({type(m).__name__ for n, m in model.blocks.named_modules() if n.endswith("attn")})
            raise ValueError(f"cannot convert attention of type {', '.join(kinds)}: it is not softmax(q k') v")
        return {"": model}

    def name(self, model: Any) -> str:
        name = (getattr(model, "pretrained_cfg", None) or {}).get("architecture")
        return (model.hla_base if name == CONVERTED else name) or type(model).__name__

    def layers(self, model: Any) -> dict[str, Any]:
        return attention_layers(model)

    def blocks(self, model: Any) -> dict[str, int]:
        return {name: block_index(name) for name in attention_layers(model)}

    def current_mixer(self, model: Any, attn: Any) -> str:
        return getattr(attn, "mixer_name", "softmax")

    def grid_dims(self, model: Any) -> int:
        return 2

    def layer_spec(self, model: Any, attn: Any) -> LayerSpec:
        return layer_spec(attn, usual_grid(model), model.num_prefix_tokens)

    def check_options(self, model: Any, attn: Any, config: MixerConfig) -> None:
        name, options = config
        refuse_dropout(attn.attn_drop.p, name)
        refuse_rotary(name, getattr(model, "rope", None) is not None)
        if options.grid_dims != 2:
            raise ValueError("grid_dims=3 is for video; the tokens of an image model lie on a 2-D grid")
        if options.needs_grid and drops_patches(model):
            raise ValueError(
                f"patch_drop_rate > 0 trains on random patches without a layout, but {name!r} (it mixes blocks, or "
                "has depthwise, lepe, cpe or causal) needs the token grid; set patch_drop_rate=0 or drop those options"
            )
        blocks = getattr(options, "blocks", None)
        if not isinstance(blocks, tuple) or getattr(model, "dynamic_img_size", True):
            return
        grid = tuple(model.patch_embed.grid_size)
        if any(m > n for m, n in zip(blocks, grid, strict=True)):
            raise ValueError(f"blocks={list(blocks)} are more than the tokens of the grid {grid} along an axis")

    def skipped_layers(self, model: Any) -> dict[str, str]:
        reason = "pooling attention: one query an image, its cost is linear already"
        return {name: reason for name, m in model.named_modules() if isinstance(m, AttentionPoolLatent)}

    def install(self, model: Any, swaps: list[Swap]) -> None:
        if not isinstance(model, HLAModel):
            self._to_converted_class(model)
        for attn, mixer in swaps:
            if not isinstance(attn, Site):
                attn.__class__ = SITES[type(attn)]
            attn.install(mixer.train(attn.training))
            attn.prefix = model.num_prefix_tokens
        model.sync_grid()

    def _to_converted_class(self, model: Any) -> None:
        checkpointing = model.grad_checkpointing
        model.hla_base = (getattr(model, "pretrained_cfg", None) or {}).get("architecture") or ""
        model.__class__ = converted_class(type(model))
        model.hla_config = []
        for block in model.blocks:
            block.__class__ = converted_block(type(block))
        model.set_grad_checkpointing(checkpointing)

    def revert(self, model: Any) -> None:
        if not isinstance(model, HLAModel):
            raise ValueError(f"{type(model).__name__} is not converted: there is nothing to revert")
        checkpointing = any(getattr(block, "checkpointing", False) for block in model.blocks)
        for site in [m for m in model.modules() if isinstance(m, Site)]:
            site.release()
        for block in model.blocks:
            block.__dict__.pop("checkpointing", None)
            block.__class__ = host_class(block, HLABlock)
        own = model.__dict__
        if "host_key_only" in own:
            model.use_key_only_attn_mask = own.pop("host_key_only")
        if "_model_args" in own:
            own["_model_args"] = {key: value for key, value in own["_model_args"].items() if key not in ZOO_KWARGS}
        if getattr(model, "pretrained_cfg", None):
            model.pretrained_cfg = model.default_cfg = {**model.pretrained_cfg, "architecture": model.hla_base}
        for name in ("hla_config", "hla_base", "from_softmax"):
            own.pop(name, None)
        model.__class__ = host_class(model, HLAModel)
        model.set_grad_checkpointing(checkpointing)

    def update_saved_config(self, model: Any) -> None:
        record_architecture(model)


TIMM = TimmBackbone()
