"""Help text of all mixers and their options, generated from `MIXERS`."""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import Field, fields

from zoo.config import field_docs, help_lines, type_name
from zoo.mixers import MIXERS
from zoo.mixers.options import LocalOptions, MixerConfig


def check_mixer(mixer: str, options: Mapping[str, object]) -> None:
    """Raise ValueError unless `mixer` has these `options`, or both are empty."""
    if mixer:
        MixerConfig.parse(mixer, options)
    elif options:
        raise ValueError(
            f"mixer_options need a mixer, got {dict(options)!r} without one; for softmax give mixer_options={{}} too"
        )


def mixers_help() -> str:
    """List every mixer with its own defaults, and every option with type, default, meaning and mixers."""
    lines = ["mixers, with the defaults that differ from those below:"]
    for name, kind in MIXERS.items():
        summary = inspect.cleandoc(kind.__doc__ or "").split("\n\n")[0].replace("\n", " ")
        own = _own_defaults(kind.defaults)
        lines += [f"  {name}", *help_lines(summary), *help_lines(f"defaults: {own}" if own else "")]
    classes = dict.fromkeys(cls for kind in MIXERS.values() for cls in _option_classes(type(kind.defaults)))
    for cls in classes:
        names = [name for name, kind in MIXERS.items() if isinstance(kind.defaults, cls)]
        owners = "every mixer" if len(names) == len(MIXERS) else ", ".join(names)
        lines += ["", f"mixer_options of {owners}:"]
        for f in _declared(cls):
            head = f"  {f.name} ({type_name(f.type)}, default {f.default!r})"
            lines += [head, *help_lines(field_docs(cls)[f.name])]
    return "\n".join(lines)


def _option_classes(cls: type[LocalOptions]) -> Iterator[type[LocalOptions]]:
    """Yield `cls` and the option classes it extends, the most general first."""
    return (c for c in reversed(cls.__mro__[:-1]) if issubclass(c, LocalOptions) and _declared(c))


def _declared(cls: type[LocalOptions]) -> list[Field]:
    return [f for f in fields(cls) if f.name in vars(cls).get("__annotations__", {})]


def _own_defaults(defaults: LocalOptions) -> str:
    changed = [(f.name, getattr(defaults, f.name)) for f in fields(defaults) if getattr(defaults, f.name) != f.default]
    return ", ".join(f"{name}={value!r}" for name, value in changed)
