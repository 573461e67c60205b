"""Forked tool calls: tools run in children of one process that imported everything, and are judged by one rule."""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import os
import resource
import runpy
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / "tools"
TABLES = Path(__file__).with_name("tables")
LONGEST = 700  # characters of an error message
OUTPUT = 1 << 20  # bytes of each stream that a child may write
MEMORY = 6 << 30  # bytes of address space a child may add to those of its parent
ENVIRONMENT = {  # no GPU, no network, no colours
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "MPLBACKEND": "Agg",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TQDM_DISABLE": "1",
}
LAZY = (  # what the tools import when they need it, so that children need not
    *("torch._dynamo", "torch._inductor.config", "torch.utils.data", "matplotlib.pyplot", "sklearn.datasets"),
    *("datasets", "webdataset", "torchvision.transforms", "timm.data", "timm.optim", "diffusers.pipelines.dit"),
    *("diffusers.models.transformers.dit_transformer_2d", "diffusers.models.autoencoders.autoencoder_kl"),
    *("diffusers.schedulers", "transformers.models.t5", "peft", "pyarrow.parquet", "torch.utils.tensorboard"),
)


@dataclass(frozen=True)
class Case:
    """One attack.

    name: unique in its part; the ledger names it.  check: gets an empty folder and returns the complaint, "" if all is
    well.  command: how to run it by hand.  reduce: gets an empty folder and the complaint, returns a smaller command
    that still fails.
    """

    name: str
    check: Callable[[Path], str]
    command: str
    reduce: Callable[[Path, str], str] | None = None


@dataclass(frozen=True)
class Result:
    """What a child left: exit code as a shell counts it (128 + signal), both streams, seconds, whether it was stopped
    for its time limit."""

    code: int
    out: str
    err: str
    seconds: float
    timed_out: bool = False


def prepare() -> None:
    """Import what tools need, once. Nothing here may start threads or run backward passes: children are forked."""
    os.environ.update(ENVIRONMENT)
    sys.path[:0] = [str(place) for place in (TOOLS, ROOT / "kernels", ROOT) if str(place) not in sys.path]
    torch.set_num_threads(1)
    for name in (*sorted(file.stem for file in TOOLS.glob("*.py")), *LAZY):
        with contextlib.suppress(ImportError):  # extras that are not installed
            importlib.import_module(name)


def call(tool: str, words: list[str], **options: Any) -> Result:
    """`python tools/TOOL.py WORDS` in a forked child; options as for `fork`."""

    def run() -> None:
        sys.argv = [str(TOOLS / f"{tool}.py"), *words]
        runpy.run_path(sys.argv[0], run_name="__main__")

    return fork(run, **options)


def succeed(result: Result) -> Result:
    """A result that must be a success. Raises RuntimeError."""
    if result.code:
        raise RuntimeError(f"a command without an attack failed with exit {result.code}: {result.err}")
    return result


def fork(
    action: Callable[[], Any],
    cwd: Path,
    limit: float = 90.0,
    before: Callable[[], Any] = lambda: None,
    signal_at: tuple[int, float] | None = None,
) -> Result:
    """Run `action` in a child whose working directory is `cwd`.

    limit: seconds until it is killed.  before: called in the child first.  signal_at: (signal, seconds) to send.
    """
    pipes = [os.pipe() for _ in range(2)]
    sys.stdout.flush()
    sys.stderr.flush()
    began, timed_out = time.monotonic(), False
    pid = os.fork()
    if pid == 0:
        _child(action, cwd, [write for _, write in pipes], before)
    for read, write in pipes:
        os.close(write)
        fcntl.fcntl(read, fcntl.F_SETPIPE_SZ, OUTPUT)
        os.set_blocking(read, False)
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        passed = time.monotonic() - began
        if signal_at and passed >= signal_at[1]:
            os.kill(pid, signal_at[0])
            signal_at = None
        if passed > limit and not timed_out:
            timed_out = True
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    with contextlib.suppress(ProcessLookupError):  # its loader processes
        os.killpg(pid, signal.SIGKILL)
    out, err = (_content(read) for read, _ in pipes)
    code = os.waitstatus_to_exitcode(ended[1])
    return Result(code if code >= 0 else 128 - code, out, err, time.monotonic() - began, timed_out)


def _content(read: int) -> str:
    try:
        return os.read(read, OUTPUT).decode(errors="replace")
    except BlockingIOError:  # nothing was written, and a process of the group is still ending
        return ""
    finally:
        os.close(read)


def _child(action: Callable[[], Any], cwd: Path, streams: list[int], before: Callable[[], Any]) -> NoReturn:
    """The life of a child: as a Python process of its own would end."""
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for number, stream in enumerate((os.open(os.devnull, os.O_RDONLY), *streams)):
            os.dup2(stream, number)
        sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115  pytest may have replaced it
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        sys.excepthook = sys.__excepthook__
        os.chdir(cwd)
        torch.cuda._is_in_bad_fork = lambda: False  # nothing touched CUDA before the fork
        here = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (here + MEMORY, here + MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        before()
        action()
        code = 0
    except SystemExit as stopped:
        code = stopped.code if isinstance(stopped.code, int) else int(stopped.code is not None)
        if isinstance(stopped.code, str):
            print(stopped.code, file=sys.stderr)
    except BaseException as error:
        traceback.print_exc()
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def judge(result: Result, allowed: tuple[int, ...] = (0, 2), phrase: str = "") -> str:
    """The complaint about how a tool ended, "" if it kept the rule: exit 0, or exit 2 with exactly one sentence.

    allowed: exit codes that may be.  phrase: what the sentence of exit 2 must hold, whatever its case.
    """
    if result.timed_out:
        return f"still running after {result.seconds:.0f} s"
    lines = [line for line in result.err.splitlines() if line.strip()] or [""]
    last = lines[-1][:200]
    if "Traceback (most recent call last)" in result.err:
        return f"traceback, exit {result.code}: {last}"
    if result.code not in (0, 2):
        return f"exit {result.code}: {last}"
    if result.code not in allowed:
        return f"exit {result.code} instead of {allowed[0]}: {last or 'accepted'}"
    if result.code == 0:
        return ""
    if not last.startswith("error: ") or sum(line.startswith("error: ") for line in lines) != 1:
        return f"exit 2 without one sentence at the end: {last!r}"
    if len(lines[-1]) > LONGEST:
        return f"a message of {len(lines[-1])} characters: {last}..."
    return "" if phrase.lower() in lines[-1].lower() else f"the message lacks {phrase!r}: {last}"


def shrink(items: list[Any], complaint: str, place: Path, check: Callable[[list[Any], Path], str]) -> list[Any]:
    """`items` without those that `check` needs not for the same kind of complaint; it gets new folders in `place`."""
    kept = list(items)
    for number, item in enumerate(items):
        where = place / str(number)
        where.mkdir()
        fewer = [one for one in kept if one is not item]
        if check(fewer, where).split(":")[0] == complaint.split(":")[0]:
            kept = fewer
    return kept


def shown(tool: str, words: list[str]) -> str:
    """A command line to paste."""
    return shlex.join(["python", f"tools/{tool}.py", *words])
