"""What a call costs the host before its kernels run.

    autograd    which gradients a call may be asked for
    forms       what the checks of a call found, for calls of the same form
    faults      warnings where the Triton form of a call has a known fault
    operator    custom operators with nothing between autograd and the implementation
    recording   the allocations and launches of a kind of call, noted by its second run and repeated by the others
    definition  the slow way: the definition of a checked call
"""

from collections.abc import Callable
from typing import TypeVar

F = TypeVar("F", bound=Callable)


def traced_as_constant(fn: F) -> F:
    """Mark a function that torch.compile calls while it traces, and whose result is a constant of the compiled code.

    It does what `torch.compiler.assume_constant_result` does without importing the compiler, which takes seconds."""
    fn._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return fn
