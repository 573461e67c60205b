"""The Triton forms in Triton's interpreter, on any machine; their own process, because Triton reads the switch once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

CASES = Path(__file__).with_name("interpreted.py")


def test_interpreted():
    """`interpreted.py` under TRITON_INTERPRET=1, on the CPU."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", str(CASES)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=CASES.parents[3])
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
