"""A call whose kernels were not compiled yet compiles them side by side: nine tenths of a compilation are done outside
of Python's lock, and older versions of Triton run a C compiler for what launches a kernel."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

Work = Callable[[], tuple[Tensor, ...]]
Later = Callable[..., object]
LOCAL = threading.local()


class NotCompiled(Exception):
    """A launch found no compiled kernel."""


class Nowhere(Executor):
    """Where nothing is compiled."""

    def submit(self, *args: Any, **options: Any) -> Any:
        """Raises NotCompiled."""
        raise NotCompiled


class Pool(ThreadPoolExecutor):
    """Where a kernel and what launches it are compiled."""

    def submit(self, compiled: Callable[[], Any], /) -> Future:  # type: ignore[override]
        """Compile one kernel."""
        return super().submit(_with_launcher, compiled)


def _with_launcher(compiled: Callable[[], Any]) -> Any:
    from triton.runtime import driver

    kernel = compiled()
    driver.active.launcher_cls(kernel.src, kernel.metadata)  # kept on disk; the launch finds it there
    return kernel


def only_compiles() -> bool:
    """Whether launches of this thread compile their kernels and do not run them."""
    return getattr(LOCAL, "only", False)


def compiled_together(work: Work, later: Later | None) -> tuple[Tensor, ...]:
    """work(), a function that returns new tensors and launches by `recording.launch`. Where a kernel is missing it runs
    twice: to see what it launches, and in earnest; with its outputs `later(*outputs)` says what will be launched next,
    whose kernels are compiled too. An error of a compiler is raised by the call that launches the kernel."""
    from triton import AsyncCompileMode
    from triton.runtime._async_compile import active_mode

    if active_mode.get() is not None:  # the caller compiles side by side
        return work()
    try:
        with AsyncCompileMode(Nowhere()):
            return work()
    except NotCompiled:
        pass
    LOCAL.only = True
    try:
        # Triton changes the filters of warnings and puts them back, which threads undo in another order
        with warnings.catch_warnings(), Pool() as pool, AsyncCompileMode(pool, ignore_errors=True):
            outputs = work()
            if later is not None:
                with contextlib.suppress(torch.OutOfMemoryError):  # the backward may never come
                    later(*outputs)
    finally:
        LOCAL.only = False
    return work()
