"""List the names of mixers, models and configurations.

zoo list                this help
zoo list mixers         mixers, with a description
zoo list options MIXER  options of a mixer, with type, default and meaning
zoo list models         registered timm models with mixers, such as `zoo list models "mhla*small"`
zoo list families       families of diffusers transformers that convert, with their classes
zoo list configs        shipped configurations
"""

import inspect
from collections.abc import Callable
from fnmatch import fnmatchcase

import timm
from timm.models import model_entrypoint

from zoo.config import shipped_configs
from zoo.errors import unknown_name
from zoo.mixers import MIXERS
from zoo.mixers.help import options_help


def mixers() -> list[str]:
    """Return the names of mixers, each with the first line of its docstring."""
    about = {name: (inspect.getdoc(kind) or "").splitlines()[0] for name, kind in MIXERS.items()}
    return [f"{name.ljust(max(map(len, about)))}  {text}" for name, text in about.items()]


def models() -> list[str]:
    """Return the names of the registered timm models with mixers."""
    return [name for name in timm.list_models() if model_entrypoint(name).__module__.startswith("zoo.")]


def families() -> list[str]:
    """Return the names of the families of diffusers transformers, each with its class in diffusers."""
    from zoo.models.diffusers.families import FAMILIES  # only here: diffusers is an extra

    return [f"{f.name.ljust(max(len(f.name) for f in FAMILIES))}  {f.host.__name__}" for f in FAMILIES]


def configs() -> list[str]:
    """Return the names of the shipped configurations."""
    return list(shipped_configs())


KINDS: dict[str, Callable[[], list[str]]] = {kind.__name__: kind for kind in (mixers, models, families, configs)}
USAGE = f"usage: zoo list {'|'.join(KINDS)} [PATTERN] | zoo list options [MIXER]"


def main(words: list[str]) -> list[str]:
    """Print the names of a kind (first word) that contain all other words, in which * stands for any text, or the
    options of mixers. Returns the lines; raises ValueError for an unknown kind or mixer."""
    if not words or words[0] in ("-h", "--help"):
        print(__doc__, USAGE, sep="\n")
        return []
    if words[0] == "options":
        lines = [line for mixer in words[1:] or MIXERS for line in options_help(mixer)]
    elif words[0] in KINDS:
        lines = [line for line in KINDS[words[0]]() if all(fnmatchcase(line, f"*{w}*") for w in words[1:])]
    else:
        raise unknown_name("kind of names", words[0], [*KINDS, "options"])
    if not lines:
        raise ValueError(f"none of the {words[0]} contains {' and '.join(words[1:])}")
    print("\n".join(lines))
    return lines
