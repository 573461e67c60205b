"""Progress on a terminal as a bar, elsewhere as plain lines."""

import sys
import time
from collections.abc import Iterable, Iterator, Sized
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")
SECONDS_BETWEEN_LINES = 30.0


def progress(items: Iterable[T], title: str, total: int | None = None, first: int = 0) -> Iterator[T]:
    """`items`, shown on standard error: a bar on a terminal, else a line every 30 seconds. `first` of `total` are
    done already."""
    if total is None and isinstance(items, Sized):
        total = len(items)
    if sys.stderr.isatty():
        yield from tqdm(items, desc=title, total=total, initial=first, dynamic_ncols=True, leave=False)
        return
    last = time.monotonic()
    for done, item in enumerate(items, start=first + 1):
        yield item
        if time.monotonic() - last > SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            print(f"{title}: {done}" + (f"/{total}" if total else ""), file=sys.stderr, flush=True)
