"""Progress of a loop: a bar on a terminal, lines of text elsewhere."""

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
    """Yield `items` and show progress on standard error: a bar on a terminal, else a line every 30 seconds. Both show
    the time left if the total is known.

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
    last = start = time.monotonic()
    for done, item in enumerate(items, start=first + 1):
        yield item
        if time.monotonic() - last > SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            count, left = str(done), ""
            if total:
                seconds = (last - start) / (done - first) * (total - done)
                count, left = f"{done}/{total}", f"{tqdm.format_interval(seconds)} left"
            print(", ".join(filter(None, [f"{title}: {count}", status(), left])), file=sys.stderr, flush=True)
