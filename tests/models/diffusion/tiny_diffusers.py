"""Tiny models of diffusers with random weights, their inputs, and helpers of the tests."""

import copy
import functools
from typing import Any, NamedTuple

import diffusers
import torch
from torch import Tensor, nn

import zoo

SIZES = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 3}


class Case(NamedTuple):
    """A family: the class of the model, its configuration, the function that makes its inputs."""

    model: str
    config: dict[str, Any]
    inputs: Any


def noise(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def dit_inputs(size: int = 8, batch: int = 2) -> dict[str, Any]:
    return {
        "hidden_states": noise(batch, 4, size, size),
        "timestep": torch.arange(batch) * 100 + 7,
        "class_labels": torch.arange(batch) % 10,
    }


CASES = {
    "dit": Case(
        "DiTTransformer2DModel",
        {**SIZES, "out_channels": 8, "sample_size": 8, "num_embeds_ada_norm": 10, "norm_num_groups": 4},
        dit_inputs,
    ),
}


def build(case: Case, seed: int = 0, **changes: Any) -> Any:
    """The model of a case with random weights everywhere, in evaluation mode."""
    torch.manual_seed(seed)
    model = getattr(diffusers, case.model)(**{**case.config, **changes})
    stir(model)
    return model.eval()


def stir(model: nn.Module) -> None:
    """Random values for what is initialised to constants: biases, norms, depthwise filters, gates."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim <= 1 or ".mixer." in name:
                p.add_(torch.randn_like(p), alpha=0.1)


def converted(name: str, mixer: str, seed: int = 0, config: dict[str, Any] | None = None, **arguments: Any) -> Any:
    """The tiny model called `name` after `zoo.convert`, with stirred mixers."""
    model = build(CASES[name], seed, **(config or {}))
    zoo.convert(model, mixer, **arguments)
    stir(model)
    return model


@functools.cache
def _host(name: str) -> Any:
    return build(CASES[name])


def host(name: str) -> Any:
    """A copy of the unconverted tiny model called `name`."""
    return copy.deepcopy(_host(name))


def inputs(name: str, **sizes: int) -> dict[str, Any]:
    """The arguments of a forward pass of the tiny model called `name`."""
    return CASES[name].inputs(**sizes)


def run(model: Any, arguments: dict[str, Any]) -> Tensor:
    """The output of a forward pass."""
    return model(**arguments, return_dict=False)[0]


def sites(model: nn.Module) -> list[Any]:
    """The sites of a model, in order."""
    return [m for m in model.modules() if hasattr(m, "mixer_name")]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the gradients by name."""
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
