"""Distributed training through accelerate: one process, DDP, FSDP2 or DeepSpeed.

Functions whose docstring says "Every process." communicate, so that every process must call them at the same point.
"""

import copy
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from accelerate import Accelerator, DistributedType, PartialState
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.distributed.tensor import DTensor, distribute_tensor

from zoo.conversion.hooks import layers_of
from zoo.data.plan import BatchPlan
from zoo.train.settings import AnySettings

T = TypeVar("T")

# Classes of modules that the model also calls outside of their block, so that FSDP2 must wrap them separately: DiT
# calls the embedding of its first block again for the output layer.
CALLED_ALONE = ("CombinedTimestepLabelEmbeddings",)


def create_accelerator(settings: AnySettings) -> Accelerator:
    """Create the accelerator of a run. Raises ValueError for a configuration of accelerate that is not supported."""
    on_cpu = not torch.accelerator.is_available()
    if on_cpu and settings.run.precision == "fp16":  # accelerate would silently train in float32
        raise ValueError("run.precision=fp16 needs a GPU, and there is none here; use bf16 or fp32")
    accelerator = Accelerator(
        mixed_precision={"fp32": "no"}.get(settings.run.precision, settings.run.precision),
        log_with=settings.log.trackers or None,
        project_dir=Path(settings.run.folder),
        cpu=on_cpu,  # required by accelerate for several processes on the CPU
    )
    if accelerator.distributed_type == DistributedType.MEGATRON_LM:
        raise ValueError(
            "accelerate is configured for Megatron-LM; allowed are FSDP with fsdp_version: 2, DeepSpeed with ZeRO 1 or "
            "2, and several processes without any (DDP)"
        )
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        _configure_deepspeed(settings, accelerator)
    if accelerator.distributed_type == DistributedType.FSDP:
        _check_sharding(settings, accelerator)
    return accelerator


def plan_batches(settings: AnySettings, accelerator: Accelerator, n_images: int) -> BatchPlan:
    """Plan the batches of this process. Raises ValueError as `BatchPlan`."""
    data, seed, micro_batches = settings.data, settings.run.seed, settings.optim.grad_accum_steps
    return BatchPlan(
        n_images, data.batch_size, seed, accelerator.process_index, accelerator.num_processes, micro_batches
    )


def _configure_deepspeed(settings: AnySettings, accelerator: Accelerator) -> None:
    """Write the run's settings into DeepSpeed's configuration. Raises ValueError for an unsupported one."""
    plugin = accelerator.state.deepspeed_plugin
    found = plugin.deepspeed_config
    stage = found.get("zero_optimization", {}).get("stage", 0)
    if stage not in (1, 2) or plugin.hf_ds_config.is_offload():
        what = "offloading" if stage in (1, 2) else f"ZeRO {stage}"
        raise ValueError(
            f"accelerate is configured for DeepSpeed with {what}; allowed are ZeRO 1 and 2 without offloading, or FSDP "
            "with fsdp_version: 2, which shards the weights too"
        )
    if settings.run.precision == "fp16" or settings.run.compile:
        what = "run.compile" if settings.run.compile else "run.precision=fp16"
        raise ValueError(f"{what} does not go with DeepSpeed: leave it out, or use FSDP2")
    # As with DDP, weights and gradient sums are float32; autocast (run by the engine) chooses which operators use bf16.
    found |= {"fp16": {"enabled": False}, "bf16": {"enabled": False}}
    autocast = {"dtype": "bfloat16", "lower_precision_safe_modules": []}
    found["torch_autocast"] = {"enabled": settings.run.precision == "bf16", **autocast}
    found["gradient_clipping"] = settings.optim.clip_grad_norm or 0.0
    found["gradient_accumulation_steps"] = 1  # `ZeroUpdater.micro_batch` marks the last micro-batch of a step
    micro_batches = accelerator.num_processes * settings.optim.grad_accum_steps
    found["train_micro_batch_size_per_gpu"] = settings.data.batch_size // micro_batches


def _check_sharding(settings: AnySettings, accelerator: Accelerator) -> None:
    if not accelerator.is_fsdp2:
        raise ValueError("accelerate is configured for FSDP 1; set fsdp_version: 2 in its configuration")
    if settings.run.precision == "fp16":
        raise ValueError("run.precision=fp16 does not go with sharded weights (FSDP2): use bf16 or fp32")
    plugin = accelerator.state.fsdp_plugin
    if plugin.activation_checkpointing:
        raise ValueError(
            "accelerate is configured for FSDP with fsdp_activation_checkpointing, which loses the token grid; use "
            "model.gradient_checkpointing=true of a diffusion run instead"
        )
    if isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        raise ValueError("accelerate is configured for FSDP with fsdp_offload_params: true; only false is supported")
    if plugin.auto_wrap_policy is size_based_auto_wrap_policy:
        raise ValueError(
            "accelerate is configured for FSDP with SIZE_BASED_WRAP, which cuts blocks apart; allowed are "
            "TRANSFORMER_BASED_WRAP and NO_WRAP"
        )
    # As with DDP, weights and gradient sums are float32, and autocast chooses which operators use bf16. The default
    # policy of accelerate would also cast the inputs, which rounds a timestep of 999 to 1000.
    plugin.mixed_precision_policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    plugin.cpu_ram_efficient_loading = False  # not needed: every process has loaded the weights and buffers


