"""Implementations of adaptive multipole attention by name, and the choice of the fastest."""

from __future__ import annotations

from . import fused
from .call import AdaptiveCall
from .fused import why_not
from .reference import definition
from .torch_form import evaluate

FORMS = {"reference": definition, "torch": evaluate, "triton": fused.evaluate}

__all__ = ["FORMS", "slower", "why_not"]


def slower(call: AdaptiveCall) -> str | None:
    """Return the reason why a Triton form that supports this call is not the fastest one, or None."""
    return None
