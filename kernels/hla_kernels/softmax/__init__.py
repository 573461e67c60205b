"""Softmax attention, the quadratic baseline o = softmax(s Q K') V, and its approximations.

Multipole operators by name: `PREPARE` (checks), `FORMS` (implementations)."""

from __future__ import annotations

from typing import Any

from . import multipole
from .adaptive import call as adaptive_call
from .adaptive import fused, reference, torch_form

MultipoleCall = multipole.MultipoleCall | adaptive_call.AdaptiveCall
PREPARE: dict[str, Any] = {"multipole": multipole.prepare, "adaptive_multipole": adaptive_call.prepare}
FORMS: dict[type, dict[str, Any]] = {
    multipole.MultipoleCall: {"reference": multipole.definition, "torch": multipole.evaluate},
    adaptive_call.AdaptiveCall: {
        "reference": reference.definition, "torch": torch_form.evaluate, "triton": fused.evaluate,
    },
}  # fmt: skip


def why_not(call: MultipoleCall) -> str | None:
    """Return the reason why no Triton form supports a checked call, or None."""
    if isinstance(call, multipole.MultipoleCall):
        return "multipole has no Triton form; adaptive_multipole, closer to softmax, has one"
    return fused.why_not(call)
