"""Host side of a call, with little overhead before the kernels run.

    forms       cache of check results, for calls of the same form
    verify      first-use check of a Triton form on a machine that the GPU tests did not cover, warnings of faults
    trial       small seeded input of that check
    operator    custom operators with little overhead, and which gradients a call needs
    recording   allocations and launches of a call, recorded once and replayed
"""

from collections.abc import Callable
from typing import TypeVar

F = TypeVar("F", bound=Callable)


def traced_as_constant(fn: F) -> F:
    """Mark a function whose result torch.compile treats as a constant.

    Same as `torch.compiler.assume_constant_result`, without importing the compiler, which takes seconds."""
    fn._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return fn
