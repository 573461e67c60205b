"""What an assembler made of a kernel, read from SASS: spills in loops, and where the registers of products on tensor
cores and the addresses of their operands come from.

A product (HGMMA) goes on behind the instruction that starts it until WARPGROUP.DEPBAR waits for its group, which ends
at a product with `gsb0`. Until then nobody else may touch its accumulator or set its operand A; what sets them before
is behind no WARPGROUP.ARRIVE of its own. An assembler that breaks this gives results that differ from run to run.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import triton

TOOLS = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin")
STORES = ("ST", "RED", "ATOM", "LDGSTS")
NO_REGISTER = ("BAR", "BRA", "EXIT", "WARPSYNC", "R2UR", "ISETP", "FSETP", "HSETP", "VOTEU")  # is written
BEHIND_A_PREDICATE = ("SHFL", "LOP3")  # the register that is written, where one is
ELEMENTS = ("4", "2")  # of LDSM and STSM
NOWHERE = frozenset((-1,))
Registers = frozenset[int]


class Product(NamedTuple):
    """The registers of an HGMMA: its accumulator, and operand A where it is not in shared memory."""

    total: Registers
    a: Registers


class Instruction(NamedTuple):
    """One instruction, the places of those that may follow it, and the registers of a thread that it reads and
    writes."""

    text: str
    name: str
    operands: tuple[str, ...]
    always: bool
    following: tuple[int, ...]
    reads: Registers
    writes: Registers
    product: Product | None


def disassemble(path: str) -> list[Instruction]:
    """The instructions of a cubin file, of all its functions."""
    words = [os.path.join(TOOLS, "nvdisasm"), "-c", path]
    return parse(subprocess.run(words, capture_output=True, text=True, check=True).stdout)


def parse(text: str) -> list[Instruction]:
    """The instructions that `nvdisasm -c` prints."""
    lines = re.findall(r"^\s*(\.L_\w+):|^\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", text, re.MULTILINE)
    labels: dict[str, int] = {}
    code: list[str] = []
    for label, line in lines:
        if label:
            labels[label] = len(code)
        else:
            code.append(line)
    return [instruction(line, i, labels, len(code)) for i, line in enumerate(code)]


def instruction(text: str, at: int, labels: dict[str, int], count: int) -> Instruction:
    """One line at a place in the code; `labels`: those of branches."""
    guard = re.match(r"@!?U?P\w+\s+", text)
    name, _, rest = text[guard.end() if guard else 0 :].partition(" ")
    operands = tuple(x.strip() for x in re.split(r",(?![^\[]*\])", rest))
    following = [at + 1] if at + 1 < count else []
    if name.startswith(("BRA", "BRX")):  # BRX: one of several places
        either = guard is not None or (name.startswith("BRA") and len(operands) > 1)
        following = (following if either else []) + [labels[to] for to in re.findall(r"\.L_\w+", rest)]
    elif name.startswith(("EXIT", "RET")) and not guard:
        following = []
    product = product_of(name, operands) if name.startswith("HGMMA") else None
    reads, writes = touched(name, operands) if product is None else (product.a, product.total)
    if product is not None and not operands[3 if product.a else 2].startswith("RZ"):
        reads |= product.total
    return Instruction(text, name, operands, guard is None, tuple(following), reads, writes, product)


def first(operand: str) -> list[int]:
    """The first register of each range that an operand names."""
    return [int(x) for x in re.findall(r"(?<![A-Z])R(\d+)", operand)]


def product_of(name: str, operands: tuple[str, ...]) -> Product:
    """The registers of an HGMMA of 64 rows: 4 warps share its accumulator."""
    columns = int(name.split("x")[1])
    (total,) = first(operands[0])
    of_a = first(operands[1]) if not operands[1].startswith("gdesc") else []
    size = columns // (2 if ".F32" in name else 4)
    return Product(frozenset(range(total, total + size)), frozenset(x for a in of_a for x in range(a, a + 4)))


def touched(name: str, operands: tuple[str, ...]) -> tuple[Registers, Registers]:
    """The registers that another instruction reads and writes."""
    reads: set[int] = set()
    writes: set[int] = set()
    behind = 1 if name.startswith(BEHIND_A_PREDICATE) and re.match(r"U?P", operands[0]) else 0
    for i, operand in enumerate(operands[behind:]):
        size = width(name, operand, i)
        found = {x for r in first(operand) for x in range(r, r + size)}
        stays = name.startswith((*STORES, *NO_REGISTER)) or "[" in operand
        (writes if i == 0 and not stays else reads).update(found)
    return frozenset(reads), frozenset(writes)


def width(name: str, operand: str, i: int) -> int:
    """Registers of the i-th operand."""
    kind, data = name.split("."), 1 if name.startswith((*STORES, "STSM")) else 0
    if name.startswith("HMMA"):
        wide = "16816" in kind
        return (4 if "F32" in kind else 2, 4 if wide else 2, 2 if wide else 1, 4 if "F32" in kind else 2)[i]
    if name.startswith(("LDSM", "STSM")):
        return next((int(x) for x in ELEMENTS if x in kind), 1) if i == data else 1
    if "[" in operand:
        return 2 if ".64" in operand else 1
    if name.startswith(("LD", "ST")):
        return {"128": 4, "64": 2}.get(next((x for x in kind if x in ("128", "64")), ""), 1) if i == data else 1
    pair = ("WIDE" in kind and i in (0, 3)) or ("64" in kind and i == 0) or name.startswith(("DADD", "DMUL", "DFMA"))
    return 2 if pair or (kind[0] == "CS2R" and "32" not in kind) else 1


def in_loops(code: list[Instruction]) -> int:
    """Loads and stores of spilt registers between a place and a branch back to it: those that every turn pays for."""
    loops = [(to, i) for i, x in enumerate(code) for to in x.following if to < i]
    spilt = [i for i, x in enumerate(code) if x.name.startswith(("LDL", "STL"))]
    return sum(any(begin <= i < end for begin, end in loops) for i in spilt)


def straight(code: list[Instruction]) -> dict[int, range]:
    """The runs of instructions that nothing branches into or out of, by where they begin."""
    begins = {to for i, x in enumerate(code) if x.following != (i + 1,) for to in (*x.following, i + 1)}
    places = sorted({0, len(code)} | begins)
    return {a: range(a, b) for a, b in itertools.pairwise(places)}


def states(code: list[Instruction], start: Any, join: Callable, step: Callable) -> Iterator[tuple[Instruction, Any]]:
    """Every instruction that is reached and, joined of all ways to it, the state before it."""
    runs, before, todo = straight(code), {0: start}, [0]
    while todo:
        run = runs[todo.pop()]
        state = before[run[0]]
        for i in run:
            state = step(i, code[i], state)
        for to in code[run[-1]].following:
            found = join(before[to], state) if to in before else state
            if to not in before or found != before[to]:
                before[to] = found
                todo.append(to)
    for begin, state in sorted(before.items()):
        for i in runs[begin]:
            yield code[i], state
            state = step(i, code[i], state)


def touched_in_flight(code: list[Instruction]) -> Iterator[Instruction]:
    """Of what reads or writes an accumulator or sets an operand of a product that nothing has waited for. The next
    product into the same accumulator may. State: {product: groups that ended behind it, -1 before its own has}."""

    def step(i: int, x: Instruction, state: dict) -> dict:
        if x.product is not None:
            state = state | {(i, x.product): -1}
            return {k: age + 1 for k, age in state.items()} if x.operands[-1] == "gsb0" else state
        if x.name.startswith("WARPGROUP.DEPBAR"):
            most = int(x.operands[1], 16)
            return {k: age for k, age in state.items() if age < most}
        return state

    def join(x: dict, y: dict) -> dict:
        return x | y | {k: min(x[k], y[k]) for k in x.keys() & y.keys()}

    for x, flying in states(code, {}, join, step):
        for _, other in flying:
            chained = x.product is not None and x.product.total == other.total
            seen = x.product.a if x.product is not None and chained else x.reads | x.writes
            if x.writes & other.a or seen & other.total:
                yield x


def set_behind_the_fence(code: list[Instruction]) -> Iterator[Instruction]:
    """Of products, what was set behind the last fence. State: the registers that were."""

    def step(i: int, x: Instruction, state: Registers) -> Registers:
        if x.name.startswith("WARPGROUP.ARRIVE"):
            return frozenset()
        return state if x.product is not None else state | x.writes

    late = states(code, frozenset(), frozenset.union, step)
    return (x for x, registers in late if x.product is not None and registers & x.reads)


def copied(x: Instruction) -> list[int]:
    """The register whose number an instruction copies as it is, if it does that."""
    whole = x.name == "MOV" or (x.name.startswith("IMAD.MOV") and x.operands[1] == x.operands[2] == "RZ")
    return sorted(x.reads) if whole and x.always else []


def set_elsewhere(code: list[Instruction]) -> Iterator[Instruction]:
    """Products with a register that may not be set, or of operand A was not where the others were: a copy was where
    what it copies was. State: {register: the runs that last set it}, NOWHERE where none may have."""
    run_of = {i: begin for begin, run in straight(code).items() for i in run}

    def step(i: int, x: Instruction, state: dict) -> dict:
        if not x.writes:
            return state
        source = copied(x)
        here = state.get(source[0], NOWHERE) if source else frozenset((run_of[i],))
        return state | {r: here if x.always else here | state.get(r, NOWHERE) for r in x.writes}

    def join(x: dict, y: dict) -> dict:
        return {r: x.get(r, NOWHERE) | y.get(r, NOWHERE) for r in x.keys() | y.keys()}

    for x, places in states(code, {}, join, step):
        if x.product is not None:
            unset = any(places.get(r, NOWHERE) >= NOWHERE for r in x.reads)
            if unset or len({places[r] for r in x.product.a}) > 1:
                yield x


def uniform(x: Instruction) -> tuple[Registers, Registers]:
    """The uniform registers that an instruction reads and writes. The descriptors of a product fill four, the last two
    where operand A is in registers."""
    found: tuple[set[int], set[int]] = (set(), set())
    for i, operand in enumerate(x.operands):
        for kind, at in re.findall(r"(g?desc\[|\[)?(?:R\d+(?:\.64)?\+)?(?<![A-Z])UR(\d+)", operand):
            pair = x.name.startswith("U") and (".64" in x.name or ("WIDE" in x.name and i == 0))
            first, size = int(at), 2 if pair or kind == "desc[" else 1
            if kind == "desc[" and f"+UR{first - 1}" in x.text:  # two registers: a uniform address, and a descriptor
                size = 1
            if kind == "gdesc[":
                first, size = (first + 2, 2) if x.product is not None and x.product.a else (first, 4)
            written = i == 0 and not kind and x.name.startswith(("U", "R2UR", "S2UR", "REDUX", "VOTEU"))
            found[written].update(range(first, first + size))
    return frozenset(found[0]), frozenset(found[1])


def never_set(code: list[Instruction]) -> Iterator[Instruction]:
    """What reads a uniform register that not every way to it has set: ptxas 12.8 takes such a one for the address of an
    operand in shared memory, where one buffer holds operands of two layouts one after the other. State: registers
    that are set."""
    set_before = states(code, frozenset(), frozenset.intersection, lambda i, x, state: state | uniform(x)[1])
    return (x for x, state in set_before if not uniform(x)[0] <= state)


def not_reached(code: list[Instruction]) -> Iterator[Instruction]:
    """Products that no way from the first instruction leads to: the others say nothing of them."""
    reached = {id(x) for x, _ in states(code, None, lambda *_: None, lambda *_: None)}
    return (x for x in code if x.product is not None and id(x) not in reached)


def faults(code: list[Instruction]) -> list[str]:
    """What is wrong with the registers of products, in words."""
    if not any(x.product for x in code):
        return []
    checks = (not_reached, touched_in_flight, set_behind_the_fence, set_elsewhere, never_set)
    return sorted({f"{check.__name__}: {x.text}" for check in checks for x in check(code)})
