"""The order of the tests, Triton's interpreter, and the memory of a GPU between tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch


def pytest_configure() -> None:
    """Before anything is interpreted."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        from tests.ops.fused.children.quicker import interpret_quicker

        interpret_quicker()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Minutes first: a process that begins such a test last is waited for by the others."""
    items.sort(key=lambda item: not item.name.startswith("test_no_spills"))


@pytest.fixture(autouse=True)
def memory_is_given_back(request: pytest.FixtureRequest) -> Iterator[None]:
    """Processes that share a GPU hold what one test took, truths in float64 too, no longer than that test."""
    yield
    if request.node.get_closest_marker("gpu"):
        torch.cuda.empty_cache()
