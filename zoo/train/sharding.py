"""Weights of which each process holds a part (FSDP2): whole to be saved, in parts to continue, averaged part by part.

Where every process holds all weights these functions change nothing. Where not, those that say so must be called by
every process at the same place.
"""

import copy
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

T = TypeVar("T")


def gathered(value: Any, keep: bool = True) -> Any:
    """A tensor, or what dicts and lists hold of them, whole; parts are put together on the CPU. Every process.

    keep: without it the result is of no use, but takes no memory: for the processes that only lend their parts.
    """
    if isinstance(value, DTensor):
        full: Tensor = value.full_tensor().detach()
        return full.cpu() if keep else full.new_empty(0)
    if isinstance(value, dict):
        return {k: gathered(v, keep) for k, v in value.items()}
    return [gathered(v, keep) for v in value] if isinstance(value, list) else value


def spread(value: Any, like: Any) -> Any:
    """This process's part of a whole tensor, laid out as the tensor `like`, if that is in parts."""
    if not isinstance(like, DTensor) or not isinstance(value, Tensor) or value.shape != like.shape:
        return value
    there = value.to(like.device_mesh.device_type)
    return distribute_tensor(there, like.device_mesh, like.placements, src_data_rank=None).to(like.device)


def spread_states(states: dict[str, Any], optimizer: Any) -> dict[str, Any]:
    """The whole state of an optimiser in parts, as its parameters are."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    parts = {i: {k: spread(v, parameters[i]) for k, v in state.items()} for i, state in states["state"].items()}
    return {**states, "state": parts}


def blank(model: nn.Module) -> nn.Module:
    """A copy of a model without the memory of its weights, for `whole`."""
    form = copy.deepcopy(model)
    for module in form.modules():
        for name, p in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(p.to("meta"), p.requires_grad))
    return form


def whole(model: nn.Module, form: nn.Module, keep: bool) -> nn.Module:
    """The model itself, or where it is in parts a copy of its blank `form` with whole weights on the CPU. Every
    process; without `keep` it is of no use."""
    if not any(isinstance(p, DTensor) for p in model.parameters()):
        return model
    found = copy.deepcopy(form)
    state = gathered(model.state_dict(), keep)
    if keep:
        found.load_state_dict(state, assign=True)
    return found


def all_finite(models: Iterable[nn.Module]) -> bool:
    """Whether every parameter of the models is finite, of what this process holds of them."""
    parameters = (_local(p.detach()) for model in models for p in model.parameters())
    # both ends of the range are NaN where one value is, and no tensor of the size of the parameter is formed
    ends = [end.float() for p in parameters if p.numel() for end in torch.aminmax(p)]
    return not ends or bool(torch.stack(ends).isfinite().all())


def in_step(batches: Iterable[T], n: int) -> Iterator[T]:
    """The first n batches, the last one again where there are fewer: processes that share the weights pass forward
    equally often. There must be one."""
    last = None
    found = iter(batches)
    for _ in range(n):
        last = next(found, last)
        assert last is not None
        yield last


class Average(ModelEmaV3):
    """The moving average of a model's weights; of parts, part by part."""

    def apply_update_(self, model: nn.Module, decay: float) -> None:
        ours, theirs = ([_local(v) for v in m.state_dict().values()] for m in (self.module, model))
        pairs = list(zip(ours, theirs, strict=True))
        numbers = [(a, b) for a, b in pairs if a.is_floating_point()]
        torch._foreach_lerp_([a for a, _ in numbers], [b for _, b in numbers], weight=1.0 - decay)
        for a, b in pairs:
            if not a.is_floating_point():
                a.copy_(b)


def _local(value: Any) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value
