"""Help text of all mixers and their options, generated from `MIXERS`."""

import inspect
from collections.abc import Mapping
from dataclasses import fields

from zoo.config import field_docs, help_lines, type_name
from zoo.errors import unknown_name
from zoo.mixers import MIXERS
from zoo.mixers.options import MixerConfig


def check_mixer(mixer: str, options: Mapping[str, object]) -> None:
    """Raise ValueError unless `mixer` has these `options`, or both are empty."""
    if mixer:
        MixerConfig.parse(mixer, options)
    elif options:
        raise ValueError(
            f"mixer_options need a mixer, got {dict(options)!r} without one; for softmax give mixer_options={{}} too"
        )


def mixers_help() -> str:
    """Name all mixers, and the commands that describe them, for `--help`."""
    names = help_lines(f"{', '.join(MIXERS)}. `zoo list mixers` describes them, `zoo list options MIXER` their options")
    return "\n".join(["mixers:", *names])


def options_help(mixer: str) -> list[str]:
    """List the options of a mixer with type, default and meaning. Raises ValueError for an unknown mixer."""
    if mixer not in MIXERS:
        raise unknown_name("mixer", mixer, MIXERS)
    kind = MIXERS[mixer]
    docs = field_docs(type(kind.defaults))
    lines = [f"mixer_options of {mixer}:", *help_lines((inspect.getdoc(kind) or "").split("\n\n")[0])]
    two_sided = ("causal", "decay") if getattr(kind.defaults, "two_sided", False) else ()
    hidden = (*getattr(kind.defaults, "refused", ()), *two_sided)
    for f in (f for f in fields(kind.defaults) if f.name not in hidden):
        default = getattr(kind.defaults, f.name)
        lines += [f"  {f.name} ({type_name(f.type)}, default {default!r})", *help_lines(docs[f.name])]
    return lines
