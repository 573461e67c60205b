"""The mixers and their options in words, from `MIXERS`: for `--help`, and checked where settings name a mixer."""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from zoo.config import field_docs, type_name
from zoo.mixers import MIXERS
from zoo.mixers.options import MixerConfig


def check_mixer(mixer: str, options: Mapping[str, Any]) -> None:
    """Raise ValueError unless `mixer` is a mixer with these `options`, or empty without any."""
    if mixer:
        MixerConfig.parse(mixer, options)
    elif options:
        raise ValueError(f"mixer_options are given without a mixer: {dict(options)!r}")


def mixers_help() -> str:
    """Every mixer with its own defaults, and every option with type, default, meaning and the mixers that have it."""
    lines = ["mixers, with the options whose defaults are others than those below:"]
    for name, kind in MIXERS.items():
        summary = inspect.cleandoc(kind.__doc__ or "").split("\n\n")[0].replace("\n", " ")
        lines += [f"  {name}", f"      {summary}"]
        if own := _own_defaults(kind.defaults):
            lines.append(f"      defaults: {own}")
    classes = dict.fromkeys(cls for kind in MIXERS.values() for cls in _option_classes(type(kind.defaults)))
    for cls in classes:
        names = [name for name, kind in MIXERS.items() if isinstance(kind.defaults, cls)]
        who = "every mixer" if len(names) == len(MIXERS) else ", ".join(names)
        lines += ["", f"mixer_options of {who}:"]
        for f in _declared(cls):
            lines += [f"  {f.name} ({type_name(f.type)}, default {f.default!r})", f"      {field_docs(cls)[f.name]}"]
    return "\n".join(lines)


def _option_classes(cls: type) -> Iterator[type]:
    """`cls` and the classes of options that it extends, the most general first."""
    return (c for c in reversed(cls.__mro__[:-1]) if _declared(c))


def _declared(cls: Any) -> list[Any]:
    return [f for f in fields(cls) if f.name in vars(cls).get("__annotations__", {})]


def _own_defaults(defaults: Any) -> str:
    changed = [(f.name, getattr(defaults, f.name)) for f in fields(defaults) if getattr(defaults, f.name) != f.default]
    return ", ".join(f"{name}={value!r}" for name, value in changed)
