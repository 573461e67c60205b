"""The order of the tests."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Minutes first: a process that begins such a test last is waited for by the others."""
    items.sort(key=lambda item: not item.name.startswith("test_no_spills"))
