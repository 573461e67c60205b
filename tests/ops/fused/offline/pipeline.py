"""Operands in shared memory that a pipelined loop overwrites while a product may still read them.

Triton copies what a loop will read into P buffers ahead and uses K in turn, so that turn i copies into buffer i + P.
Products are asynchronous: one of turn j reads buffer j until something waits for it. Where a tile is an operand and is
read otherwise too, Triton (3.6 and 3.8) makes do with P buffers, and products of the turn that nothing has waited for
are copied over: rarely early enough to be seen, but behind the last tile, where zeros are copied at once.
"""

from __future__ import annotations

import re
from typing import NamedTuple

ALLOC = re.compile(r"(%\S+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\d+)x\d+x")
INDEX = re.compile(r"(%\S+) = ttg\.memdesc_index (%[\w.]+)\[")
VIEW = re.compile(r"(%\S+) = ttg\.memdesc_\w+ (%[\w.]+) ")
COPY = re.compile(r"ttg\.async_copy_global_to_local %\S+, (%\w+)")
DOT = re.compile(r"(%\S+) = ttng\.warp_group_dot (%\w+), (%\w+), .*isAsync = true")
WAIT = re.compile(r"ttng\.warp_group_dot_wait .*pendings = (\d+)")
TURNS = 3


class Product(NamedTuple):
    """One that nothing has waited for: its name, its turn and the allocations that it reads."""

    name: str
    turn: int
    reads: tuple[str, ...]


def overwritten(ttgir: str) -> list[str]:
    """The products of each innermost loop whose operand may be copied over, by the names of both."""
    buffers: dict[str, int] = {}
    homes: dict[str, str] = {}
    copies: dict[str, int] = {}
    found: list[str] = []
    lines = ttgir.splitlines()
    for i, line in enumerate(lines):
        if match := ALLOC.search(line):
            buffers[match[1]], copies[match[1]] = int(match[2]), 0
        elif match := INDEX.search(line) or VIEW.search(line):
            homes[match[1]] = homes.get(match[2], match[2])
        elif match := COPY.search(line):
            home = homes.get(match[1], match[1])
            copies[home] = copies.get(home, 0) + 1
        elif "scf.for" in line:
            body = loop(lines, i)
            if not any("scf.for" in other for other in body):
                found += turns(body, buffers, dict(copies), dict(homes))
    return found


def loop(lines: list[str], start: int) -> list[str]:
    """The body of the loop that begins at a line."""
    indent = len(lines[start]) - len(lines[start].lstrip())
    for end in range(start + 1, len(lines)):
        if lines[end].startswith(" " * indent + "}"):
            return lines[start + 1 : end]
    return lines[start + 1 :]


def turns(body: list[str], buffers: dict[str, int], ahead: dict[str, int], homes: dict[str, str]) -> list[str]:
    """The same of one loop, followed for some turns; ahead: copies before it."""
    pending: list[Product] = []
    found: list[str] = []
    for turn in range(TURNS):
        for line in body:
            if match := INDEX.search(line) or VIEW.search(line):
                homes[match[1]] = homes.get(match[2], match[2])
            elif match := DOT.search(line):
                pending.append(Product(match[1], turn, tuple(homes.get(x, x) for x in match.groups()[1:])))
            elif match := WAIT.search(line):
                pending = pending[len(pending) - int(match[1]) :] if int(match[1]) < len(pending) else pending
            elif match := COPY.search(line):
                home = homes.get(match[1], match[1])
                for product in pending:
                    behind = turn + ahead.get(home, 0) - product.turn
                    if home in product.reads and home in buffers and behind % buffers[home] == 0:
                        found.append(f"{product.name} {home}")
    return sorted(set(found))
