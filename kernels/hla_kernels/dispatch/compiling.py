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
        """Compile one kernel; what failed is compiled again by each call that asks for it (Triton 3.8 keeps errors)."""
        future = super().submit(_with_launcher, compiled)
        first = future.result

        def result(timeout: float | None = None) -> Any:
            try:
                return first(timeout)
            except Exception:
                if only_compiles():
                    raise
                return _with_launcher(compiled)

        future.result = result  # type: ignore[method-assign]
        return future


def _with_launcher(compiled: Callable[[], Any]) -> Any:
    from triton.runtime import driver

    kernel = compiled()
    driver.active.launcher_cls(kernel.src, kernel.metadata)  # kept on disk; the launch finds it there
    return kernel


def finished(kernel: Any) -> Any:
    """The kernel itself: where it is compiled after an error, Triton 3.8 returns a promise of it."""
    from triton.runtime._async_compile import FutureKernel

    return kernel.result() if isinstance(kernel, FutureKernel) else kernel


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
