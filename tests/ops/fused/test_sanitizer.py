"""compute-sanitizer finds no access out of bounds and no race in any Triton kernel."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROGRAM = Path(__file__).with_name("sanitized.py")
SANITIZER = shutil.which("compute-sanitizer")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="the Triton forms need a CUDA device: none here"),
    pytest.mark.skipif(SANITIZER is None, reason="compute-sanitizer (of the CUDA toolkit) is not on the PATH"),
]


@pytest.mark.parametrize("tool", ("memcheck", "racecheck"))
@pytest.mark.parametrize("family", ("hla", "blockmix", "taylor", "multipole"))
def test_clean(family, tool):
    assert SANITIZER is not None
    # each tensor is memory of its own, so that what is beside it belongs to nobody
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    options = ["--tool", tool, "--error-exitcode", "9", "--target-processes", "application-only"]
    command = [SANITIZER, *options, sys.executable, str(PROGRAM), family]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=PROGRAM.parents[3], timeout=550)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "ERROR SUMMARY: 0 errors" in done.stdout or "RACECHECK SUMMARY: 0 hazards" in done.stdout
