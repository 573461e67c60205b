"""Two-sided calls compiled for other GPUs than the tested ones: registers, stack bytes and shared memory per kernel.

    python -m tests.ops.fused.offline.other_gpus

Prints a line for each kernel that spills registers, needs more shared memory than the GPU has, or does not compile, and
how many were compiled. Such kernels fail the first-use check on that GPU, or are slower there.
"""

from __future__ import annotations

import contextlib
import io
import tempfile

import triton
from triton.backends.compiler import GPUTarget

from tests.ops.fused.offline import judge
from tests.ops.fused.offline.gate import record

SHARED = {80: 166912, 89: 101376, 100: 232448}  # compute capability -> bytes of shared memory per block
RATIO = '{"feature_map": "elu1", "normalize": true}'
CALLS = (
    ("linear_attention", "{}", 256, 6, 197, 64), ("linear_attention", RATIO, 32, 16, 1024, 72),
    ("hla2", "{}", 256, 6, 197, 64), ("ahla", RATIO, 64, 6, 1025, 64), ("hla2", "{}", 2, 12, 32760, 128),
    ("hla3", '{"center": "k", "mean_path": true}', 2, 12, 32760, 128), ("polynomial", "{}", 64, 6, 1025, 64),
)  # fmt: skip


def main() -> None:
    for capability, most in SHARED.items():
        seen: set[str] = set()
        for op, options, *sizes in CALLS:
            for launch in record(op, options, *sizes):
                name, which = launch[0].__name__, judge.key(*launch)
                if which in seen:
                    continue
                seen.add(which)
                where = f"sm_{capability} {op} {options} D = {sizes[3]}: {name}"
                source, given = judge.source_of(*launch)
                try:
                    with contextlib.redirect_stderr(io.StringIO()):
                        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=given)
                except Exception as error:  # of the compiler
                    print(f"{where} does not compile: {str(error).splitlines()[0][:100]}", flush=True)
                    continue
                with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
                    file.write(compiled.asm["cubin"])
                    file.flush()
                    registers, stack = judge.usage(file.name)
                if stack > 0 or compiled.metadata.shared > most:
                    print(f"{where} {registers=} {stack=} shared={compiled.metadata.shared}", flush=True)
        print(f"sm_{capability}: {len(seen)} kernels compiled with Triton {triton.__version__}")


if __name__ == "__main__":
    main()
