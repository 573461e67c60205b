"""Compile a launch with tuples of tensors for sm_90a, without a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.ops.fused.offline.judge import OPTIONS, constant, constant_operands, key, type_of
from tests.ops.fused.offline.pipeline import overwritten
from tests.ops.fused.offline.sass import TOOLS, disassemble, faults
from tests.ops.fused.offline.verdicts import kept


def compiled_call(fn, args, kwargs, done) -> tuple[str, dict | None]:
    """The key of a launch, and registers, stack bytes, shared memory and products with operand A in registers, None if
    the key is in `done`."""
    which = key(fn, args, kwargs)
    return which, None if which in done else kept(fn, f"tuples of tensors {which}", lambda: _compiled(fn, args, kwargs))


def _compiled(fn, args, kwargs) -> dict:
    kwargs = dict(kwargs)
    options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
    given = dict(zip(fn.arg_names, args, strict=False))
    signature, constants, attributes = {}, {}, {}
    for i, name in enumerate(fn.arg_names):
        if name in kwargs or given[name] is None:
            signature[name], constants[(i,)] = "constexpr", kwargs.get(name)
            continue
        x = given[name]
        signature[name] = type_of(x)
        for place, y in [((i, j), y) for j, y in enumerate(x)] if isinstance(x, tuple) else [((i,), x)]:
            if isinstance(x, tuple) and constant(y):
                constants[place] = y
            elif isinstance(y, torch.Tensor) or (isinstance(x, tuple) and y % 16 == 0):
                attributes[place] = [["tt.divisibility", 16]]
    source = ASTSource(fn, signature, constants, attributes)
    found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(found.asm["cubin"])
        file.flush()
        words = [os.path.join(TOOLS, "cuobjdump"), "-res-usage", file.name]
        usage = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
        code = disassemble(file.name)
    ptx, ttgir = found.asm["ptx"], found.asm["ttgir"]
    wrong = constant_operands(ttgir, ptx) + overwritten(ttgir) + faults(code)
    assert not wrong, f"{fn.__name__}: {wrong}"
    sizes = {"registers": registers, "stack": stack, "shared": found.metadata.shared}
    in_registers = len(re.findall(r"wgmma\.mma_async[^;]*\}, *\{", ptx))
    return {"kernel": fn.__name__, **sizes, "from_registers": in_registers}
