"""Triton forms without a GPU, each run in a process of its own: interpreted, because Triton reads the switch once, or
compiled for sm_90a, because interpreted functions cannot be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

SHARED_LIMIT = 232448  # bytes a block may use on an H100 / H200
ROOT = Path(__file__).parents[4]
PYTEST = ("-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider")
OLD_INTERPRETER = "only 0-dimensional arrays can be converted to Python scalars"


def run(*command: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """python COMMAND with the packages of this process."""
    places = os.pathsep.join(filter(None, sys.path))
    words = [sys.executable, *map(str, command)]
    env = {**os.environ, "PYTHONPATH": places, **environment}
    return subprocess.run(words, capture_output=True, text=True, env=env, cwd=ROOT)


def check_interpreted(*command: object) -> None:
    """python COMMAND ends well under TRITON_INTERPRET=1, on the CPU."""
    import triton

    done = run(*command, TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
    if done.returncode and OLD_INTERPRETER in done.stdout + done.stderr:
        versions = f"Triton {triton.__version__} with NumPy {np.__version__}"
        pytest.skip(f"the interpreter of {versions} cannot run loops; NumPy below 2.4 or a newer Triton can")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def check_compiled(stack: int, at_least: int, folder: Path, gate: Path, *calls: Sequence[object]) -> None:
    """`gate CALL + CALL` compiles `at_least` kernels of each, none of which spills more than `stack` bytes."""
    words = [word for call in calls for word in ("+", *call)][1:]
    done = run(gate, *words, TRITON_CACHE_DIR=str(folder), TRITON_INTERPRET="0")
    assert done.returncode == 0, done.stderr[-2000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    found = Counter(kernel.get("call", 0) for kernel in kernels)
    assert sorted(found) == list(range(len(calls))) and min(found.values()) >= at_least
    assert [k for k in kernels if k["stack"] > stack or k["shared"] > SHARED_LIMIT] == []
