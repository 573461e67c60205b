"""Benchmarks, which need a checkout of the project, since the installed package does not contain them."""

import importlib
import sys
from pathlib import Path
from typing import Any

TOOLS = Path(__file__).resolve().parents[2] / "tools"


def main(words: list[str]) -> Any:
    """Run tools/benchmark.py. Returns the content of the result file; raises ValueError without a checkout."""
    if not (TOOLS / "benchmark.py").is_file():
        raise ValueError("the installed package has no benchmarks: run tools/benchmark.py in a clone of the project")
    sys.path.insert(0, str(TOOLS))
    return importlib.import_module("benchmark").main(words)
