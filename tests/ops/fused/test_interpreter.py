"""The Triton forms in Triton's interpreter, on any machine: each part in a process of its own, of a minute or two."""

from pathlib import Path

import pytest

from tests.ops.fused.children import PYTEST, check_interpreted

pytest.importorskip("triton")
HERE = Path(__file__).parent
KINDS = ("polynomial", "ahla or hla2", "test_matches_float64")  # each of what those before it leave


@pytest.mark.kernels
@pytest.mark.parametrize("kind", (*KINDS, "test"))
def test_operators(kind):
    before = " or ".join(("nothing", *KINDS[: (*KINDS, "test").index(kind)]))
    check_interpreted(*PYTEST, HERE / "interpreted.py", "-k", f"({kind}) and not ({before})")


@pytest.mark.kernels
@pytest.mark.parametrize("name", ("ragged", "around", "bfloat16"))
def test_calls(name):
    check_interpreted(*PYTEST, HERE / "children" / f"{name}.py")
