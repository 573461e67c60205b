"""One place for the sentence a user reads after a misspelt name."""

import difflib
from collections.abc import Iterable

MANY = 100  # names that a sentence does not list


def unknown_name(kind: str, name: object, allowed: Iterable[str]) -> ValueError:
    """The error for an unknown `kind` called `name`: what is allowed (of more than `MANY` the nearest) and, when close,
    the nearest valid name."""
    names = sorted(allowed)
    near = difflib.get_close_matches(str(name), names, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    count = ""
    if len(names) > MANY:
        count = f"{len(names)} names such as "
        names = difflib.get_close_matches(str(name), names, n=5, cutoff=0.0)
    return ValueError(f"unknown {kind} {name!r}; allowed: {count}{', '.join(names)}.{hint}")
