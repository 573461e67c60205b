"""Multipole operators by name: checks and implementations."""

from __future__ import annotations

from typing import Any

from .adaptive import call as adaptive_call
from .adaptive import fused, reference, torch_form
from .multipole import call as multipole_call
from .multipole import reference as multipole_reference
from .multipole import torch_form as multipole_torch_form

MultipoleCall = multipole_call.MultipoleCall | adaptive_call.AdaptiveCall
PREPARE: dict[str, Any] = {"multipole": multipole_call.prepare, "adaptive_multipole": adaptive_call.prepare}
FORMS: dict[type, dict[str, Any]] = {
    multipole_call.MultipoleCall: {
        "reference": multipole_reference.definition, "torch": multipole_torch_form.evaluate,
    },
    adaptive_call.AdaptiveCall: {
        "reference": reference.definition, "torch": torch_form.evaluate, "triton": fused.evaluate,
    },
}  # fmt: skip


def why_not(call: MultipoleCall) -> str | None:
    """Return the reason why no Triton form supports a checked call, or None."""
    if isinstance(call, multipole_call.MultipoleCall):
        return "multipole has no Triton form; adaptive_multipole, closer to softmax, has one"
    return fused.why_not(call)