def destroy_process_group() -> None:
    """Destroy the process group, after the last run of these processes."""
    PartialState().destroy_process_group()


def build_device(accelerator: Accelerator) -> torch.device:
    """Device to build the model on: the CPU under FSDP2 (sharding moves it), the accelerator otherwise."""
    return torch.device("cpu") if accelerator.is_fsdp2 else accelerator.device


def prepare(
    accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Wrap the model and its optimizer for several processes."""
    _name_units(accelerator, model)
    return accelerator.prepare(model, optimizer)


def place(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    """Move a model without an optimizer (EMA, teacher) to the device; shard it if the trained model is sharded."""
    if not accelerator.is_fsdp2:
        return model.to(accelerator.device)
    _name_units(accelerator, model)
    return fsdp2_prepare_model(accelerator, model)


def _name_units(accelerator: Accelerator, model: nn.Module) -> None:
    """Let FSDP2 wrap the blocks with self-attention, unless accelerate's configuration names classes to wrap."""
    if not accelerator.is_fsdp2:
        return
    plugin = accelerator.state.fsdp_plugin
    if not hasattr(plugin, "named_by_user"):
        plugin.named_by_user = plugin.transformer_cls_names_to_wrap
    layers = layers_of(model) if hasattr(model, "blocks") or hasattr(model, "transformer_blocks") else {}
    blocks = {type(model.get_submodule(name.rpartition(".")[0])).__name__ for name in layers}
    alone = {type(module).__name__ for module in model.modules()} & set(CALLED_ALONE)
    plugin.transformer_cls_names_to_wrap = sorted({*(plugin.named_by_user or blocks), *alone})


# Sharded tensors and models


def full_state(value: T, keep: bool = True) -> T:
    """Gather the full tensors of a state dict, or of a value in one, on the CPU. Every process.

    keep: return the full tensors. A process that passes False takes part in the all-gather and gets empty tensors.
    """
    found: object = value
    if isinstance(value, DTensor):
        full = value.full_tensor().detach()
        found = full.cpu() if keep else full.new_empty(0)
    elif isinstance(value, dict):
        found = {k: full_state(v, keep) for k, v in value.items()}
    elif isinstance(value, list):
        found = [full_state(v, keep) for v in value]
    return cast(T, found)


def shard_like(value: T, like: object) -> T:
    """Take this process's shard of a full tensor, with the layout of `like`; unchanged if `like` is not sharded."""
    if not isinstance(like, DTensor) or not isinstance(value, Tensor) or value.shape != like.shape:
        return value
    there = value.to(like.device_mesh.device_type)
    return distribute_tensor(there, like.device_mesh, like.placements, src_data_rank=None).to(like.device)  # type: ignore[return-value]


def shard_optimizer_state(states: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Shard a full optimizer state dict in the same way as the parameters of `optimizer`."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    shards = {i: {k: shard_like(v, parameters[i]) for k, v in state.items()} for i, state in states["state"].items()}
    return {**states, "state": shards}


def meta_copy(model: nn.Module) -> nn.Module:
    """Copy a model with its parameters on the meta device, where they take no memory, for `unsharded_copy`."""
    copied = copy.deepcopy(model)
    for module in copied.modules():
        for name, p in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(p.to("meta"), p.requires_grad))
    return copied


def unsharded_copy(model: nn.Module, form: nn.Module, keep: bool) -> nn.Module:
    """Return the model itself, or if it is sharded, a copy with the full weights on the CPU. Every process.

    form: `meta_copy` of the model.  keep: load the weights into the copy; without it, the copy has no usable weights.
    """
    if not any(isinstance(p, DTensor) for p in model.parameters()):
        return model
    full = copy.deepcopy(form)
    state = full_state(model.state_dict(), keep)
    if keep:
        full.load_state_dict(state, assign=True)
    return full


def all_finite(models: Iterable[nn.Module], accelerator: Accelerator) -> bool:
    """Whether all parameters of the models are finite, in all processes. Every process."""
    parameters = (_local(p.detach()) for model in models for p in model.parameters())
    # minimum and maximum are NaN if one value is, and unlike isfinite() they need no tensor of the parameter's size
    ends = [end.float() for p in parameters if p.numel() for end in torch.aminmax(p)]
    here = not ends or bool(torch.stack(ends).isfinite().all())
    return float(accelerator.reduce(torch.tensor(float(here), device=accelerator.device), "mean")) == 1


def pad_batches(batches: Iterable[T], n: int) -> Iterator[T]:
    """Yield exactly n batches, repeating the last one if needed, so that all FSDP2 processes run the same number of
    forward passes. `batches` must not be empty."""
    last = None
    source = iter(batches)
    for _ in range(n):
        last = next(source, last)
        assert last is not None
        yield last


class Ema(ModelEmaV3):
    """Exponential moving average of a model's weights. Sharded weights are averaged shard by shard."""

    def apply_update_(self, model: nn.Module, decay: float) -> None:
        ours, theirs = ([_local(v) for v in m.state_dict().values()] for m in (self.module, model))
        pairs = list(zip(ours, theirs, strict=True))
        numbers = [(a, b) for a, b in pairs if a.is_floating_point()]
        torch._foreach_lerp_([a for a, _ in numbers], [b for _, b in numbers], weight=1.0 - decay)
        for a, b in pairs:
            if not a.is_floating_point():
                a.copy_(b)


def _local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value
