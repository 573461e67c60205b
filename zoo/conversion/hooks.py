"""What goes into and comes out of the attention layers of a model in one forward pass, for timm and diffusers alike."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zoo.models.convert import backbone_of

Inputs = Tensor | Mapping[str, Any]  # of one forward pass: images [B, 3, H, W], or keywords


@dataclass
class Call:
    """One call of an attention layer: arguments, keywords, and what it returned (of joint attention the image part)."""

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    output: Tensor

    def repeat(self, layer: nn.Module) -> Tensor:
        """What `layer` returns for the same arguments."""
        return first(layer(*self.arguments, **self.keywords))


def first(output: Any) -> Tensor:
    """The tensor of an output: joint attention returns (image, text), models of diffusers (sample,)."""
    return output[0] if isinstance(output, tuple) else output


def forward(model: Any, inputs: Inputs) -> Tensor:
    """The output of a model, logits [B, K] or a noise or velocity [B, C, H, W]."""
    if isinstance(inputs, Tensor):
        return model(inputs)
    return first(model(**{**inputs, "return_dict": False}))


def layers_of(model: Any) -> dict[str, Any]:
    """The self-attention layers of a model by name, converted or not."""
    return backbone_of(model).layers(model)


def converted_layers(model: Any) -> dict[str, Any]:
    """Those of them whose mixer is not softmax. Raises ValueError when there are none."""
    found = {n: m for n, m in layers_of(model).items() if getattr(m, "mixer_name", "softmax") != "softmax"}
    if not found:
        raise ValueError(f"{type(model).__name__} has no converted attention layer: call zoo.convert first")
    return found


@contextmanager
def record_calls(model: Any, names: Any) -> Iterator[dict[str, Call]]:
    """Fills the dict with the calls of the layers `names` of `model` while the block lasts."""
    calls: dict[str, Call] = {}
    layers, handles = layers_of(model), []

    def note(name: str) -> Any:
        def hook(_: nn.Module, arguments: Any, keywords: Any, output: Any) -> None:
            calls[name] = Call(arguments, keywords, first(output))

        return hook

    try:
        for name in names:
            handles.append(layers[name].register_forward_hook(note(name), with_kwargs=True))
        yield calls
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def replace_layers(model: Any, others: Mapping[str, Any]) -> Iterator[None]:
    """While the block lasts, the layers of `model` named in `others` return what those return for the same arguments.

    This is `model` with some of its layers converted, in its own hidden states, without a copy of it.
    """
    layers, handles = layers_of(model), []

    def swap(other: Any) -> Any:
        return lambda _, arguments, keywords, output: other(*arguments, **keywords)

    try:
        for name, other in others.items():
            handles.append(layers[name].register_forward_hook(swap(other), with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def record_mixer_calls(layers: Mapping[str, Any]) -> Iterator[dict[str, Call]]:
    """Fills the dict with the calls of the mixers of `layers`, arguments (q, k, v, context), while the block lasts."""
    found: dict[str, Call] = {}
    handles = []

    def note(name: str) -> Any:
        def hook(_: nn.Module, arguments: Any, output: Any) -> None:
            found[name] = Call(arguments, {}, first(output))

        return hook

    try:
        for name, layer in layers.items():
            handles.append(layer.mixer.register_forward_hook(note(name)))
        yield found
    finally:
        for handle in handles:
            handle.remove()


class TeacherStudent:
    """A softmax model and its conversion, both in evaluation mode, run on the same inputs.

    Raises ValueError when the second has no converted layer, or another set of layers.
    """

    def __init__(self, teacher: Any, student: Any) -> None:
        self.teacher, self.student = teacher.eval(), student.eval()
        self.layers = converted_layers(student)
        own, other = layers_of(student).keys(), layers_of(teacher).keys()
        if own != other:
            where, name = ("teacher has no", min(own - other)) if own - other else ("student has no", min(other - own))
            raise ValueError(f"the {where} layer {name}: the teacher is not the model that was converted")
        self._shape: Any = None

    @torch.no_grad()
    def calls(self, inputs: Inputs) -> tuple[Tensor, dict[str, Call]]:
        """The teacher's output, and the calls of the layers that were converted."""
        self.set_student_grid(inputs)
        with record_calls(self.teacher, self.layers) as calls:
            output = forward(self.teacher, inputs)
        return output, calls

    @torch.no_grad()
    def set_student_grid(self, inputs: Inputs) -> None:
        """Let the student's layers know the token grid of these inputs: its forward pass tells them."""
        if not isinstance(inputs, Tensor | Mapping):
            kind = type(inputs).__name__
            raise ValueError(f"each batch of inputs must be a tensor, or a dict of a model's keywords, got {kind}")
        tensor = inputs if isinstance(inputs, Tensor) else next(v for v in inputs.values() if isinstance(v, Tensor))
        if tensor.shape[1:] != self._shape:
            self._shape = tensor.shape[1:]
            forward(self.student, inputs)
