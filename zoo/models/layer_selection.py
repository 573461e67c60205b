"""Selection of the attention layers to convert: block indices, patterns of module names, or a mapping."""

import operator
from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from zoo.errors import unknown_name
from zoo.mixers import MIXERS

Layers = Iterable[int] | str | Mapping[str, str] | None
Keep = Iterable[int] | str | None
PlainLayers = list[int] | str | dict[str, str] | None  # either of these as JSON values


def plain_layers(selected: Layers, argument: str) -> PlainLayers:
    """Return `layers` or `keep_softmax` as lists, dicts, integers and text. Raises ValueError for another type."""
    if selected is None or isinstance(selected, str):
        return selected
    if isinstance(selected, Mapping) and argument == "layers":
        return dict(selected)
    if not isinstance(selected, Iterable) or isinstance(selected, Mapping):
        also = "a mapping pattern -> mixer" if argument == "layers" else '"every:<n>"'
        raise ValueError(
            f"{argument} is a list of block indices, a pattern of module names or {also}, got {selected!r}"
        )
    return [_integer(index) for index in selected]


def _integer(index: int) -> int:
    try:
        return index if isinstance(index, bool) else operator.index(index)
    except TypeError:
        return index  # `_indices` raises an error with the allowed values


def choose(
    blocks: Mapping[str, int], mixer: str, layers: PlainLayers, keep_softmax: PlainLayers
) -> tuple[dict[str, str], set[str]]:
    """Return (layer -> mixer in order, layers kept by `keep_softmax`).

    blocks: attention layer -> index of its block. Raises ValueError for an unknown mixer, an index out of range, and a
    pattern that matches no layer, or only layers that earlier patterns have matched.
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
            raise ValueError(f"layers pattern {pattern!r} matches no layer that an earlier pattern has not matched")
        first |= {layer: name for layer in matched if layer not in first}
    allowed = set(_indices(blocks, layers, "layers")) if isinstance(layers, list) else set(names)
    kept = set(_kept(blocks, keep_softmax))
    return {n: first[n] for n in names if n in first and n in allowed and n not in kept}, kept


def _kept(blocks: Mapping[str, int], keep: PlainLayers) -> list[str]:
    if not isinstance(keep, str):
        return _indices(blocks, keep or [], "keep_softmax")
    word, _, step = keep.partition(":")
    if word != "every":
        return _matching(list(blocks), keep, "keep_softmax")
    if not step.isdecimal() or int(step) < 2:
        raise ValueError(f'keep_softmax="every:<n>" needs a number n of at least 2, got {keep!r}')
    return [name for name, block in blocks.items() if block % int(step) == 0]


def _matching(names: list[str], pattern: str, argument: str) -> list[str]:
    matched = [name for name in names if isinstance(pattern, str) and fnmatchcase(name, pattern)]
    if not matched:
        also = ', "every:<n>"' if argument == "keep_softmax" else ""
        raise ValueError(
            f"{argument}={pattern!r} matches none of the attention layers {names[0]} ... {names[-1]}; allowed: block "
            f"indices, a pattern of module names{also}"
        )
    return matched


def _indices(blocks: Mapping[str, int], indices: Collection[Any], argument: str) -> list[str]:
    depth = max(blocks.values()) + 1
    for index in indices:
        if isinstance(index, bool) or not isinstance(index, int) or not -depth <= index < depth:
            raise ValueError(f"{argument} lists block indices from {-depth} to {depth - 1}, got {index!r}")
    positions = {index % depth for index in indices}
    return [name for name, block in blocks.items() if block in positions]
