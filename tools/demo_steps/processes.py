"""Calls of tools by the demo, in this process and in a second one."""

import contextlib
import importlib
import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

Command = tuple[str, list[str]]
# for 16 and 64 tokens: the default tiles would hold all of them
OPTIONS = {"multipole": "density: 0.25, q_tile: 16, k_tile: 4"}


def to_mixer(mixer: str) -> list[str]:
    """Return the arguments that convert a model of the demo to a mixer."""
    options = [f"model.mixer_options={{{OPTIONS[mixer]}}}"] if mixer in OPTIONS else []
    return [f"model.mixer={mixer}", *options]


def run(tool: str, words: list[str]) -> Any:
    """Call the `main` of another tool with command-line arguments and return its result."""
    print(f"\n$ python tools/{tool}.py {' '.join(words)}", flush=True)
    return importlib.import_module(tool).main(words)


@contextlib.contextmanager
def alongside(commands: list[Command], log: Path) -> Iterator[None]:
    """Run `commands` in a second process during the block, with half of the cores each; output goes to `log`.

    Raises ValueError if a command fails.
    """
    before = torch.get_num_threads()
    threads = max(1, (os.cpu_count() or 1) // 2)
    other = multiprocessing.get_context("spawn").Process(target=_logged, args=(commands, log, threads), daemon=True)
    other.start()
    torch.set_num_threads(threads)
    try:
        yield
        other.join()
    finally:
        other.terminate()
        torch.set_num_threads(before)
    if other.exitcode:
        raise ValueError(f"a command of the second process failed: its output is in {log}")


def _logged(commands: list[Command], log: Path, threads: int) -> None:
    torch.set_num_threads(threads)
    with log.open("w", buffering=1) as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        for command in commands:
            run(*command)
