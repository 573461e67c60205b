"""Which attention layers a conversion swaps: block indices, patterns of module names, or a mapping of patterns."""

import operator
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from zoo.errors import unknown_name
from zoo.mixers import MIXERS

Layers = Iterable[int] | str | Mapping[str, str] | None
Keep = Iterable[int] | str | None
Plain = list[int] | str | dict[str, str] | None  # the same, copied and fit for JSON


def plain_layers(wanted: Any, argument: str) -> Any:
    """A copy of `layers` or `keep_softmax` made of lists, dicts, integers, text. Raises ValueError for another type."""
    if wanted is None or isinstance(wanted, str):
        return wanted
    if isinstance(wanted, Mapping) and argument == "layers":
        return dict(wanted)
    if not isinstance(wanted, Iterable) or isinstance(wanted, Mapping):
        also = "a mapping pattern -> mixer" if argument == "layers" else '"every:<n>"'
        raise ValueError(f"{argument} is a list of block indices, a pattern of module names or {also}, got {wanted!r}")
    return [_integer(index) for index in wanted]


def _integer(index: Any) -> Any:
    try:
        return index if isinstance(index, bool) else operator.index(index)
    except TypeError:
        return index  # `_indices` says what is allowed


def choose(
    blocks: Mapping[str, int], mixer: str, layers: Plain, keep_softmax: Plain
) -> tuple[dict[str, str], set[str]]:
    """(layer -> mixer in order, layers kept by `keep_softmax`), for `blocks`: attention layers and their block numbers.

    Raises ValueError for an unknown mixer, an index out of range, and a pattern that matches nothing of its own.
    """
    names = list(blocks)
    if isinstance(layers, str):
        layers = {layers: mixer}
    patterns = layers if isinstance(layers, dict) else {"*": mixer}
    for name in (mixer, *patterns.values()):
        if not isinstance(name, str) or name not in MIXERS:
            raise unknown_name("mixer", name, MIXERS)
    first: dict[str, str] = {}
    for pattern, name in patterns.items():
        matched = _matching(names, pattern, "layers")
        if all(layer in first for layer in matched):
            raise ValueError(f"layers={pattern!r} comes too late: earlier patterns take every layer that it matches")
        first |= {layer: name for layer in matched if layer not in first}
    allowed = set(_indices(blocks, layers, "layers")) if isinstance(layers, list) else set(names)
    kept = set(_kept(blocks, keep_softmax))
    return {n: first[n] for n in names if n in first and n in allowed and n not in kept}, kept


def _kept(blocks: Mapping[str, int], keep: Plain) -> list[str]:
    if not isinstance(keep, str):
        return _indices(blocks, keep or [], "keep_softmax")
    word, _, step = keep.partition(":")
    if word != "every":
        return _matching(list(blocks), keep, "keep_softmax")
    if not step.isdecimal() or int(step) < 2:
        raise ValueError(f'keep_softmax="every:<n>" needs a number n of at least 2, got {keep!r}')
    return [name for name, block in blocks.items() if block % int(step) == 0]


def _matching(names: list[str], pattern: Any, argument: str) -> list[str]:
    matched = [name for name in names if isinstance(pattern, str) and fnmatchcase(name, pattern)]
    if not matched:
        also = ', "every:<n>"' if argument == "keep_softmax" else ""
        raise ValueError(
            f"{argument}={pattern!r} matches none of the attention layers {names[0]} ... {names[-1]}; allowed: block "
            f"indices, a pattern of module names{also}"
        )
    return matched


def _indices(blocks: Mapping[str, int], wanted: Iterable[Any], argument: str) -> list[str]:
    depth = max(blocks.values()) + 1
    for index in wanted:
        if isinstance(index, bool) or not isinstance(index, int) or not -depth <= index < depth:
            raise ValueError(f"{argument} lists block indices from {-depth} to {depth - 1}, got {index!r}")
    positions = {index % depth for index in wanted}
    return [name for name, block in blocks.items() if block in positions]
