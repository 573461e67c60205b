"""Custom operators with little overhead per call.

torch.library.custom_op parses the schema again for every argument of a call, which takes longer than the kernels of a
small layer. These operators register the same functions with the dispatcher directly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..options import plain_precision

SPACE = "hla_kernels"
LIBRARY = torch.library.Library(SPACE, "FRAGMENT")
TOKENS = {1: "Tensor qkv", 3: "Tensor q, Tensor k, Tensor v"}  # in a schema, by the number of tensors


class Operator:
    """Custom operator `hla_kernels::name` of tensors and plain options, without mutation of its arguments.

    Calling it runs the operator. `register_fake` and `register_autograd` as in torch.library.custom_op. schema: without
    it, the annotations of the function.
    """

    def __init__(self, name: str, function: Callable, schema: str | None = None) -> None:
        schema = schema or torch.library.infer_schema(function, mutates_args=())
        LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        self.overload = getattr(getattr(torch.ops, SPACE), name).default
        self.defaults = tuple(x.default_value for x in self.overload._schema.arguments)
        function = self._completed(function)
        self.name, self.function = name, function
        self._node = _node(self.overload, _no_formula, lambda ctx, inputs, output: None)
        LIBRARY.impl(name, _implementation(function), "CompositeExplicitAutograd")
        LIBRARY.impl(name, torch._disable_dynamo(_recorder(self)), "Autograd")

    def __call__(self, *args: Any) -> Any:
        return self.function(*args) if to_onnx() else self.overload(*args)

    def _completed(self, function: Callable) -> Callable:
        """Return a function of all arguments: the dispatcher omits trailing ones that are equal to their defaults."""
        return lambda *args: function(*args, *self.defaults[len(args) :])

    def register_fake(self, function: Callable) -> Callable:
        """Register the implementation for fake tensors; a decorator."""
        return torch.library.register_fake(f"{SPACE}::{self.name}", self._completed(function), lib=LIBRARY)

    def register_autograd(self, backward: Callable, *, setup_context: Callable) -> None:
        """Register the gradient: setup_context(ctx, inputs, output) with all arguments, and backward(ctx, *grads)."""
        self._node = _node(self.overload, backward, setup_context)


def to_onnx() -> bool:
    """Whether torch.onnx.export is tracing: ONNX has no custom operators, so that torch forms are traced instead."""
    return torch.compiler.is_exporting() and torch.onnx.is_in_onnx_export()


def custom_op(name: str, schema: str | None = None) -> Callable[[Callable], Operator]:
    """Return a decorator that turns a function, with annotated arguments or of a schema, into the operator
    `hla_kernels::name`."""
    return lambda function: Operator(name, function, schema)


def token_operators(
    name: str, count: int, schema: str, forward: Callable, outputs: Callable, backward: Callable,
    last: Callable | None = None, *, collective: bool = False,
) -> tuple[Operator, Operator]:  # fmt: skip
    """Define an operator of `count` tensors of tokens (`TOKENS`; qkv [B, N, 3, H, D] is packed), and its backward.

    schema: the arguments behind the tokens: first a tensor that may have a gradient, then others, perhaps with "bool
    save=False", which the backward does not have. forward(tokens, *arguments) returns the output and what the backward
    needs, outputs the same for fake tensors. backward(grad, saved, tokens, *arguments) returns the gradients of the
    tokens and of the tensor behind them (without elements if none is needed), last(tokens, *arguments) the latter for
    fake tensors; None if it is always needed. collective: the backward exchanges sums with other ranks, so it runs on
    every rank, also on one whose output has no gradient."""
    tokens, results, save = TOKENS[count], ", ".join(["Tensor"] * (count + 1)), "bool save=False"
    at = count + [*schema.split(", "), save].index(save)
    own = custom_op(name, f"({tokens}, {schema}) -> (Tensor, Tensor)")(lambda *x: forward(x[:count], *x[count:]))
    own.register_fake(lambda *x: outputs(x[:count], *x[count:]))
    rest = schema.replace(f"{save}, ", "").replace(f", {save}", "")
    back = custom_op(f"{name}_backward", f"(Tensor grad, Tensor saved, {tokens}, {rest}) -> ({results})")(
        lambda grad, saved, *x: backward(grad, saved, x[:count], *x[count:])
    )

    @back.register_fake
    def _(grad, saved, *x):
        return like(*x[: count + 1]) if last is None else (*like(*x[:count]), last(x[:count], *x[count:]))

    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)  # otherwise autograd would allocate zeros of the size of `saved`
        _save(ctx, inputs, output[1:])

    def gradients(ctx: Any, grad: Tensor | None, _: None) -> tuple:
        given, (saved,) = _saved(ctx)
        if grad is None and collective:
            grad = given[0].new_zeros((*given[0].shape[:3], given[2].shape[3]))
        if grad is None:  # no gradient of the output, hence none of the inputs
            return (None,) * len(given)
        *grads, d_last = back(grad, saved, *given[:at], *given[at + 1 :])
        wanted = ctx.needs_input_grad[count] and d_last.shape == given[count].shape
        return (*grads, d_last if wanted else None, *[None] * (len(given) - count - 1))

    own.register_autograd(gradients, setup_context=setup_context)
    return own, back


def recomputed_op(name: str, function: Callable, outputs: Callable) -> tuple[Operator, Operator]:
    """Define an operator of a differentiable function with annotated arguments, and its backward, which computes the
    function again: inputs alone are saved.

    outputs: the function for fake tensors. The backward takes the gradients of the results, whether the gradient of
    each argument is needed, and the arguments; it returns the gradients that are needed."""
    own = custom_op(name)(function)
    own.register_fake(outputs)

    @custom_op(f"{name}_backward", f"(Tensor[] grads, bool[] needed, {_arguments(function)}) -> Tensor[]")
    def back(grads: list[Tensor], needed: list[bool], *args: Any) -> list[Tensor]:
        places = [i for i, wanted in enumerate(needed) if wanted]

        def run(*some: Tensor) -> Any:
            given = dict(enumerate(args)) | dict(zip(places, some, strict=True))
            return function(*given.values())

        with plain_precision(grads[0]):
            result, pull = vjp(run, *(args[i] for i in places))
            return [x.contiguous() for x in pull(tuple(grads) if isinstance(result, tuple) else grads[0])]

    @back.register_fake
    def _(grads, needed, *args):
        return list(like(*(x for x, wanted in zip(args, needed, strict=True) if wanted)))

    def gradients(ctx: Any, *grads: Tensor) -> tuple:
        found = iter(back(list(grads), list(ctx.needs_input_grad), *_saved(ctx)[0]))
        return tuple(next(found) if wanted else None for wanted in ctx.needs_input_grad)

    own.register_autograd(gradients, setup_context=lambda ctx, inputs, output: _save(ctx, inputs))
    return own, back


def saved_op(
    name: str, function: Callable, outputs: Callable, backward: Callable, count: int, results: int = 1,
    kept: int | None = None,
) -> tuple[Operator, Operator]:  # fmt: skip
    """Define an operator of a function with annotated arguments, and its backward, for which outputs are saved.

    outputs: the function for fake tensors. The first `results` outputs have gradients; those from `kept` on are saved,
    without it all others. backward(grads, saved, *arguments) returns the gradients of the first `count` arguments that
    are no None."""
    own, saves = custom_op(name)(function), results if kept is None else kept
    own.register_fake(outputs)
    schema = f"(Tensor[] grads, Tensor[] saved, {_arguments(function)}) -> Tensor[]"
    back = custom_op(f"{name}_backward", schema)(lambda *x: list(backward(*x)))
    back.register_fake(lambda grads, saved, *x: list(like(*(t for t in x[:count] if t is not None))))

    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        output = (output,) if isinstance(output, Tensor) else output
        ctx.mark_non_differentiable(*output[results:])
        ctx.set_materialize_grads(results > 1)  # one of several may be None
        _save(ctx, inputs, output[saves:])

    def gradients(ctx: Any, *grads: Any) -> tuple:
        given, saved = _saved(ctx)
        if grads[0] is None:
            return (None,) * len(given)
        found = iter(back(list(grads[:results]), saved, *given))
        return tuple(next(found) if i < count and x is not None else None for i, x in enumerate(given))

    own.register_autograd(gradients, setup_context=setup_context)
    return own, back


def _arguments(function: Callable) -> str:
    """Return the arguments of an annotated function in a schema."""
    return torch.library.infer_schema(function, mutates_args=())[1:].rpartition(") -> ")[0]


def _save(ctx: Any, inputs: Sequence[Any], outputs: Sequence[Tensor] = ()) -> None:
    """Save the arguments of an operator, and some of its outputs."""
    ctx.others = [None if isinstance(x, Tensor) else x for x in inputs]
    ctx.save_for_backward(*(x if isinstance(x, Tensor) else None for x in inputs), *outputs)


def _saved(ctx: Any) -> tuple[list[Any], list[Tensor]]:
    """Return the arguments and outputs that `_save` saved."""
    n, tensors = len(ctx.others), ctx.saved_tensors
    return [y if x is None else x for x, y in zip(tensors[:n], ctx.others, strict=True)], list(tensors[n:])


def parts(tokens: Sequence[Tensor]) -> list[Tensor]:
    """Return q, k, v from (q, k, v) or (qkv,), with a contiguous last dimension: the Triton forms require it, and
    torch.compile may have changed the strides that `op` checked."""
    split = tokens[0].unbind(2) if len(tokens) == 1 else tokens
    return [x if x.stride(3) == 1 else x.contiguous() for x in split]


def loadable(x: Tensor) -> Tensor:
    """Return tokens with strides that allow 16-byte loads of channels."""
    return x if x.stride(3) == 1 and all(n % 8 == 0 for n in x.stride()[:3]) else x.contiguous()


def in_triton(impl: str, x: Tensor) -> bool:
    """Whether the kernels run; an empty batch, for which nothing can be launched, uses the torch form."""
    return impl == "triton" and x.shape[0] != 0


def like(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Allocate contiguous tensors of the same shapes and dtypes."""
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors)


