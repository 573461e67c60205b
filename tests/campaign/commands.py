"""Bad and odd command lines: those of tables/commands.yaml, and every option of every tool with wrong values."""

from __future__ import annotations

import dataclasses
import importlib
import re
import shlex
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.campaign import world
from tests.campaign.harness import TABLES, Case, call, judge, shown, shrink
from zoo.config import Tree

TABLE = TABLES / "commands.yaml"
ALLOWED = {"refuse": (2,), "accept": (0,), "either": (0, 2)}
LIMIT = 60.0  # seconds
HUGE_LIMIT = 10.0  # seconds after which a tool with a huge number counts as at work
WRONG: dict[type, list[str]] = {  # values of another type
    float: ["text", "[1.0]", "{a: 1}", "true"],
    int: ["text", "[1]", "1.5", "true", "1e400"],
    bool: ["maybe", "3", "[true]"],
    str: ["[a]", "{a: 1}", "true"],
    list: ["7", "{a: 1}"],
    dict: ["7", "[a]"],
}


def cases(folder: Path, seed: int) -> list[Case]:
    """All command lines; builds the files that they name."""
    place = folder / "world"
    world.build(place)
    found: dict[str, Case] = {}
    for title, section in yaml.safe_load(TABLE.read_text().replace("{w}", str(place))).items():
        base = split(section.get("base") or "")
        lines = [(words, e, phrase) for e in ALLOWED for words, phrase in (section.get(e) or {}).items()]
        lines += [(words, e, "") for words, e in generated(section)] if "schema" in section else []
        for words, expected, phrase in lines:
            case = command(title, base, split(words), expected, phrase or "", place)
            found.setdefault(case.name, case)  # the table knows better than what is generated
    return list(found.values())


def split(text: str) -> list[str]:
    """The words of a command line; braces hold together without quotes."""
    return shlex.split(re.sub(r"('[^']*')|(\{[^']*?\})", lambda found: found[1] or f"'{found[2]}'", text))


def command(title: str, base: list[str], words: list[str], expected: str, phrase: str, place: Path) -> Case:
    """One command line; `base` are the words before its own."""
    tool = title.split()[0]
    huge = expected == "either" and any("00000000" in word or "e18" in word for word in words)

    def check(these: list[str], where: Path) -> str:
        result = call(tool, [*these, *words], cwd=where, limit=HUGE_LIMIT if huge else LIMIT)
        if any(found := [p for root in (where, place) for p in root.rglob("executed")]):
            for file in found:
                file.unlink()
            return "a payload was executed"
        if any((folder / "escaped.png").exists() for folder in (where.parent, place, Path("/tmp"))):
            return "a file was written outside"
        return "" if huge and result.timed_out else judge(result, ALLOWED[expected], phrase)

    return Case(
        shlex.join([title, *words]).replace(str(place), "{w}"),
        lambda where: check(base, where),
        shown(tool, [*base, *words]),
        lambda where, complaint: shown(tool, [*shrink(base, complaint, where, check), *words]),
    )


def generated(section: Tree) -> Iterator[tuple[str, str]]:
    """(word, what is expected) for each key of a schema: misspelt, of wrong types, and numbers that are none, without
    end, negative or huge. The keys below `negative` may be negative; those of `skip` are left to the table."""
    module, _, name = section["schema"].rpartition(".")
    for key, hint in leaves(getattr(importlib.import_module(module), name)):
        if key in section.get("skip", ()):
            continue
        yield f"{key}x=1", "refuse"
        kinds = {typing.get_origin(one) or one for one in (typing.get_args(hint) or (hint,))}
        if typing.get_origin(hint) in (list, dict):
            kinds = {typing.get_origin(hint)}
        for value in WRONG[next(k for k in WRONG if k in kinds)]:
            yield f"{key}={value}", "either" if type(yaml.safe_load(value)) in kinds else "refuse"
        if kinds & {int, float}:
            yield from ((f"{key}={value}", "refuse") for value in (".nan", ".inf"))
            yield f"{key}=-1", "either" if key in section.get("negative", ()) else "refuse"
            large = ("1000000000000", "1000000000000000000") if int in kinds else ("1.0e18", "1.0e-300")
            yield from ((f"{key}={value}", "either") for value in ("0", *large))
            yield f"{key}={'100000000000000000000' if int in kinds else '1.0e300'}", "refuse"
        if str in kinds:
            yield f"{key}=banana", "either"


def leaves(schema: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, type) of every option of a configuration."""
    for key, hint in typing.get_type_hints(schema).items():
        if dataclasses.is_dataclass(hint):
            yield from leaves(typing.cast(type, hint), f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", hint
