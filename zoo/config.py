"""Configurations: YAML files and `section.key=value` overrides, checked against frozen dataclasses.

The dataclasses are defined elsewhere, such as in `zoo.train.settings`. This module reads files, merges `base:` files
and overrides, checks types, makes the help text from docstrings, and compares configurations. Wrong input raises a
ValueError, which `command_line` prints on one line before it exits with status 2.
"""

import dataclasses
import errno
import inspect
import math
import os
import re
import signal
import sys
import textwrap
import types
import typing
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import yaml

from zoo.errors import nearest, shortened, unknown_name
from zoo.files import replacing

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)  # these may have no file name
NO_MEMORY = ("out of memory", "can't allocate memory", "Storage size calculation overflowed")  # parts of torch's errors
MAX_VALUES = 100_000  # number of values in a configuration file or override
T = TypeVar("T")
Tree = dict[str, Any]  # nested dicts, lists, numbers, strings
Hint = Any  # a type annotation


def load(schema: type[T], path: str | Path | None, overrides: list[str] | None = None) -> T:
    """Read an instance of `schema` from a YAML file (None: all defaults) and `section.key=value` overrides.

    A file may override the keys of another one, named by `base: other.yaml` (a path relative to the file). Dicts are
    merged key by key; `{}` empties a dict. Raises ValueError for a missing or unreadable file, an unknown key (with the
    nearest valid one), or a value of the wrong type.
    """
    tree = _current_keys(schema, read_tree(find_config(path))) if path else {}
    for word in overrides or []:
        tree = merge(tree, _current_keys(schema, _parse_override(schema, word)))
    return from_tree(schema, tree)


def _current_keys(schema: type, tree: Tree, prefix: str = "") -> Tree:
    """Replace former keys in `tree` by the current ones, with a warning. A section lists pairs (former, current) in its
    class attribute `former`."""
    hints, former = typing.get_type_hints(schema), dict(getattr(schema, "former", ()))
    out: Tree = {}
    for key, value in tree.items():
        new = former.get(key, key)
        if new != key:
            warnings.warn(f"the key {prefix}{key} is now called {prefix}{new}", FutureWarning, stacklevel=2)
        if new == key or new not in tree:
            section = dataclasses.is_dataclass(hints.get(new)) and isinstance(value, dict)
            out[new] = _current_keys(hints[new], value, f"{prefix}{new}.") if section else value
    return out


def shipped_configs() -> dict[str, Path]:
    """Return the files of the shipped configurations, by name such as "vit/digits_softmax"."""
    inside = Path(__file__).with_name("configs")  # in an installed package; a checkout has them at its root
    folder = inside if inside.is_dir() else Path(__file__).resolve().parents[1] / "configs"
    return {file.relative_to(folder).with_suffix("").as_posix(): file for file in sorted(folder.rglob("*.yaml"))}


def find_config(name: str | Path) -> Path:
    """Find the file `name`, or the shipped configuration of that name, with or without its folder. Raises ValueError
    for an unknown name (with the nearest one) and for a name that exists in several folders."""
    if Path(name).is_file():
        return Path(name)
    shipped, short = shipped_configs(), str(name).removeprefix("configs/").removesuffix(".yaml")
    found = [key for key in shipped if short in (key, key.rpartition("/")[2])]
    if len(found) > 1:
        raise ValueError(f"{name} may be any of the configurations {', '.join(found)}: name its folder too")
    if not found:
        near = nearest(short, shipped, cutoff=0.75)
        hint = f"; did you mean {near[0]}?" if near else " (shipped ones: zoo list configs)"
        raise ValueError(f"there is no configuration file {name}{hint}")
    return shipped[found[0]]


def read_tree(path: Path, seen: tuple[str, ...] = ()) -> Tree:
    """Read a YAML file as a nested dict, merged with its `base` files. Raises ValueError for a missing or malformed
    file."""
    if os.path.realpath(path) in seen:
        raise ValueError(f"the configuration {path} names itself as its base")
    if not path.is_file():
        raise ValueError(f"there is no configuration file {path}")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8") from error
    tree = _parse_yaml(text, f"{path} is not valid YAML") or {}
    if not isinstance(tree, dict):
        raise ValueError(f"{path} must hold sections with keys, got a {type(tree).__name__}")
    base = tree.pop("base", None)
    if base is None:
        return tree
    return merge(read_tree(path.parent / str(base), (*seen, os.path.realpath(path))), tree)


