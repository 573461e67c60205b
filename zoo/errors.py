"""Error messages with the nearest valid name, and exception classes."""

import difflib
from collections.abc import Iterable

MAX_LISTED = 100  # largest number of names listed in a message
MAX_LISTED_CHARS = 400  # largest total length of the names listed
MAX_QUOTED = 200  # largest number of characters quoted from a value


def shortened(value: object) -> object:
    """Return `value`, or the beginning of a long text or representation, for use in a message."""
    if isinstance(value, str):
        return value if len(value) <= MAX_QUOTED else value[:MAX_QUOTED] + "..."
    text = repr(value)
    return value if len(text) <= MAX_QUOTED else Unquoted(text[:MAX_QUOTED] + "...")


class Unquoted(str):
    """String whose representation has no quotation marks."""

    def __repr__(self) -> str:
        return str(self)


def nearest(name: str, names: Iterable[str], cutoff: float = 0.6) -> list[str]:
    """Return the name to suggest for an unknown `name`, as a list of at most one: the shortest of those that begin with
    it, in any case of letters, else the nearest of all."""
    names = list(names)
    begun = [n for n in names if name and n.lower().startswith(name.lower())]
    return sorted(begun, key=len)[:1] or difflib.get_close_matches(name, names, 1, cutoff)


def unknown_name(kind: str, name: object, allowed: Iterable[str], meant: Iterable[str] | None = None) -> ValueError:
    """Return the error for an unknown `name`, with the allowed names and a suggestion.

    kind: what `name` is a name of. meant: names to suggest; None: the nearest allowed name, if it is close.
    Of more than `MAX_LISTED` names, only the nearest are listed.
    """
    names, name = sorted(allowed), shortened(name)
    near = nearest(str(name), names) if meant is None else list(meant)
    hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
    count = ""
    if len(names) > MAX_LISTED or sum(map(len, names)) > MAX_LISTED_CHARS:
        count = f"{len(names)} names such as "
        names = difflib.get_close_matches(str(name), names, n=5, cutoff=0.0)
    return ValueError(f"unknown {kind} {name!r}; allowed: {count}{', '.join(names)}.{hint}")


class DamagedCheckpoint(ValueError):
    """A file of a checkpoint is missing, damaged, or from another step, run or model."""


class TrainingFailed(ValueError):
    """Training failed: losses, gradients or weights are not finite."""
