"""The order of the tests, Triton's interpreter, the memory of a GPU between tests, and image folders."""

from __future__ import annotations

import gc
import multiprocessing.context
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image

from tests.curves import drawn_once
from tests.digits import decoded_once

os.environ.setdefault("HF_HOME", str(Path(tempfile.gettempdir()) / "hla-zoo-tests"))  # not the user's cache
gc.set_threshold(20_000, 50, 100)  # imports and tracers keep what they make: collecting is a tenth of their time


LONG = (  # parts of names of tests; whole files where tests share what takes long
    "::test_no_spills", "::test_operators", "::test_demo_with", "::test_sigkill", "train/test_sharding.py",
    "mixers/test_new_mixer.py", "benchmarks/test_scaling.py", "::test_a_run_on_a_data_set_of_the_hub",
)  # fmt: skip
FORKED = (  # the rest of what forks from the server of `tests.forks`, in the second half of the tests
    "ops/ranks/", "train/test_interrupts.py", "::test_two_processes", "::test_a_rate_far_too_high",
    "::test_the_tool_says_one_sentence",
)  # fmt: skip


def pytest_configure() -> None:
    """Before anything is interpreted."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        from tests.ops.fused.children.quicker import interpret_quicker

        interpret_quicker()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of a minute first: a process that begins one last is waited for by the others. Then those that fork: of
    two processes that share the tests by halves, one needs a server, whose imports take seconds."""

    def order(item: pytest.Item) -> int:
        return next((i for i, parts in enumerate((LONG, FORKED)) if any(part in item.nodeid for part in parts)), 2)

    items.sort(key=order)


@pytest.fixture(autouse=True)
def memory_is_given_back(request: pytest.FixtureRequest) -> Iterator[None]:
    """Processes that share a GPU hold what one test took, truths in float64 too, no longer than that test."""
    yield
    if request.node.get_closest_marker("gpu"):
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def own_precision() -> Iterator[None]:
    """accelerate keeps the precision of the first run of a process; each test may choose its own."""
    yield
    if "accelerate.state" in sys.modules:
        sys.modules["accelerate.state"].AcceleratorState._reset_state()


@pytest.fixture(scope="session", autouse=True)
def digits_and_curves_are_made_once() -> Iterator[None]:
    """In this process; a run in another one makes its own."""
    with decoded_once(), drawn_once():
        yield


@pytest.fixture(scope="module")
def warm_processes() -> Iterator[None]:
    """Processes that a tool spawns begin with their imports done, as forks of the server of `tests.forks`."""
    from tests.forks import begin_server

    begin_server()
    contexts = multiprocessing.context._concrete_contexts
    with mock.patch.dict(contexts, spawn=contexts["forkserver"]):
        yield


@pytest.fixture(scope="session")
def make_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function that writes an image folder: `make_folder({"cat": 3, "dog": 2})`, grey levels telling the images
    apart."""

    def make(counts: dict[str, int], size: int = 12) -> Path:
        root = tmp_path_factory.mktemp("images")
        level = 0
        for name, count in counts.items():
            (root / name).mkdir()
            for i in range(count):
                level += 1
                picture = np.random.default_rng(level).integers(0, 256, (size, size, 3), dtype=np.uint8)
                Image.fromarray(picture).save(root / name / f"{i:03d}.png")
        return root

    return make
