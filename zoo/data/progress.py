"""Progress report: a bar on a terminal, lines of text elsewhere."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")
SECONDS_BETWEEN_LINES = 30.0


def progress(
    items: Iterable[T], title: str, total: int | None = None, first: int = 0, status: Callable[[], str] = str
) -> Iterator[T]:
    """Yield `items` and show progress on standard error: a bar on a terminal, else a line every 30 seconds.

    first: number of items done earlier, which are counted too.  status: returns text to show, such as the loss.
    """
    if total is None and isinstance(items, Sized):
        total = len(items)
    if sys.stderr.isatty():
        with tqdm(items, desc=title, total=total, initial=first, dynamic_ncols=True, leave=False) as bar:
            for item in bar:
                yield item
                bar.set_postfix_str(status(), refresh=False)
        return
    last = time.monotonic()
    for done, item in enumerate(items, start=first + 1):
        yield item
        if time.monotonic() - last > SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            count = f"{done}/{total}" if total else str(done)
            print(", ".join(filter(None, [f"{title}: {count}", status()])), file=sys.stderr, flush=True)
