"""The embedded digits, read and decoded once per process of tests: short runs would spend a third of their time so."""

import functools
import sys
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock


@contextmanager
def decoded_once() -> Iterator[None]:
    """Context in which scikit-learn keeps the digits and `zoo.data.cached`, if it was imported before, what it decodes
    of whole sets of them."""
    if "zoo.data.cached" not in sys.modules:
        yield
        return
    from sklearn import datasets

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

    read = functools.cache(datasets.load_digits)  # which everyone copies from
    with mock.patch.object(cached, "decoded", once), mock.patch.object(datasets, "load_digits", read):
        yield
