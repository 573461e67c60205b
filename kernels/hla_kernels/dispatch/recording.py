"""Launches of Triton kernels."""

from __future__ import annotations

from typing import Any


def launch(kernel: Any, grid: int, *args: Any, **options: Any) -> None:
    """Run a Triton kernel with `grid` programs."""
    kernel[(grid,)](*args, **options)
