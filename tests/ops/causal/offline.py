"""Compile a launch with tuples of tensors for sm_90a, without a GPU."""

from __future__ import annotations

import json

import torch
from triton.compiler import ASTSource

from tests.ops.fused.offline.gate import Recorder
from tests.ops.fused.offline.judge import OPTIONS, constant, judged, key, type_of
from tests.ops.fused.offline.verdicts import kept


def judge_recorded() -> None:
    """Compile what was recorded and print one JSON line per kernel. Asserts that no product has operand A in
    registers."""
    done = set()
    for fn, args, kwargs in Recorder.calls:
        which, found = compiled_call(fn, args, kwargs, done)
        if found is not None:
            assert found["from_registers"] == 0, found
            print(json.dumps(found), flush=True)
        done.add(which)


def compiled_call(fn, args, kwargs, done) -> tuple[str, dict | None]:
    """The key of a launch, and registers, stack bytes, shared memory and products with operand A in registers, None if
    the key is in `done`."""
    which = key(fn, args, kwargs)
    return which, None if which in done else kept(fn, f"tuples of tensors {which}", lambda: _compile(fn, args, kwargs))


def _compile(fn, args, kwargs) -> dict:
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
    return judged(fn, ASTSource(fn, signature, constants, attributes), options)
