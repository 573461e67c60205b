"""Bad and odd command lines: those of commands.yaml, and every option of every tool with wrong values."""

from __future__ import annotations

import dataclasses
import re
import shlex
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.campaign import world
from tests.campaign.harness import Case, call, judge, kind, shown, shrink
from zoo.config import Tree, type_name

TABLE = Path(__file__).with_name("commands.yaml")
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


def cases(folder: Path, seed: int, seconds: float) -> list[Case]:
    """All command lines; builds the files that they name."""
    place = folder / "world"
    world.build(place)
    table = yaml.safe_load(TABLE.read_text().replace("{w}", str(place)))
    found: dict[str, Case] = {}
    for title, section in table.items():
        tool, base = title.split()[0], split(section.get("base") or "")
        for expected, allowed in ALLOWED.items():
            for words, phrase in (section.get(expected) or {}).items():
                case = command(title, tool, base, split(words), allowed, phrase or "", place)
                found[case.name] = case
        if "schema" in section:
            for words, allowed in generated(section):
                case = command(title, tool, base, [words], allowed, "", place)
                found.setdefault(case.name, case)  # the table knows better
    return list(found.values())


def split(text: str) -> list[str]:
    """The words of a command line; braces hold together without quotes."""
    return shlex.split(re.sub(r"('[^']*')|(\{[^']*?\})", lambda found: found[1] or f"'{found[2]}'", text))


def command(
    title: str, tool: str, base: list[str], words: list[str], allowed: tuple[int, ...], phrase: str, place: Path
) -> Case:
    """One command line; `base` are the words before its own."""
    huge = allowed == ALLOWED["either"] and any("00000000" in word or "e18" in word for word in words)

    def complaint(where: Path, these: list[str]) -> str:
        where.mkdir(exist_ok=True)
        result = call(tool, these, cwd=where, limit=HUGE_LIMIT if huge else LIMIT)
        if any(found := [p for root in (where, place) for p in root.rglob("executed")]):
            for file in found:
                file.unlink()
            return "a payload was executed"
        if any(p.exists() for p in (where.parent / "escaped.png", place / "escaped.png", Path("/tmp/escaped.png"))):
            return "a file was written outside"
        return "" if huge and result.timed_out else judge(result, allowed, phrase)

    def reduce(where: Path, first: str) -> str:
        tries = iter(range(10**6))
        kept = shrink(base, lambda few: kind(complaint(where / str(next(tries)), [*few, *words])) == kind(first))
        return shown(tool, [*kept, *words])

    name = shlex.join([title, *words]).replace(str(place), "{w}")
    return Case(name, lambda where: complaint(where, [*base, *words]), shown(tool, [*base, *words]), reduce)


def generated(section: Tree) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(word, allowed exit codes) for each key of a schema: misspelt, of wrong types, and numbers that are none, without
    end, negative or huge. The keys below `negative` may be negative; those of `skip` are left to the table."""
    module, _, name = section["schema"].rpartition(".")
    schema = getattr(__import__(module, fromlist=[name]), name)
    for key, hint in leaves(schema):
        if key in section.get("skip", ()):
            continue
        yield f"{key}x=1", ALLOWED["refuse"]
        kinds = {typing.get_origin(one) or one for one in (typing.get_args(hint) or (hint,))}
        if typing.get_origin(hint) in (list, dict):
            kinds = {typing.get_origin(hint)}
        for value in WRONG[next(k for k in WRONG if k in kinds)]:
            fits = type(yaml.safe_load(value)) in kinds
            yield f"{key}={value}", ALLOWED["either" if fits else "refuse"]
        if kinds & {int, float}:
            for value in (".nan", ".inf"):
                yield f"{key}={value}", ALLOWED["refuse"]
            yield f"{key}=-1", ALLOWED["either" if key in section.get("negative", ()) else "refuse"]
            yield f"{key}=0", ALLOWED["either"]
            for value in ("1000000000000", "1000000000000000000") if int in kinds else ("1.0e18", "1.0e-300"):
                yield f"{key}={value}", ALLOWED["either"]
            yield f"{key}={'100000000000000000000' if int in kinds else '1.0e300'}", ALLOWED["refuse"]
        if str in kinds:
            yield f"{key}=banana", ALLOWED["either"]


def leaves(schema: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, type) of every option of a configuration."""
    for key, hint in typing.get_type_hints(schema).items():
        if dataclasses.is_dataclass(hint):
            yield from leaves(typing.cast(type, hint), f"{prefix}{key}.")
        else:
            assert type_name(hint)
            yield f"{prefix}{key}", hint
