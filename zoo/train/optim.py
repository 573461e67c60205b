"""Optimizers and schedules of timm, with a learning-rate factor for mixers."""

import inspect

import timm
from timm.optim import create_optimizer_v2, get_optimizer_info, list_optimizers
from timm.optim._param_groups import param_groups_layer_decay, param_groups_weight_decay
from timm.scheduler import create_scheduler_v2
from timm.scheduler.scheduler import Scheduler
from torch import nn
from torch.optim import Adam, AdamW, Optimizer

from zoo.config import Tree
from zoo.errors import unknown_name
from zoo.models.timm.model_files import MIXER_PREFIX
from zoo.train.settings import OptimSettings, ScheduleSettings


def new_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that mixers added, by name."""
    return {name: p for name, p in model.named_parameters() if MIXER_PREFIX in name}


def parameter_groups(model: nn.Module, optim: OptimSettings) -> list[Tree]:
    """Create timm's parameter groups (weight decay of matrices only, layer decay), each split into new parameters
    of mixers, with their learning-rate factor, and other parameters.

    The factor is the `lr_scale` of a group, with which timm's schedules multiply the learning rate.
    """
    new = new_parameters(model)
    kept = set(model.no_weight_decay()) if hasattr(model, "no_weight_decay") else set()  # type: ignore[operator]
    # no weight decay for coefficients of heads and mixing weights of blocks, although they are stored as matrices
    kept |= {name for name in new if name.endswith(".coefficients") or ".mixing." in name}
    if optim.layer_decay:
        groups = param_groups_layer_decay(
            model, weight_decay=optim.weight_decay, no_weight_decay_list=kept, layer_decay=optim.layer_decay
        )
    else:
        groups = param_groups_weight_decay(model, weight_decay=optim.weight_decay, no_weight_decay_list=kept)
    factors = {id(p): optim.mixer_lr_scale for p in new.values()}
    out = []
    for group in groups:
        for factor in sorted({factors.get(id(p), 1.0) for p in group["params"]}):
            parameters = [p for p in group["params"] if factors.get(id(p), 1.0) == factor]
            scale = group.get("lr_scale", 1.0) * factor
            if parameters:
                out.append({"params": parameters, "weight_decay": group["weight_decay"], "lr_scale": scale})
    return out


def create_optimizer(model: nn.Module, optim: OptimSettings) -> Optimizer:
    """Create a timm optimizer. Adam and AdamW are fused, since they can then skip a step on the device (see `Updater`).

    Raises ValueError for an unknown name and for a wrong number of betas.
    """
    if optim.name not in list_optimizers():
        raise unknown_name("optimizer", optim.name, list_optimizers(exclude_filters=["bnb*", "fused*", "apex*"]))
    info = get_optimizer_info(optim.name)
    more: Tree = {"betas": tuple(optim.betas)} if info.has_betas else {}
    default = inspect.signature(info.opt_class).parameters.get("betas")
    if more and default is not None and len(default.default) != len(optim.betas):
        raise ValueError(f"optim.betas of {optim.name} is {len(default.default)} numbers, got {optim.betas}")
    if info.opt_class in (Adam, AdamW):  # fused SGD has undefined momentum if its first step is skipped
        more["fused"] = True
    groups = parameter_groups(model, optim)
    return create_optimizer_v2(groups, opt=optim.name, lr=optim.lr, weight_decay=optim.weight_decay, **more)


def create_schedule(optimizer: Optimizer, schedule: ScheduleSettings, steps_per_epoch: int) -> Scheduler:
    """Create a timm schedule, which `step_update(step)` updates before each step. Raises ValueError if timm is too old
    to have it."""
    name, more = schedule.name, Tree()
    if name == "constant":  # older versions of timm have no such schedule
        name, more = "step", {"decay_epochs": 1.0, "decay_rate": 1.0}
    elif name == "step":
        more = {"decay_epochs": schedule.decay_epochs, "decay_rate": schedule.decay_rate}
    elif name == "poly":
        more = {"decay_rate": schedule.power}  # timm's name for the exponent
    elif name == "wsd":
        if "stable_timescale" not in inspect.signature(create_scheduler_v2).parameters:
            raise ValueError(f"schedule.name=wsd needs a newer timm than {timm.__version__}: pip install -U timm")
        more = {"decay_epochs": schedule.decay_epochs}
    scheduler, _ = create_scheduler_v2(
        optimizer,
        sched=name,
        num_epochs=schedule.epochs,
        warmup_epochs=schedule.warmup_epochs,  # may be a fraction of an epoch
        warmup_lr=schedule.warmup_lr,
        min_lr=schedule.min_lr,
        step_on_epochs=False,
        updates_per_epoch=steps_per_epoch,
        **more,
    )
    return scheduler
