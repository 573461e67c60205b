"""Optimiser and schedule from timm, with a learning-rate factor for the new parameters of mixers."""

from typing import Any

from timm.optim import create_optimizer_v2, get_optimizer_info, list_optimizers
from timm.optim._param_groups import param_groups_layer_decay, param_groups_weight_decay
from timm.scheduler import create_scheduler_v2
from timm.scheduler.scheduler import Scheduler
from torch import nn
from torch.optim import Optimizer

from zoo.names import unknown_name
from zoo.train.model import NEW
from zoo.train.settings import OptimSettings, ScheduleSettings


def new_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that mixers added, by name."""
    return {name: p for name, p in model.named_parameters() if NEW in name}


def parameter_groups(model: nn.Module, optim: OptimSettings) -> list[dict[str, Any]]:
    """timm's groups (weight decay of matrices only, layer decay), each split into old and new parameters.

    `lr_scale` of a group is what timm's schedules multiply the rate with.
    """
    kept = set(model.no_weight_decay()) if hasattr(model, "no_weight_decay") else set()  # type: ignore[operator]
    # the mixture of orders is a gain of each head, though it is stored as [H, 4]
    kept |= {name for name in new_parameters(model) if name.endswith(".coefficients")}
    if optim.layer_decay:
        groups = param_groups_layer_decay(
            model, weight_decay=optim.weight_decay, no_weight_decay_list=kept, layer_decay=optim.layer_decay
        )
    else:
        groups = param_groups_weight_decay(model, weight_decay=optim.weight_decay, no_weight_decay_list=kept)
    new = {id(p) for p in new_parameters(model).values()}
    out = []
    for group in groups:
        for is_new in (False, True):
            parameters = [p for p in group["params"] if (id(p) in new) == is_new]
            scale = group.get("lr_scale", 1.0) * (optim.mixer_lr if is_new else 1.0)
            if parameters:
                out.append({"params": parameters, "weight_decay": group["weight_decay"], "lr_scale": scale})
    return out


def create_optimizer(model: nn.Module, optim: OptimSettings) -> Optimizer:
    """The timm optimiser of this name. Raises ValueError for an unknown one."""
    if optim.name not in list_optimizers():
        raise unknown_name("optimiser", optim.name, list_optimizers(exclude_filters=["bnb*", "fused*", "apex*"]))
    betas = {"betas": tuple(optim.betas)} if get_optimizer_info(optim.name).has_betas else {}
    groups = parameter_groups(model, optim)
    return create_optimizer_v2(groups, opt=optim.name, lr=optim.lr, weight_decay=optim.weight_decay, **betas)


def create_schedule(optimizer: Optimizer, schedule: ScheduleSettings, steps_per_epoch: int) -> Scheduler:
    """The timm schedule, in steps: call `step_update(step)` before each step."""
    scheduler, _ = create_scheduler_v2(
        optimizer,
        sched=schedule.name,
        num_epochs=schedule.epochs,
        warmup_epochs=schedule.warmup_epochs,  # fractions of an epoch become steps
        warmup_lr=schedule.warmup_lr,
        min_lr=schedule.min_lr,
        step_on_epochs=False,
        updates_per_epoch=steps_per_epoch,
    )
    return scheduler
