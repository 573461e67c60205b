"""Compilation of one recorded launch for sm_90a, without a GPU, and what is looked for in the machine code.

Not under TRITON_INTERPRET: interpreted functions cannot be compiled.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from tests.ops.fused.offline.pipeline import overwritten
from tests.ops.fused.offline.sass import TOOLS, disassemble, faults, in_loops
from tests.ops.fused.offline.verdicts import kept

TYPES = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int64: "*i64", torch.int32: "*i32",
    torch.uint8: "*u8", torch.int8: "*i8",
}  # fmt: skip
OPTIONS = ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion")


def constant(x) -> bool:
    """Whether an element of a tuple is compiled into the kernel."""
    return x is None or (isinstance(x, int) and x == 1)


def type_of(x):
    """The Triton type of a launch argument."""
    if isinstance(x, torch.Tensor):
        return TYPES[x.dtype]
    if x is None:
        return "constexpr"
    if isinstance(x, tuple):  # Triton takes a 1 in a tuple for a constant, whatever do_not_specialize says
        return tuple("constexpr" if constant(y) else type_of(y) for y in x)
    return "fp32" if isinstance(x, float) else "i32"


def one_by_one(ptx: str) -> bool:
    """Whether the assembler says so."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        words = [get_ptxas(90).path, "-arch=sm_90a", "-v", file.name, "-o", os.devnull]
        said = subprocess.run(words, capture_output=True, text=True, check=True).stderr
    return "instructions are serialized" in said


def constant_operands(ttgir: str, ptx: str) -> list[str]:
    """Operands A in registers that are constants: Triton 3.6 makes them one register several times, and of four ptxas
    13.4 then sets the first before the product and the others behind it."""
    constants = set(re.findall(r"(%\w+) = (?:arith\.constant|tt\.splat).*dot_op<\{opIdx = 0", ttgir))
    found = constants & set(re.findall(r"warp_group_dot (%\w+)", ttgir))
    tuples = re.findall(r"wgmma\.mma_async[^;]*\}, *(\{[^}]*\})", ptx)
    return [*found, *(a for a in tuples if len(set(re.findall(r"%\w+", a))) < a.count("%"))]


def compile_call(fn, args, kwargs, products: bool = False) -> dict:
    """Registers, stack bytes, shared memory, products with operand A in registers and `in_loops` of one recorded
    launch, and with `products` `one_by_one`: compiled now, or kept from an earlier compilation."""
    launch = f"{key(fn, args, kwargs)} {products}"
    return kept(fn, launch, lambda: _compiled(fn, args, kwargs, products))


def _compiled(fn, args, kwargs, products: bool) -> dict:
    source, options = source_of(fn, args, kwargs)
    return judged(fn, source, options, products)


def source_of(fn, args, kwargs) -> tuple[ASTSource, dict]:
    """What Triton compiles for a recorded launch, and its options."""
    kwargs = dict(kwargs)
    options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
    given = dict(zip(fn.arg_names, args, strict=False))
    signature, constants, attributes = {}, {}, {}
    for i, name in enumerate(fn.arg_names):
        if name in kwargs or given[name] is None:
            signature[name], constants[(i,)] = "constexpr", kwargs.get(name)
            continue
        signature[name] = type_of(given[name])
        if isinstance(given[name], tuple):
            constants |= {(i, j): x for j, x in enumerate(given[name]) if constant(x)}
            # of numbers in a tuple Triton notes what 16 divides, whatever do_not_specialize says
            even = [j for j, x in enumerate(given[name]) if isinstance(x, int) and x % 16 == 0]
            attributes |= {(i, j): [["tt.divisibility", 16]] for j in even}
        if isinstance(given[name], torch.Tensor):
            attributes[(i,)] = [["tt.divisibility", 16]]
    return ASTSource(fn, signature, constants, attributes), options


def usage(cubin: str) -> tuple[int, int]:
    """Registers and stack bytes of the kernel in a file."""
    words = [os.path.join(TOOLS, "cuobjdump"), "-res-usage", cubin]
    text = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", text).groups())
    return registers, stack


def judged(fn, source: ASTSource, options: dict, products: bool = False) -> dict:
    """What `compile_call` says of a kernel, compiled now. Asserts that it has none of the faults of the compilers."""
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        registers, stack = usage(file.name)
        ptx = compiled.asm["ptx"]
        code = disassemble(file.name) if stack > 0 or "wgmma.mma_async" in ptx else []  # else nothing to look for
    sizes = {"registers": registers, "stack": stack, "shared": compiled.metadata.shared}
    sizes["in_loops"] = in_loops(code) if stack > 0 else 0
    sizes["from_registers"] = len(re.findall(r"wgmma\.mma_async[^;]*\}, *\{", ptx))
    found = constant_operands(compiled.asm["ttgir"], ptx) + overwritten(compiled.asm["ttgir"]) + faults(code)
    assert not found, f"{fn.__name__}: {found}"
    return {"kernel": fn.__name__, **sizes, **({"one_by_one": one_by_one(ptx)} if products else {})}


def key(fn, args, kwargs) -> str:
    """What makes Triton compile a launch: constants, types, and of numbers in tuples whether they are 1 or multiples of
    16 (those outside are in do_not_specialize: asserted)."""
    free = {fn.arg_names[i] if isinstance(i, int) else i for i in fn.do_not_specialize}
    numbers = {name for name, x in zip(fn.arg_names, args, strict=False) if isinstance(x, int)}
    assert numbers <= free, numbers - free
    in_tuples = [
        [(y == 1, y % 16 == 0) if isinstance(y, int) else None for y in x] if isinstance(x, tuple) else None
        for x in args
    ]
    return f"{fn.__name__} {[type_of(x) for x in args]} {in_tuples} {sorted(kwargs.items(), key=str)}"