def rooms(tokens: Sequence[Tensor], mask: Tensor | None) -> tuple[list[Tensor], tuple[Tensor, Tensor, Tensor]]:
    """Allocate the gradients of (q, k, v) or (qkv,), zeros if there is padding, which the Triton forms do not write;
    return them and dq, dk, dv, which are views of a packed gradient."""
    new = torch.empty_like if mask is None else torch.zeros_like
    grads = [new(x, memory_format=torch.contiguous_format) for x in tokens]
    dq, dk, dv = grads[0].unbind(2) if len(grads) == 1 else grads
    return grads, (dq, dk, dv)


def joined(grads: Sequence[Tensor], tokens: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the gradients of `tokens`, one if they are packed, from the gradients of q, k, v and others."""
    return grads if len(tokens) > 1 else (torch.stack(list(grads), 2),)


def needs_backward(*tensors: Tensor | None) -> bool:
    """Whether autograd will record this call."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def are_fixed(coefficients: Tensor | None) -> bool:
    """Whether there are coefficients whose gradient is not needed. While exporting, grad mode is ignored: the exported
    program may be trained."""
    if coefficients is None or torch.compiler.is_exporting():
        return coefficients is not None and not coefficients.requires_grad
    return not needs_backward(coefficients)


def refuse_forward_mode(op: str, *tensors: Tensor | None) -> None:
    """Raise ValueError for dual tensors: the custom operators have no forward-mode rule, and torch would silently
    return zero tangents."""
    if torch.compiler.is_compiling():
        return
    for x in tensors:
        if x is not None and forward_ad.unpack_dual(x).tangent is not None:
            raise ValueError(
                f"{op} has no forward-mode derivative here (torch.func.jvp, jacfwd, dual tensors); use reverse "
                'mode, or impl="reference" or return_state=True with impl="torch", which are plain torch code.'
            )


def vjp(function: Callable, *inputs: Tensor) -> tuple[Any, Callable[[Any], tuple[Tensor, ...]]]:
    """Return function(*inputs) inside an operator, and its pullback, as torch.func.vjp does.

    It takes half the time of torch.func.vjp, which raises under hooks of saved tensors (save_on_cpu)."""
    with _recorded():
        own = [x.detach().requires_grad_() for x in inputs]
        result = function(*own)
    outputs = result if isinstance(result, tuple) else (result,)

    def pull(grads: Any) -> tuple[Tensor, ...]:
        grads = grads if isinstance(grads, tuple) else (grads,)
        some = [pair for pair in zip(outputs, grads, strict=True) if pair[0].requires_grad]
        if not some:  # the inputs have no effect
            return tuple(map(torch.zeros_like, inputs))
        used, given = zip(*some, strict=True)
        return torch.autograd.grad(used, own, given, allow_unused=True, materialize_grads=True)

    found = tuple(x.detach() for x in outputs)
    return found if isinstance(result, tuple) else found[0], pull


@contextmanager
def _recorded() -> Iterator[None]:
    """Let autograd record inside an operator, for which its dispatch keys are excluded."""
    c, keys = torch._C, torch._C.DispatchKey
    excluded = c._dispatch_tls_local_exclude_set()
    for key in (keys.AutogradFunctionality, keys.AutogradOther, keys.ADInplaceOrView):
        excluded = excluded.remove(key)
    plain: Any = nullcontext()
    if c._autograd._top_saved_tensors_default_hooks(True) is not None:
        plain = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    with c._ForceDispatchKeyGuard(c._dispatch_tls_local_include_set(), excluded), torch.enable_grad(), plain:
        yield


def _implementation(function: Callable) -> Callable:
    """Keep torch.compile from tracing into the function after a graph break. In inference mode the dispatcher calls it
    directly; otherwise `_recorder` calls it, for which tracing is disabled too."""
    alone = torch._disable_dynamo(function)
    return lambda *args: (alone if torch.is_inference_mode_enabled() else function)(*args)


def _recorder(operator: Operator) -> Callable:
    """Return the function registered for the Autograd key."""
    overload = operator.overload

    def run(*args: Any) -> Any:
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in args):
            return operator._node.apply(*args, *operator.defaults[len(args) :])
        with torch._C._AutoDispatchBelowAutograd():
            return overload(*args)

    return run


def _node(overload: Any, backward: Callable, setup_context: Callable) -> Any:
    """Return an autograd.Function whose forward is the operator."""

    def forward(ctx: Any, *args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            output = overload(*args)
        setup_context(ctx, args, output)
        return tuple(output) if isinstance(output, list) else output  # autograd does not record lists

    parts = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(str(overload), (torch.autograd.Function,), parts)


def _no_formula(ctx: Any, *grads: Any) -> Any:
    raise RuntimeError("this operator of hla_kernels has no second derivative: no autograd formula was registered")
