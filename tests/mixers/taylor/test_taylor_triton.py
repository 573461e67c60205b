"""Triton form of Taylor attention without a GPU: interpreted, and compiled for sm_90a."""

from pathlib import Path

import pytest

from tests.ops.fused.children import PYTEST, check_compiled, check_interpreted

pytest.importorskip("triton")

HERE = Path(__file__).parent
# bytes of a thread; not of a loop: one more program on a multiprocessor is worth more to `query_grads` than registers
STACK_LIMIT = 104
# normalize, B, H, N, D, R
COMPILED = (
    ("1", "256", "6", "197", "64", "0"), ("0", "32", "16", "1024", "72", "0"), ("1", "1", "16", "4096", "64", "16"),
)  # fmt: skip


@pytest.mark.kernels
def test_interpreted():
    check_interpreted(*PYTEST, HERE / "taylor_interpreted.py")


@pytest.mark.kernels
@pytest.mark.parametrize("case", COMPILED, ids=lambda c: "-".join(c))
def test_no_spills(case, tmp_path):
    check_compiled(STACK_LIMIT, 5, tmp_path, HERE / "taylor_gate.py", case)


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
