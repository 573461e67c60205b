"""The implementations of a checked call of adaptive multipole attention, by name, and which of them is the fastest."""

from __future__ import annotations

from .call import AdaptiveCall
from .reference import definition
from .torch_form import evaluate

FORMS = {"reference": definition, "torch": evaluate}


def why_not(call: AdaptiveCall) -> str | None:
    """The reason why there is no Triton form of this call, or None."""
    return "adaptive_multipole has no Triton form yet"


def slower(call: AdaptiveCall) -> str | None:
    """The reason why a Triton form that can run this call is not the fastest one, or None."""
    return None
