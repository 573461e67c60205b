"""Result files that several runs of one command on one machine add to, written atomically."""

import datetime
import json
import math
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from zoo.errors import unknown_name
from zoo.io import result_file, write_text

KERNEL_KEY = ("op", "impl", "shape", "options", "pass")
MODEL_KEY = ("model", "size", "mode", "weights", "mixer", "compiled")
PRIVATE = ("json=", "picture=")  # local paths, left out of the stored command
Row = dict[str, Any]


def command_of(words: list[str]) -> str:
    """Return the command line for a result file."""
    kept = [shlex.quote(word) for word in words if not word.startswith(PRIVATE)]
    return " ".join(["python tools/benchmark.py", *kept])


def common_command(commands: list[str]) -> str:
    """Merge commands that differ in argument values into one with alternatives: seeds=[0]|[1]."""
    alike: dict[tuple[str, ...], list[list[str]]] = {}
    for command in dict.fromkeys(commands):
        words = shlex.split(command)
        alike.setdefault(tuple(word.partition("=")[0] for word in words), []).append(words)
    merged = []
    for same in alike.values():
        words = []
        for column in zip(*same, strict=True):
            key, equals, _ = column[0].partition("=")
            words.append(key + equals + "|".join(dict.fromkeys(word.partition("=")[2] for word in column)))
        merged.append(shlex.join(words))
    return "; ".join(merged)


def arm(words: str) -> tuple[str, dict[str, Any]]:
    """Parse a mixer and its options, such as "mhla every:3 depthwise=v"; "every:3" is short for "keep_softmax=every:3".

    Raises ValueError for an option without a value.
    """
    mixer, *options = words.split() or [""]
    found = {}
    for word in options:
        key, equals, value = word.partition("=")
        if word.startswith("every:"):
            found["keep_softmax"] = word
        elif equals:
            found[key] = yaml.safe_load(value)
        else:
            raise ValueError(f"expected a mixer and its options, such as 'mhla mixing=project', got {words!r}")
    return mixer, found


def check_names(settings: Any, **allowed: Iterable[str]) -> None:
    """Raise ValueError for a name in a list of `settings` that is not allowed: shapes=SHAPES, in the plural."""
    for key, names in allowed.items():
        for name in getattr(settings, key):
            if name not in names:
                raise unknown_name(key.removesuffix("s"), name, names)


def reason(error: Exception) -> dict[str, str]:
    """Return the row of a failure."""
    return {"reason": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}


def key_of(row: Row, names: tuple[str, ...]) -> str:
    """Return the key that identifies a measurement."""
    return json.dumps([row.get(name) for name in names], sort_keys=True)


def merge_rows(old: Iterable[Row], new: Iterable[Row], names: tuple[str, ...]) -> list[Row]:
    """Merge rows in the order of first appearance; a new row replaces the old one with the same key."""
    out = {key_of(row, names): row for row in old}
    out.update({key_of(row, names): row for row in new})
    return list(out.values())


def start(file: Path, command: str, extra: dict[str, str]) -> Row:
    """Read the result file to add to; without a file, return an empty one. extra: additional versions.

    Raises ValueError for a file that is not a result file, or from other hardware or versions.
    """
    fresh = result_file(command, []) | {"failed": []}
    fresh["versions"] |= extra
    if not file.is_file():
        return fresh
    try:
        old = json.loads(file.read_text())
        rows, commands = old["rows"], old["command"].split("; ")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is not a result file; name another with json=") from error
    before = {"hardware": old.get("hardware"), **old.get("versions", {})}
    now = {"hardware": fresh["hardware"], **fresh["versions"]}
    for name in before.keys() & now.keys():
        if before[name] != now[name]:
            raise ValueError(f"{file} was made with {name} {before[name]}, not {now[name]}; name another with json=")
    fresh["versions"] = old.get("versions", {}) | fresh["versions"]
    fresh["command"] = "; ".join(dict.fromkeys([*commands, command]))
    return old | fresh | {"rows": rows, "failed": old.get("failed", [])}  # with its notes


def add(content: Row, row: Row, names: tuple[str, ...], file: Path) -> None:
    """Add a row, or a failure with its `reason`, to `content` and write the file.

    The last result of a case replaces earlier ones in both lists. A row with numbers that are not finite is a failure.
    """
    if broken := [name for name, x in row.items() if isinstance(x, float) and not math.isfinite(x)]:
        kept = {name: x for name, x in row.items() if name not in broken}
        row = kept | {"reason": f"not finite: {', '.join(broken)}"}
    lists = ("failed", "rows") if "reason" in row else ("rows", "failed")
    content[lists[0]] = merge_rows(content[lists[0]], [row], names)
    content[lists[1]] = [old for old in content[lists[1]] if not _covers(row, old, names)]
    content["date"] = datetime.date.today().isoformat()
    write_atomic(content, file)


def _covers(row: Row, old: Row, names: tuple[str, ...]) -> bool:
    """Whether two rows belong to the same case; a failure has no pass and covers both."""
    shared = tuple(name for name in names if name in row and name in old)
    return key_of(row, shared) == key_of(old, shared)


def write_atomic(content: Any, file: Path) -> None:
    """Write JSON atomically, one row per line for readable diffs. Raises ValueError for numbers that are not finite."""
    lists = {name: value for name, value in content.items() if name in ("rows", "failed")}
    others = {name: value for name, value in content.items() if name not in lists}
    head = json.dumps(others, indent=1, allow_nan=False)[:-2]
    for name, rows in lists.items():
        lines = ",\n".join("  " + json.dumps(row, allow_nan=False) for row in rows)
        head += f',\n "{name}": [\n{lines}\n ]' if rows else f',\n "{name}": []'
    write_text(head + "\n}\n", file)
