"""Multipole operators by name: checks and implementations."""

from __future__ import annotations

from typing import Any

from .adaptive import call as adaptive_call
from .adaptive import forms as adaptive_forms
from .multipole import call as multipole_call
from .multipole import forms as multipole_forms

MultipoleCall = multipole_call.MultipoleCall | adaptive_call.AdaptiveCall
PREPARE: dict[str, Any] = {"multipole": multipole_call.prepare, "adaptive_multipole": adaptive_call.prepare}


def forms_of(call: MultipoleCall) -> Any:
    """Return the module `forms` for a checked call."""
    return multipole_forms if isinstance(call, multipole_call.MultipoleCall) else adaptive_forms
