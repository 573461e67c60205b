"""The processes of a run and what each holds, as accelerate is configured: one process, DDP, FSDP2 or DeepSpeed."""

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedType, PartialState
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

from zoo.conversion.hooks import layers_of
from zoo.train.deepspeed_update import configure

# classes of modules which the model also calls from outside of the block that they are part of
CALLED_ALONE = ("CombinedTimestepLabelEmbeddings",)  # of DiT's first block, for the output


def create_accelerator(settings: Any) -> Accelerator:
    """The accelerator of a run with the sections run and log. Raises ValueError for what does not go together."""
    on_cpu = not torch.accelerator.is_available()
    if on_cpu and settings.run.precision == "fp16":  # accelerate would train in float32 without a word
        raise ValueError("run.precision=fp16 needs a GPU, and there is none here; use bf16 or fp32")
    accelerator = Accelerator(
        mixed_precision={"fp32": "no"}.get(settings.run.precision, settings.run.precision),
        log_with=settings.log.trackers or None,
        project_dir=Path(settings.run.folder),
        cpu=on_cpu,  # accelerate starts several CPU processes only when told so
    )
    if accelerator.distributed_type == DistributedType.MEGATRON_LM:
        raise ValueError(
            "accelerate is configured for Megatron-LM; allowed are FSDP with fsdp_version: 2, DeepSpeed with ZeRO 1 or "
            "2, and several processes without any (DDP)"
        )
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        configure(settings, accelerator)
    if accelerator.distributed_type == DistributedType.FSDP:
        _check_sharding(settings, accelerator)
    return accelerator


def _check_sharding(settings: Any, accelerator: Accelerator) -> None:
    if not accelerator.is_fsdp2:
        raise ValueError("accelerate is configured for FSDP 1; set fsdp_version: 2 in its configuration")
    if settings.run.precision == "fp16":
        raise ValueError("run.precision=fp16 does not go with sharded weights (FSDP2): use bf16 or fp32")
    plugin = accelerator.state.fsdp_plugin
    if plugin.activation_checkpointing:
        raise ValueError(
            "accelerate is configured for FSDP with fsdp_activation_checkpointing, which loses the token grid; use "
            "model.checkpointing=true of a diffusion run instead"
        )
    if isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        raise ValueError("accelerate is configured for FSDP with fsdp_offload_params: true; only false is supported")
    if plugin.auto_wrap_policy is size_based_auto_wrap_policy:
        raise ValueError(
            "accelerate is configured for FSDP with SIZE_BASED_WRAP, which cuts blocks apart; allowed are "
            "TRANSFORMER_BASED_WRAP and NO_WRAP"
        )
    # As under DDP: float32 weights and sums of gradients, and autocast says what is computed in bf16. accelerate's
    # own policy would cast the inputs too, and a time of 999 is 1000 in bf16.
    plugin.mixed_precision_policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    plugin.cpu_ram_efficient_loading = False  # each process has the weights by now, and buffers beside them


def part() -> None:
    """End the group of the processes, after the last run in them."""
    PartialState().destroy_process_group()


def place_of(accelerator: Accelerator) -> torch.device:
    """Where a model is put before it is prepared or sharded: the device, unless sharding moves it there part by
    part."""
    return torch.device("cpu") if accelerator.is_fsdp2 else accelerator.device


def prepare(accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    """The model and its optimiser, ready for several processes."""
    _name_units(accelerator, model)
    return accelerator.prepare(model, optimizer)


def placed(accelerator: Accelerator, model: nn.Module) -> Any:
    """A model that has no optimiser (average, teacher) on the device, sharded if the trained model is."""
    if not accelerator.is_fsdp2:
        return model.to(accelerator.device)
    _name_units(accelerator, model)
    return fsdp2_prepare_model(accelerator, model)


def _name_units(accelerator: Accelerator, model: nn.Module) -> None:
    """Tell accelerate which modules are gathered at once, if its configuration leaves that open: the blocks around
    self-attention."""
    if not accelerator.is_fsdp2:
        return
    plugin = accelerator.state.fsdp_plugin
    if not hasattr(plugin, "named_by_user"):
        plugin.named_by_user = plugin.transformer_cls_names_to_wrap
    layers = layers_of(model) if hasattr(model, "blocks") or hasattr(model, "transformer_blocks") else {}
    blocks = {type(model.get_submodule(name.rpartition(".")[0])).__name__ for name in layers}
    alone = {type(module).__name__ for module in model.modules()} & set(CALLED_ALONE)
    plugin.transformer_cls_names_to_wrap = sorted({*(plugin.named_by_user or blocks), *alone})
