"""The Triton forms in Triton's interpreter, on any machine."""

from pathlib import Path

import pytest

from tests.ops.fused.children import PYTEST, check_interpreted

pytest.importorskip("triton")


def test_interpreted():
    check_interpreted(*PYTEST, Path(__file__).with_name("interpreted.py"))
