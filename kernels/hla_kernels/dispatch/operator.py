"""Custom operators. What torch.library.custom_op puts around each call (it reads the schema again for every argument)
takes longer than the kernels of a small layer; these register the same pieces with the dispatcher and nothing more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

SPACE = "hla_kernels"
LIBRARY = torch.library.Library(SPACE, "FRAGMENT")


class Operator:
    """`hla_kernels::name`, a function of tensors and plain options that changes none of its arguments.

    Calling it runs the operator. `register_fake` and `register_autograd` are those of torch.library.custom_op.
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
        return self.overload(*args, **kwargs)

    def register_fake(self, function: Callable) -> Callable:
        """What the operator returns for tensors without data, as a decorator."""
        return torch.library.register_fake(f"{SPACE}::{self.name}", function, lib=LIBRARY)

    def register_autograd(self, backward: Callable, *, setup_context: Callable) -> None:
        """Its gradient: setup_context(ctx, inputs, output) with all arguments, backward(ctx, *grads)."""
        self._node = _node(self.overload, backward, setup_context)


def custom_op(name: str) -> Callable[[Callable], Operator]:
    """Make a function with annotated arguments the operator `hla_kernels::name`, as a decorator."""
    return lambda function: Operator(name, function)


def _implementation(function: Callable) -> Callable:
    """Not looked into by a compiler that broke the graph around the call. In inference mode it is what the dispatcher
    calls; otherwise it is called by `_recorder`, which is not looked into either."""
    alone = torch._disable_dynamo(function)
    return lambda *args: (alone if torch.is_inference_mode_enabled() else function)(*args)


def _recorder(operator: Operator) -> Callable:
    """The operator as autograd sees it."""
    overload = operator.overload
    defaults = tuple(x.default_value for x in overload._schema.arguments)

    def run(*args: Any) -> Any:
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in args):
            # the dispatcher leaves out trailing arguments that are their defaults
            return operator._node.apply(*args, *defaults[len(args) :])
        with torch._C._AutoDispatchBelowAutograd():
            return overload(*args)

    return run


def _node(overload: Any, backward: Callable, setup_context: Callable) -> Any:
    """The function of autograd whose forward is an operator."""

    def forward(ctx: Any, *args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            output = overload(*args)
        setup_context(ctx, args, output)
        return output

    parts = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(str(overload), (torch.autograd.Function,), parts)


def _no_formula(ctx: Any, *grads: Any) -> Any:
    raise RuntimeError("this operator of hla_kernels has no second derivative: no autograd formula was registered")
