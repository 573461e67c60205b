"""Implementations of multipole attention by name, and the choice of the fastest."""

from __future__ import annotations

from . import fused
from .call import MultipoleCall
from .fused import why_not
from .reference import definition
from .torch_form import evaluate, linear

FORMS = {"reference": definition, "torch": evaluate, "triton": fused.evaluate}
MANY = 32768  # tokens above which torch by blocks is assumed to be faster than Triton reading all keys (an estimate)

__all__ = ["FORMS", "slower", "why_not"]


def slower(call: MultipoleCall) -> str | None:
    """Return the reason why a Triton form that supports this call is not the fastest one, or None."""
    if call.q.shape[1] >= MANY and linear(call) and fused.reads_all(call):
        return f"slower: {call.q.shape[1]} tokens are faster by blocks, which the torch form has"
    return None
