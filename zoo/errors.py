"""Errors: sentences that name the nearest valid name, and what ends a training run."""

import difflib
from collections.abc import Iterable

MANY = 100  # names that a sentence does not list
LONG = 400  # characters of names that it does not list either
QUOTED = 200  # characters of a value that it quotes


def shortened(value: object) -> object:
    """`value`, or the beginning of what it looks like if that is long, for a sentence."""
    if isinstance(value, str):
        return value if len(value) <= QUOTED else value[:QUOTED] + "..."
    text = repr(value)
    return value if len(text) <= QUOTED else Shown(text[:QUOTED] + "...")


class Shown(str):
    """A text that is shown without quotation marks."""

    def __repr__(self) -> str:
        return str(self)


def unknown_name(kind: str, name: object, allowed: Iterable[str], meant: Iterable[str] | None = None) -> ValueError:
    """The error for an unknown `kind` called `name`: what is allowed (of more than `MANY` the nearest) and, when close,
    the nearest valid name, or those that are `meant`."""
    names, name = sorted(allowed), shortened(name)
    near = difflib.get_close_matches(str(name), names, n=1) if meant is None else list(meant)
    hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
    count = ""
    if len(names) > MANY or sum(map(len, names)) > LONG:
        count = f"{len(names)} names such as "
        names = difflib.get_close_matches(str(name), names, n=5, cutoff=0.0)
    return ValueError(f"unknown {kind} {name!r}; allowed: {count}{', '.join(names)}.{hint}")


class DamagedCheckpoint(ValueError):
    """A checkpoint with a file that is missing, damaged, or not of the same step, run or model as the others."""


class TrainingFailed(ValueError):
    """A run that cannot go on or must not count as done: losses, gradients or weights that are not finite."""
