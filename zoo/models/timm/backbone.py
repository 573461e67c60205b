"""Interface of `zoo.convert` to timm models."""

from collections.abc import Sequence
from typing import TypeAlias

from timm.layers import Attention, AttentionPoolLatent, AttentionRope, is_scriptable
from timm.models.eva import EvaAttention
from timm.models.fastvit import Attention as FastVitAttention
from timm.models.metaformer import Attention as MetaFormerAttention
from timm.models.naflexvit import NaFlexVit
from timm.models.pit import PoolingVisionTransformer
from torch import nn

from zoo.grid import Grid
from zoo.mixers import LayerSpec, MixerConfig
from zoo.models import CONVERTED, Conversion, Swap
from zoo.models.checkpoint_tags import no_torchscript
from zoo.models.saved_config import ZOO_KWARGS, record_architecture
from zoo.models.timm.attention import (
    SITES,
    Site,
    attention_layers,
    block_indices,
    blocks_of,
    host_class,
    layer_spec,
    stages_of,
)
from zoo.models.timm.models import (
    CONVERTED_BLOCKS,
    CONVERTED_MODELS,
    CONVERTED_STAGES,
    HLABlock,
    HLAModel,
    HLAStage,
    TimmModel,
    converted_class,
    derived,
    drops_patches,
)
from zoo.models.unsupported import check_is_module, refuse_block, refuse_dropout, refuse_family, refuse_rotary

TimmAttention: TypeAlias = Attention | AttentionRope | EvaAttention | MetaFormerAttention | FastVitAttention

USUAL_SIZE = 224  # pixels for which blocks are chosen in models with stages, unless `with_block_size` sets another size


def usual_grid(model: TimmModel) -> Grid | None:
    """Return the token grid of the input size, or of the position embedding of NaFlexViT; None without either."""
    grid = model.embeds.pos_embed_grid_size if isinstance(model, NaFlexVit) else model.patch_embed.grid_size
    return None if grid is None else tuple(grid)


def with_block_size(model: nn.Module, size: int | Sequence[int] | None) -> nn.Module:
    """Set the image size for which blocks are chosen in a model with stages, and return it; None: the usual size."""
    if size is not None:
        setattr(model, "block_size", (size, size) if isinstance(size, int) else tuple(size))  # noqa: B010
    return model


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
        stages = list(stages_of(model).values())
        if not stages:
            return layer_spec(attn, usual_grid(model), model.num_prefix_tokens)
        stage = next(i for i, stage in enumerate(stages) if any(m is attn for m in stage.modules()))
        reductions = [info["reduction"] for info in model.feature_info]
        if isinstance(model, PoolingVisionTransformer):
            grid = tuple(-(-n * reductions[0] // reductions[stage]) for n in model.patch_embed.grid_size)
            return layer_spec(attn, grid, model.num_tokens)
        size = getattr(model, "block_size", (USUAL_SIZE, USUAL_SIZE))
        return layer_spec(attn, tuple(-(-n // reductions[stage]) for n in size), 0)

    def note(self, model: TimmModel) -> str:
        stages = ((name.rpartition(".")[2], stage) for name, stage in stages_of(model).items())
        plain = [name for name, stage in stages if not any(map(_is_attention, stage.modules()))]
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
            attn.prefix = getattr(model, "num_prefix_tokens", getattr(model, "num_tokens", 0))
        model.sync_grid()
        model.hla_config.append(conversion)

    def _to_converted_class(self, model: TimmModel) -> None:
        stages = stages_of(model).values()
        checkpointing = any(getattr(m, "grad_checkpointing", False) for m in (model, *stages))
        model.hla_base = (getattr(model, "pretrained_cfg", None) or {}).get("architecture") or ""
        model.__class__ = converted_class(type(model))
        model.hla_config = []
        for block in blocks_of(model).values():
            kind: type = type(block)
            block.__class__ = derived(HLABlock, kind)
        for stage in stages:
            host: type = type(stage)
            if host in CONVERTED_STAGES:
                stage.__class__ = derived(HLAStage, host)
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
        for stage in stages_of(model).values():
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
