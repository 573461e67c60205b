"""The Triton form of Taylor attention without a GPU: interpreted, in a process of its own, and compiled for sm_90a."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

HERE = Path(__file__).parent
SHARED_LIMIT = 232448  # bytes a block may use on an H100 / H200
# bytes of a thread; not of a loop: one more program on a multiprocessor is worth more to `query_grads` than registers
STACK_LIMIT = 104
# normalize, B, H, N, D, R
COMPILED = (
    ("1", "256", "6", "197", "64", "0"), ("0", "32", "16", "1024", "72", "0"), ("1", "1", "16", "4096", "64", "16"),
)  # fmt: skip


def run(command, **environment):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment}
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=HERE.parents[2], timeout=600)


def test_interpreted():
    """`taylor_interpreted.py` under TRITON_INTERPRET=1, on the CPU."""
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider"]
    done = run([*command, str(HERE / "taylor_interpreted.py")], TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.parametrize("case", COMPILED, ids=lambda c: "-".join(c))
def test_no_spills(case, tmp_path):
    command = [sys.executable, str(HERE / "taylor_gate.py"), *case]
    done = run(command, TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")
    assert done.returncode == 0, done.stderr[-2000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(kernels) == 5
    assert [k for k in kernels if k["stack"] > STACK_LIMIT or k["shared"] > SHARED_LIMIT] == []


def test_few_kernels_for_every_number_of_tokens():
    """Three sets of constants: few or many tokens, tiles that divide them or not. Other numbers are not specialised
    on, they would be compiled anew with each value."""
    from hla_kernels.softmax.taylor.fused.tokens import NO_SPECIALIZE
    from tests.mixers.taylor.taylor_gate import record

    found = set()
    for n in (1, 16, 197, 256, 333, 512, 513, 1024, 1025, 4096):
        calls = record(True, 2, 4, n, 64)
        for fn, args, _ in calls:
            numbers = [name for name, x in zip(fn.arg_names, args, strict=False) if isinstance(x, int | float | tuple)]
            assert set(numbers) <= set(NO_SPECIALIZE), fn.__name__
        found.add(str([kwargs for *_, kwargs in calls]))
    assert len(found) == 3
