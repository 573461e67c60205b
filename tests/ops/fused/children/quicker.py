"""Triton's interpreter in about half the time."""

from __future__ import annotations

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
