"""Tools in processes that begin with their imports done: forks of a server that imports torch and the zoo once."""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import os
import resource
import runpy
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from unittest import mock

import torch

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ("convert", "evaluate", "extract_latents", "fid", "finetune_diffusion", "sample", "train_classifier")
IMPORTS = ["torch._dynamo", "sklearn.datasets", "matplotlib.pyplot", "peft", *(f"zoo.cli.{tool}" for tool in TOOLS)]
CPU = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def begin_server() -> None:
    """Let Python's server of forks import `IMPORTS` at its start; do nothing if it runs."""
    multiprocessing.set_forkserver_preload(IMPORTS)
    with mock.patch.dict(os.environ, {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **CPU}):
        forkserver.ensure_running()


@functools.cache
def outputs() -> str:
    """The folder of what forks print, removed at the end of the tests."""
    folder = tempfile.mkdtemp(prefix="forks-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


class Fork(ForkServerProcess):
    """A script in a new process without a GPU, with one thread and the methods of `subprocess.Popen` used here.

    limit: largest size of a file that it can write, in bytes.
    """

    def __init__(self, script: str | Path, *words: str, limit: int = 0, **environment: str) -> None:
        super().__init__()
        self.script, self.words, self.limit = str(ROOT / script), words, limit
        self.environment = {**os.environ, **CPU, **environment}
        self.folder = tempfile.mkdtemp(dir=outputs())
        begin_server()
        self.start()

    def run(self) -> None:
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{self.folder}/{name}", os.O_WRONLY | os.O_CREAT), number)
        os.environ.update(self.environment)
        torch.set_num_threads(1)
        multiprocessing.set_start_method(None, force=True)  # the default, for workers of loaders
        if self.limit:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.limit, self.limit))
        sys.argv = [self.script, *self.words]
        sys.path.insert(0, str(Path(self.script).parent))
        runpy.run_path(self.script, run_name="__main__")

    def poll(self) -> int | None:
        return self.exitcode

    @property
    def returncode(self) -> int | None:
        return self.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def communicate(self, timeout: float = 900) -> tuple[str, str]:
        """(standard output, standard error) of the process, after its end."""
        self.join(timeout)
        out, err = (Path(self.folder, name).read_text() for name in ("out", "err"))
        assert self.exitcode is not None, f"the process is not at its end after {timeout} s: {out} {err}"
        return out, err


def run_fork(script: str | Path, *words: str, limit: int = 0) -> tuple[int, str, str]:
    """(exit status, standard output, standard error) of a script."""
    return finish([Fork(script, *words, limit=limit)])


def start_two(script: str | Path, *words: str) -> list[Fork]:
    """A script in two processes of one group, as torchrun starts them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"} for rank in range(2)]
    return [Fork(script, *words, **group, **rank) for rank in ranks]


def finish(forks: Sequence[Fork]) -> tuple[int, str, str]:
    """(exit status, standard output, standard error) of a group; the first that fails ends the others."""
    running, failed = list(forks), 0
    while running:
        for sentinel in wait([fork.sentinel for fork in running]):
            fork = next(fork for fork in running if fork.sentinel == sentinel)
            fork.join()
            running.remove(fork)
            if fork.exitcode and not failed:
                failed = fork.exitcode
                for other in running:
                    other.kill()
    said = [fork.communicate() for fork in forks]
    return failed, "".join(out for out, _ in said), "".join(err for _, err in said)
