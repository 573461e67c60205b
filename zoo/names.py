"""One place for the sentence a user reads after a misspelt name."""

import difflib
from collections.abc import Iterable


def unknown_name(kind: str, name: object, allowed: Iterable[str]) -> ValueError:
    """The error for an unknown `kind` called `name`: what is allowed and, when close, the nearest valid name."""
    names = sorted(allowed)
    near = difflib.get_close_matches(str(name), names, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return ValueError(f"unknown {kind} {name!r}; allowed: {', '.join(names)}.{hint}")
