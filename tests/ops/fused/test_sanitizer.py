"""compute-sanitizer finds no access out of bounds and no race in any Triton kernel."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
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


# processes side by side: most of their time is compiling
SHARES = {"hla": 6, "blockmix": 3, "features": 1}


def begin(tool: str, family: str, part: int) -> subprocess.Popen[str]:
    """A share of a family under a tool."""
    assert SANITIZER is not None
    # each tensor is memory of its own, so that what is beside it belongs to nobody
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    options = ["--tool", tool, "--error-exitcode", "9", "--target-processes", "application-only"]
    command = [SANITIZER, *options, sys.executable, str(PROGRAM), family, str(part), str(SHARES[family])]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment, cwd=PROGRAM.parents[3])


@pytest.mark.parametrize("tool", ("memcheck", "racecheck"))
@pytest.mark.parametrize("family", SHARES)
def test_clean(family, tool):
    """And every kernel ran."""
    ran, known = set(), set()
    with ThreadPoolExecutor() as pool, ExitStack() as stack:
        shares = [stack.enter_context(begin(tool, family, part)) for part in range(SHARES[family])]
        for process in shares:
            stack.callback(process.kill)
        for process, (out, err) in zip(shares, pool.map(lambda p: p.communicate(timeout=550), shares), strict=True):
            assert process.returncode == 0, out[-4000:] + err[-2000:]
            assert "ERROR SUMMARY: 0 errors" in out or "RACECHECK SUMMARY: 0 hazards" in out
            (kernels,) = (json.loads(line) for line in out.splitlines() if line.startswith("{"))
            ran.update(kernels["ran"])
            known.update(kernels["known"])
    assert known <= ran, sorted(known - ran)