def _parse_yaml(text: str, wrong: str) -> Any:
    """Parse a YAML text. Raises ValueError if it is malformed or too large, with a message that begins with `wrong`."""
    try:
        value = yaml.safe_load(text)
        _count_values(value)
        return value
    except (yaml.YAMLError, ValueError) as error:  # ValueError: an impossible date, a number with thousands of digits
        reason = " ".join(str(error).split())[:300]
    except RecursionError:
        reason = "it is nested too deeply"
    raise ValueError(f"{wrong}: {reason}")


def _count_values(value: object, before: int = 0) -> int:
    """Return `before` plus the number of values in a tree. Raises ValueError beyond `MAX_VALUES`, since a short text
    with YAML aliases can expand to more values than fit in memory."""
    before += 1
    if before > MAX_VALUES:
        raise ValueError(f"it holds more than {MAX_VALUES} values")
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for one in inside:
        before = _count_values(one, before)
    return before


def merge(below: Tree, above: Tree) -> Tree:
    """Override `below` with `above`. Dicts are merged key by key; an empty dict in `above` replaces a dict."""
    out = dict(below)
    for key, value in above.items():
        both = bool(value) and isinstance(value, dict) and isinstance(out.get(key), dict)
        out[key] = merge(out[key], value) if both else value
    return out


def from_tree(schema: type[T], tree: Tree, prefix: str = "", whole: type | None = None) -> T:
    """Build the dataclass `schema` from a nested dict; missing keys keep their defaults. Raises ValueError for an
    unknown key or a wrong value.

    For a section, prefix is its dotted path, and whole the class of the configuration that contains it."""
    hints, tree = typing.get_type_hints(schema), tree if whole else _current_keys(schema, tree)
    whole = whole or schema
    values: Tree = {}
    for key, value in tree.items():
        if key not in hints:
            allowed = [prefix + name for name in hints]
            raise unknown_name("configuration key", f"{prefix}{key}", allowed, _suggestions(str(key), prefix, whole))
        hint = hints[key]
        if dataclasses.is_dataclass(hint):
            if not isinstance(value, dict):
                raise ValueError(f"{prefix}{key} is a section and needs keys, got {shortened(value)!r}")
            values[key] = from_tree(typing.cast(type, hint), value, f"{prefix}{key}.", whole)
        else:
            values[key] = check_type(value, hint, prefix + key)
    return schema(**values)


def _suggestions(key: str, prefix: str, whole: type) -> list[str]:
    """Suggest keys for an unknown one of the section `prefix`: keys of the same name in other sections, or else the
    nearest key of the section."""
    keys = _all_keys(whole)
    same = [name for name in keys if name.rpartition(".")[2] == key]
    here = {name.removeprefix(prefix): name for name in keys if name.startswith(prefix)}
    return same or [here[name] for name in nearest(key, here)]


def _all_keys(schema: type, prefix: str = "") -> list[str]:
    keys = []
    for name, hint in typing.get_type_hints(schema).items():
        section = dataclasses.is_dataclass(hint)
        keys += _all_keys(typing.cast(type, hint), f"{prefix}{name}.") if section else [prefix + name]
    return keys


def to_tree(config: object) -> Tree:
    """Convert a configuration to a nested dict of plain dicts, lists, numbers and strings."""
    return dataclasses.asdict(config)  # type: ignore[call-overload]


def save(config: object, path: Path) -> None:
    """Write all keys of a configuration, including defaults, as YAML."""
    with replacing(path) as temporary:
        temporary.write_text(yaml.safe_dump(to_tree(config), sort_keys=False))


def differences(a: object, b: object, ignore: tuple[str, ...] = ()) -> list[str]:
    """Return the dotted keys in which two configurations differ, except those in `ignore` (keys or sections)."""
    one, two = leaves(a), leaves(b)
    keys = [k for k in one.keys() | two.keys() if one.get(k) != two.get(k)]
    return sorted(k for k in keys if not any(k == i or k.startswith(i + ".") for i in ignore))


