"""The embedded digits, decoded once per process of tests: runs of a second would spend a third of it on that."""

import sys
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock


@contextmanager
def decoded_once() -> Iterator[None]:
    """Context in which `zoo.data.cached`, if it was imported before, keeps what it decodes of whole sets of digits."""
    if "zoo.data.cached" not in sys.modules:
        yield
        return
    from zoo.data import cached
    from zoo.data.sources import Digits

    decoded, kept = cached.decoded, {}

    def once(source: Any, spec: Hashable, workers: int) -> Any:
        if type(source) is not Digits:
            return decoded(source, spec, workers)
        key = source.indices.tobytes(), spec, workers, Digits.read  # which tests may replace
        if key not in kept:
            kept[key] = decoded(source, spec, workers)
        return kept[key]

    with mock.patch.object(cached, "decoded", once):
        yield
