"""Custom operators with little overhead per call.

torch.library.custom_op parses the schema again for every argument of a call, which takes longer than the kernels of a
small layer. These operators register the same functions with the dispatcher directly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

SPACE = "hla_kernels"
LIBRARY = torch.library.Library(SPACE, "FRAGMENT")


class Operator:
    """Custom operator `hla_kernels::name` of tensors and plain options, without mutation of its arguments.

    Calling it runs the operator. `register_fake` and `register_autograd` as in torch.library.custom_op.
    """

    def __init__(self, name: str, function: Callable) -> None:
        schema = torch.library.infer_schema(function, mutates_args=())
        LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        self.name, self.function = name, function
        self.overload = getattr(getattr(torch.ops, SPACE), name).default
        self._node = _node(self.overload, _no_formula, lambda ctx, inputs, output: None)
        LIBRARY.impl(name, _implementation(function), "CompositeExplicitAutograd")
        LIBRARY.impl(name, torch._disable_dynamo(_recorder(self)), "Autograd")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs) if to_onnx() else self.overload(*args, **kwargs)

    def register_fake(self, function: Callable) -> Callable:
        """Register the implementation for fake tensors; a decorator."""
        return torch.library.register_fake(f"{SPACE}::{self.name}", function, lib=LIBRARY)

    def register_autograd(self, backward: Callable, *, setup_context: Callable) -> None:
        """Register the gradient: setup_context(ctx, inputs, output) with all arguments, and backward(ctx, *grads)."""
        self._node = _node(self.overload, backward, setup_context)


def to_onnx() -> bool:
    """Whether torch.onnx.export is tracing: ONNX has no custom operators, so that torch forms are traced instead."""
    return torch.compiler.is_exporting() and torch.onnx.is_in_onnx_export()


def custom_op(name: str) -> Callable[[Callable], Operator]:
    """Return a decorator that turns a function with annotated arguments into the operator `hla_kernels::name`."""
    return lambda function: Operator(name, function)


def _implementation(function: Callable) -> Callable:
    """Keep torch.compile from tracing into the function after a graph break. In inference mode the dispatcher calls it
    directly; otherwise `_recorder` calls it, for which tracing is disabled too."""
    alone = torch._disable_dynamo(function)
    return lambda *args: (alone if torch.is_inference_mode_enabled() else function)(*args)


def _recorder(operator: Operator) -> Callable:
    """Return the function registered for the Autograd key."""
    overload = operator.overload
    defaults = tuple(x.default_value for x in overload._schema.arguments)

    def run(*args: Any) -> Any:
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in args):
            # the dispatcher omits trailing arguments equal to their defaults
            return operator._node.apply(*args, *defaults[len(args) :])
        with torch._C._AutoDispatchBelowAutograd():
            return overload(*args)

    return run


def _node(overload: Any, backward: Callable, setup_context: Callable) -> Any:
    """Return an autograd.Function whose forward is the operator."""

    def forward(ctx: Any, *args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            output = overload(*args)
        setup_context(ctx, args, output)
        return output

    parts = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(str(overload), (torch.autograd.Function,), parts)


def _no_formula(ctx: Any, *grads: Any) -> Any:
    raise RuntimeError("this operator of hla_kernels has no second derivative: no autograd formula was registered")
