"""Host side of a call, with little overhead before the kernels run.

    autograd    which gradients a call needs
    forms       cache of check results, for calls of the same form
    faults      warnings about known faults of Triton forms
    verify      first-use check of a Triton form on a machine that the GPU tests did not cover
    trial       small seeded input of that check
    operator    custom operators with little overhead
    recording   allocations and launches of a call, recorded once and replayed
    definition  reference implementation of a checked call
"""

from collections.abc import Callable
from typing import TypeVar

F = TypeVar("F", bound=Callable)


def traced_as_constant(fn: F) -> F:
    """Mark a function whose result torch.compile treats as a constant.

    Same as `torch.compiler.assume_constant_result`, without importing the compiler, which takes seconds."""
    fn._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return fn