def leaves(config: object) -> Tree:
    """All values of a configuration by dotted key."""
    return _flatten(to_tree(config))


def _flatten(tree: Tree, prefix: str = "") -> Tree:
    out: Tree = {}
    for key, value in tree.items():
        nested = isinstance(value, dict) and value
        out |= _flatten(value, f"{prefix}{key}.") if nested else {prefix + key: value}
    return out


def check_type(value: Any, hint: Hint, name: str) -> Any:
    """Convert `value` to the annotated type; integers are accepted for floats. Raises ValueError, which names the key
    `name`, for other types and for infinite or NaN numbers."""
    allowed = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for one in allowed:
        origin = typing.get_origin(one) or one
        if origin is types.NoneType and value is None:
            return None
        if origin is float and _is_number(value):
            return _finite(value, name)
        if origin is int and isinstance(value, int) and not isinstance(value, bool):
            return value
        if origin is list and isinstance(value, list):
            (item,) = typing.get_args(one)
            return [check_type(v, item, f"{name}[{i}]") for i, v in enumerate(value)]
        if origin is dict and isinstance(value, dict):
            return _all_finite(value, name)
        if origin in (str, bool) and isinstance(value, origin):
            return value
    brackets = f"; write {name}=[{value}]" if types.GenericAlias(list, (type(value),)) in allowed else ""
    raise ValueError(f"{name} must be {type_name(hint)}, got {shortened(value)!r}{brackets}")


def check_arguments(function: Callable[..., object], given: Tree, prefix: str) -> None:
    """Raise ValueError for an argument whose type differs from that parameter's default (bool, int, float or str)."""
    defaults = {name: p.default for name, p in inspect.signature(function).parameters.items()}
    for key, value in given.items():
        if isinstance(defaults.get(key), bool | int | float | str):
            check_type(value, type(defaults[key]), f"{prefix}.{key}")


def _finite(value: float | str, name: str) -> float:
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name} must be a finite number, got {shortened(value)}")
    return number


def _is_number(value: object) -> bool:
    if isinstance(value, str):  # YAML parses 1e-3 (without a dot) as a string
        return re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value) is not None
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _all_finite(value: T, name: str) -> T:
    """Return `value`. Raises ValueError if it contains a float, at any depth, that is not finite."""
    if isinstance(value, float):
        return _finite(value, name)  # type: ignore[return-value]
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        _all_finite(one, f"{name}.{key}")
    return value


def type_name(hint: Hint) -> str:
    """Format a type annotation as text: `int`, `list[float]`, `dict`, `int or none`."""
    if isinstance(hint, types.UnionType):
        return " or ".join(type_name(h) for h in typing.get_args(hint))
    if hint is types.NoneType:
        return "none"
    if typing.get_origin(hint) is dict:
        return "dict"
    return str(hint) if typing.get_origin(hint) else hint.__name__


