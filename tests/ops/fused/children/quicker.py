"""Triton's interpreter in about half the time, and with products in TF32."""

from __future__ import annotations

import numpy as np
from triton.runtime import interpreter


def interpret_quicker() -> None:
    """It patches the language for a launch, and again for every call of a device function: in this process, that for
    the first function of each module alone."""
    original, modules = interpreter._patch_lang, set[int]()

    def patch(fn):
        first, module = not modules, id(fn.__globals__)
        if module in modules:
            return None
        modules.add(module)
        scope = original(fn)
        if first:  # of the launch itself, which restores it at its end
            restore = scope.restore
            scope.restore = lambda: (modules.clear(), restore())
        return scope

    interpreter._patch_lang = patch


def cut_operands(patch) -> None:
    """Let products in TF32 read the leading 19 bits of float32 in the interpreter, as tensor cores do."""
    dot = interpreter.InterpreterBuilder.create_dot

    def cut(x, precision):
        if precision.name != "TF32" or x.data.dtype != np.float32:
            return x
        bits = np.ascontiguousarray(x.data).view(np.uint32) & np.uint32(0xFFFFE000)
        return interpreter.TensorHandle(bits.view(np.float32), x.dtype)

    def product(self, a, b, acc, precision, *rest):
        return dot(self, cut(a, precision), cut(b, precision), acc, precision, *rest)

    patch.setattr(interpreter.InterpreterBuilder, "create_dot", product)
