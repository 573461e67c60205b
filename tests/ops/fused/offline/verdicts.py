"""Results of offline compilations, kept in `verdicts.jsonl`: a kernel whose source, arguments, options and compiler did
not change is not compiled again.

The file is only a cache. Without it (or with a line removed) the kernel is compiled and checked, and its line is added;
delete the file and run `make test-kernels` to write it anew. Lines of code that is gone are removed by

    python -m tests.ops.fused.offline.verdicts
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import inspect
import json
import pkgutil
import subprocess
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import triton
from triton.backends.nvidia.compiler import get_ptxas

FILE = Path(__file__).with_name("verdicts.jsonl")
CHECKS = ("judge.py", "pipeline.py", "sass.py")  # what judges a compiled kernel


@functools.cache
def known() -> dict[str, dict]:
    """{key: result} of the file."""
    lines = FILE.read_text().splitlines() if FILE.exists() else []
    return {line["key"]: line["result"] for line in map(json.loads, lines)}


@functools.cache
def compiler() -> str:
    """The compiler and the checks: versions of Triton and ptxas, and a digest of the files of the checks."""
    ptxas = subprocess.run([get_ptxas(90).path, "--version"], capture_output=True, text=True, check=True).stdout
    checks = b"".join(Path(__file__).with_name(name).read_bytes() for name in CHECKS)
    return f"{triton.__version__} {ptxas} {hashlib.sha256(checks).hexdigest()}"


def kept(kernel: Any, launch: str, make: Callable[[], dict]) -> dict:
    """The result for a launch of a kernel: from the file, or of make(), which is then added to the file.

    launch: types, constants and options.
    """
    key = hashlib.sha256(f"{compiler()}\n{source(kernel)}\n{launch}".encode()).hexdigest()[:32]
    if key not in known():
        known()[key] = make()
        line = {"key": key, "source": source(kernel)[:16], "result": known()[key]}
        with FILE.open("a") as file:  # one short write: lines of several processes do not mix
            file.write(json.dumps(line) + "\n")
    return known()[key]


def prune() -> tuple[int, int]:
    """Remove the lines whose source is not that of a kernel of the package; returns how many are kept and removed."""
    current = {source(kernel)[:16] for kernel in kernels()}
    lines = FILE.read_text().splitlines(keepends=True)
    kept_lines = [line for line in lines if json.loads(line).get("source") in current]
    FILE.write_text("".join(kept_lines))
    return len(kept_lines), len(lines) - len(kept_lines)


def kernels() -> list[Any]:
    """Every Triton kernel of the package."""
    import hla_kernels

    modules = [importlib.import_module(x.name) for x in pkgutil.walk_packages(hla_kernels.__path__, "hla_kernels.")]
    return [f for module in modules for f in vars(module).values() if isinstance(f, triton.JITFunction)]


@functools.cache
def source(kernel: Any) -> str:
    """Digest of the code of a kernel, of all functions that it calls and of the globals that they read. Unlike Triton's
    own `cache_key` it does not depend on comments, docstrings and line numbers."""
    parts: dict[str, str] = {}
    _collect(kernel.fn, parts)
    return hashlib.sha256(json.dumps(sorted(parts.items())).encode()).hexdigest()


def _collect(fn: FunctionType, parts: dict[str, str]) -> None:
    """Add the code of fn and of what it uses to parts, {name: code or value}."""
    name = f"{fn.__module__}.{fn.__qualname__}"
    if name in parts:
        return
    tree = ast.parse(textwrap.dedent(inspect.getsource(fn)))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    parts[name] = ast.dump(tree)
    for path, value in _globals(tree, fn.__globals__):
        inner = getattr(value, "fn", value)
        if not isinstance(inner, FunctionType):
            parts[f"{name}: {path}"] = repr(value)
        elif not inner.__module__.startswith("triton."):
            _collect(inner, parts)


def _globals(tree: ast.AST, names: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The globals that code reads, except modules and their unread members: (name as written, value)."""
    for node in ast.walk(tree):
        path = ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""
        first, *rest = path.split(".")
        if first not in names or not all(part.isidentifier() for part in rest):
            continue
        value = names[first]
        for part in rest:
            value = getattr(value, part, None)
        if value is not None and not isinstance(value, ModuleType) and first != "tl":
            yield path, value


if __name__ == "__main__":
    print("kept {}, removed {} lines".format(*prune()))