def one_of(key: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise ValueError, with the nearest valid name, unless `value` is one of `allowed`."""
    if value not in allowed:
        raise unknown_name(key, value, allowed)


def _parse_override(schema: type, word: str) -> Tree:
    key, equals, text = word.partition("=")
    if not equals or not key:
        raise ValueError(f"expected section.key=value, got {word!r}")
    value = _parse_yaml(text, f"the value of {key} cannot be read") if text else ""
    if isinstance(value, dict) and (joined := [k for k, v in value.items() if v is None and re.search("[:=]", str(k))]):
        raise ValueError(f"{word!r}: write {{name: value}} with a space after the colon, got {joined[0]!r}")
    names = key.split(".")
    hints = typing.get_type_hints(schema)
    if names[0] not in hints:
        meant = nearest(names[0], hints) or _suggestions(names[-1], "", schema)
        raise unknown_name("configuration section", names[0], hints, meant)
    if len(names) == 1 and dataclasses.is_dataclass(hints[names[0]]):
        raise ValueError(f"expected {key}.KEY=VALUE with a key of the section {key!r}, got {word!r}")
    tree: Tree = {names[-1]: value}
    for name in reversed(names[:-1]):
        tree = {name: tree}
    return tree


def field_docs(schema: type) -> dict[str, str]:
    """Read the meaning of each field from the docstrings of a dataclass and its bases, which have a line
    `name: meaning` per field, with indented continuation lines."""
    docs: dict[str, str] = {}
    name = ""
    texts = [inspect.cleandoc(cls.__doc__ or "") for cls in reversed(schema.__mro__[:-1])]
    for line in "\n".join(texts).splitlines():
        if match := re.match(r"(\w+): (.*)", line):
            name, text = match.groups()
            docs[name] = text
        elif line.startswith("  ") and name:
            docs[name] += " " + line.strip()
    return docs


def describe(schema: type) -> str:
    """Make the help text of a configuration: all sections and keys, with type, default and meaning, and then the texts
    of the `more_help` functions of sections."""
    lines = []
    hints = typing.get_type_hints(schema)
    for section, hint in hints.items():
        if not dataclasses.is_dataclass(hint):
            lines += ["", *_describe_key(schema, section, "")]
            continue
        lines += ["", f"{section}: {inspect.cleandoc(hint.__doc__ or '').splitlines()[0]}"]
        owners = typing.cast(type, hint).__mro__[:-1]  # its keys come before inherited ones
        for key in dict.fromkeys(key for owner in owners for key in inspect.get_annotations(owner)):
            lines += _describe_key(typing.cast(type, hint), key, f"{section}.")
    notes = dict.fromkeys(getattr(part, "more_help", None) for part in (schema, *hints.values()))
    lines += [text for note in notes if note for text in ("", note())]
    return "\n".join(lines)


def _describe_key(schema: type, key: str, prefix: str) -> list[str]:
    default, kind = getattr(schema(), key), type_name(typing.get_type_hints(schema)[key])
    return [f"  {prefix}{key} ({kind}, default {default!r})", *help_lines(field_docs(schema)[key])]


def help_lines(text: str) -> list[str]:
    """Wrap a text of the help into indented lines."""
    return textwrap.wrap(text, width=100, initial_indent=" " * 6, subsequent_indent=" " * 6)


def from_command_line(schema: type[T], words: list[str]) -> T:
    """Read a configuration from command-line arguments: at most one file, and overrides. Raises ValueError as `load`,
    and for other options and several files."""
    files = [word for word in words if "=" not in word]
    if cut := [word for word in files if word.endswith(("]", "}"))]:
        raise ValueError(f"the value before {cut[0]!r} contains spaces: put section.key=value in quotes")
    if options := [word for word in words if word.startswith("-")]:
        near = _suggestions(options[0].lstrip("-").partition("=")[0], "", schema)
        hint = f", such as {near[0]}=VALUE" if near else ""
        raise ValueError(f"unknown option {options[0]!r}: write keys as section.key=value{hint}")
    if len(files) > 1:
        raise ValueError(f"expected one configuration file and section.key=value words, got {' '.join(files)}")
    return load(schema, files[0] if files else None, [word for word in words if "=" in word])


def print_help_if_asked(words: list[str], about: str | None, usage: str, schema: type) -> bool:
    """Print the help (description, usage, all keys) if the words contain -h or --help. Returns whether they do."""
    asked = bool({"-h", "--help"} & set(words))
    if asked:
        print(f"{about}\n{usage}\n{describe(schema)}")
    return asked


def command_line(main: Callable[[list[str]], object]) -> None:
    """Run `main` on the command-line arguments. ValueErrors, errors of the file system (no permission, a full disk) and
    lack of memory are printed on one line, with exit status 2; Ctrl-C exits with status 130. Warnings are printed
    without the line of code that raised them."""
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    warnings.filterwarnings("ignore", message=".*`local_dir_use_symlinks`")  # diffusers passes it to huggingface_hub
    try:
        main(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # the reader closed the pipe, as in `zoo list configs | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(128 + signal.SIGPIPE) from None
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except (MemoryError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        if not (isinstance(error, MemoryError) or any(words in reason for words in NO_MEMORY)):
            raise
        print(f"error: there is not enough memory, take fewer or smaller inputs: {reason[:300]}", file=sys.stderr)
        raise SystemExit(2) from None
    except OSError as error:
        if error.filename is None and error.errno not in DISK_ERRORS:
            raise
        print(f"error: {error.filename or 'the disk'} cannot be used: {error.strerror}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(128 + signal.SIGINT) from None
