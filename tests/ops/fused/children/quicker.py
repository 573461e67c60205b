"""Triton's interpreter in about a third of the time."""

from __future__ import annotations

import dataclasses

from triton.runtime import interpreter


def interpret_quicker() -> None:
    """For this process: no overflow of the small numbers of tests is looked for, and the language is patched once."""
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    patch_once_a_launch()


def patch_once_a_launch() -> None:
    """The interpreter patches the language for a launch, and again for every call of a device function: that for the
    first function of each module alone."""
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
