"""Hooks that record or replace the attention layers of timm and diffusers models in a forward pass."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zoo.models.convert import backbone_of
from zoo.models.timm.attention import Site

Inputs = Tensor | Mapping[str, Any]  # inputs of one forward pass: images [B, 3, H, W], or keyword arguments


@dataclass
class Call:
    """Call of a module: arguments, keyword arguments and output (for joint attention the image tokens)."""

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    output: Tensor

    def repeat(self, layer: nn.Module) -> Tensor:
        """Call `layer` with the same arguments."""
        return first_tensor(layer(*self.arguments, **self.keywords))


def first_tensor(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    """Return the first tensor of (image, text) of joint attention and of (sample,) of diffusers models."""
    return output[0] if isinstance(output, tuple) else output


def forward(model: nn.Module, inputs: Inputs) -> Tensor:
    """Compute the output of a model: logits [B, K], or noise or velocity [B, C, H, W]."""
    if isinstance(inputs, Tensor):
        return model(inputs)
    return first_tensor(model(**{**inputs, "return_dict": False}))


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the self-attention layers of a model by name, converted or not."""
    return backbone_of(model).layers(model)


def converted_layers(model: nn.Module) -> dict[str, Site]:
    """Return the layers whose mixer is not softmax. Raises ValueError if there are none."""
    layers = {n: m for n, m in layers_of(model).items() if isinstance(m, Site) and m.mixer_name != "softmax"}
    if not layers:
        raise ValueError(f"{type(model).__name__} has no converted attention layer: call zoo.convert first")
    return layers


@contextmanager
def record_modules(modules: Mapping[str, nn.Module]) -> Iterator[dict[str, Call]]:
    """Record the last call of each module inside the context, by name."""
    calls: dict[str, Call] = {}

    def hook_of(name: str):
        def hook(_, arguments: tuple, keywords: dict, output: Tensor | tuple[Tensor, ...]) -> None:
            calls[name] = Call(arguments, keywords, first_tensor(output))

        return hook

    with ExitStack() as stack:
        for name, module in modules.items():
            stack.enter_context(module.register_forward_hook(hook_of(name), with_kwargs=True))
        yield calls


def record_calls(model: nn.Module, names: Iterable[str]) -> AbstractContextManager[dict[str, Call]]:
    """Record the calls of the attention layers `names` of `model` inside the context."""
    layers = layers_of(model)
    return record_modules({name: layers[name] for name in names})


def record_mixer_calls(layers: Mapping[str, Site]) -> AbstractContextManager[dict[str, Call]]:
    """Record the calls of the mixers of `layers` inside the context; arguments are (q, k, v, context)."""
    return record_modules({name: layer.mixer for name, layer in layers.items()})


@contextmanager
def replace_layers(model: nn.Module, others: Mapping[str, nn.Module]) -> Iterator[None]:
    """Make the layers of `model` named in `others` return the outputs of `others` for their inputs.

    This equals `model` with these layers converted, without a copy of it.
    """
    layers = layers_of(model)

    def hook_of(other: nn.Module):
        return lambda _, arguments, keywords, output: other(*arguments, **keywords)

    with ExitStack() as stack:
        for name, other in others.items():
            stack.enter_context(layers[name].register_forward_hook(hook_of(other), with_kwargs=True))
        yield


class TeacherStudent:
    """Softmax model and its conversion, both in evaluation mode.

    Raises ValueError if the student has no converted layer or its layers differ from the teacher's layers.
    """

    def __init__(self, teacher: nn.Module, student: nn.Module) -> None:
        self.teacher, self.student = teacher.eval(), student.eval()
        self.layers = converted_layers(student)
        own, other = layers_of(student).keys(), layers_of(teacher).keys()
        if own != other:
            where, name = ("teacher has no", min(own - other)) if own - other else ("student has no", min(other - own))
            raise ValueError(f"the {where} layer {name}: the teacher is not the model that was converted")
        self._shape: torch.Size | None = None

    @torch.no_grad()
    def calls(self, inputs: Inputs) -> tuple[Tensor, dict[str, Call]]:
        """Return the output of the teacher and the calls of its layers that are converted in the student."""
        self.set_student_grid(inputs)
        with record_calls(self.teacher, self.layers) as calls:
            output = forward(self.teacher, inputs)
        return output, calls

    @torch.no_grad()
    def set_student_grid(self, inputs: Inputs) -> None:
        """Set the token grid of these inputs in the student, by a forward pass."""
        if not isinstance(inputs, Tensor | Mapping):
            kind = type(inputs).__name__
            raise ValueError(f"each batch of inputs must be a tensor, or a dict of a model's keywords, got {kind}")
        tensor = inputs if isinstance(inputs, Tensor) else next(v for v in inputs.values() if isinstance(v, Tensor))
        if tensor.shape[1:] != self._shape:
            self._shape = tensor.shape[1:]
            forward(self.student, inputs)
