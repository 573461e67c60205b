"""A GPU that no test ran on."""

import contextlib

import pytest
import torch

from hla_kernels import op
from hla_kernels.dispatch import forms, gate, trial, verify

MACHINE = verify.Machine("a GPU", (8, 9), "3.8.0", "12.9")


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A GPU that no test ran on, an empty cache; calls on it: those whose kernels run."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(verify.SWITCH, raising=False)
    monkeypatch.setattr(verify, "WARNED", set())
    monkeypatch.setattr(verify, "VERDICTS", {})
    monkeypatch.setattr(verify, "machine", lambda index: MACHINE)
    monkeypatch.setattr(verify, "capability", lambda index: MACHINE.capability)
    monkeypatch.setattr(forms, "KNOWN", {})
    for module in (op, gate):
        monkeypatch.setattr(module, "is_shipped", lambda *_: False)
    monkeypatch.setattr(op, "why_not_triton", lambda call: None)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    calls = []

    def of(*runs):
        monkeypatch.setattr(trial, "runs", lambda form: (calls.append(form), iter(runs))[1])
        return calls

    return of
