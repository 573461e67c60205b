"""Compile for sm_90a, without a GPU, exactly what a call would launch; print one JSON line per kernel.

python gate.py OP OPTIONS B H N D[xDv] [mask | packed | shared | float32 | float16 | inference | products] [+ OP ...]

OPTIONS: JSON of a Spec. `+` begins another call; every line says of which call it is, the first is 0.

products: whether the assembler waits for every product on tensor cores, one by one, is told too.

Not under TRITON_INTERPRET: interpreted functions cannot be compiled.
"""

from __future__ import annotations

import json
import sys

import torch

from hla_kernels.features import map_kernels
from hla_kernels.hla import fused
from hla_kernels.hla.fused import Spec, launch
from hla_kernels.sequences import Sequences
from tests.ops.fused.offline.judge import compile_call, key

BACKWARD = ("hla_summed_middle", "hla_apply_grads")
COMPILED: dict[str, dict] = {}


class Recorder:
    """Stands in for a kernel: kernel[grid](...) is kept instead of launched."""

    calls: list = []  # noqa: RUF012

    def __init__(self, fn):
        self.fn = fn

    def __getitem__(self, grid):
        return lambda *args, **kwargs: self.calls.append((self.fn, args, kwargs))


def sequences_of(kind: str, b: int, n: int) -> Sequences:
    """Those of a call: "" all tokens, "mask" or "packed" (then B sequences behind each other)."""
    if kind == "mask":
        return Sequences(torch.empty(b, n, dtype=torch.bool, device="meta"))
    if kind == "packed":
        return Sequences(None, torch.empty(b + 1, dtype=torch.int32, device="meta"), n)
    return Sequences()


def record(op: str, options: str, b: int, h: int, n: int, d: int, kind: str = "", dv: int = 0) -> list:
    """(kernel, arguments, keywords) of each launch of a forward and, unless `kind` is "inference", a backward of packed
    tokens, bf16 unless `kind` is a dtype; "turned": of tokens that lie as [B, H, N, D];
    "shared": of tokens that devices share. dv: channels of values, by default of queries."""
    kernels = [
        (module, name, kernel)
        for module in (launch, map_kernels)
        for name, kernel in vars(module).items()
        if hasattr(kernel, "arg_names")
    ]
    Recorder.calls = []
    rows = (1, b * n) if kind == "packed" else (b, n)
    dtype = {"float32": torch.float32, "float16": torch.float16}.get(kind, torch.bfloat16)
    qkv = torch.empty(*rows, 3, h, d, dtype=dtype, device="meta")
    if kind == "turned":
        qkv = torch.empty(b, 3, h, n, d, dtype=dtype, device="meta").permute(0, 3, 1, 2, 4)
    grad = torch.empty(*rows, h, dv or d, dtype=dtype, device="meta")
    c = torch.empty(h, 4, device="meta") if op == "polynomial" else None
    q, k, v = qkv.unbind(2)
    v = torch.empty_like(grad) if dv else v
    spec, seqs = Spec(op, **json.loads(options)), sequences_of(kind, b, n)
    try:
        for module, name, kernel in kernels:
            setattr(module, name, Recorder(kernel))
        if kind == "shared":
            shared_call(q, k, v, c, spec, grad)
            return Recorder.calls
        saved = fused.forward(q, k, v, c, spec, kind != "inference", seqs)[1]
        if kind != "inference":
            dq, dk, of_v = torch.empty_like(qkv).unbind(2)
            outs = (dq, dk, torch.empty_like(v) if dv else of_v)
            fused.backward(grad, q, k, v, c, spec, outs, saved, seqs)
    finally:
        for module, name, kernel in kernels:
            setattr(module, name, kernel)
    return Recorder.calls


def shared_call(q, k, v, c, spec: Spec, grad) -> None:
    """Forward and backward of tokens that devices share."""
    from hla_kernels.hla.fused.shared import Shared, own_sums

    sums = own_sums(q, k, v, spec)
    call = Shared(spec, q, k, v, c, torch.empty(q.shape[0] * q.shape[2], 2, device="meta"), 2)
    buffer = launch.room_of(call.call())
    call.outputs(sums, torch.empty_like(grad), buffer)
    call.token_grads(grad, buffer, *call.readout_grads(grad, buffer))


def main(call: int, op: str, options: str, sizes: tuple[int, ...], kind: str = "", dv: int = 0) -> None:
    """Compile each launch, what several have in common once. Operand A in registers is what an assembler got wrong:
    none in the backward of higher orders without options."""
    for launched in record(op, options, *sizes, kind, dv):
        which, products = key(*launched), kind == "products"
        if which not in COMPILED or (products and "one_by_one" not in COMPILED[which]):
            COMPILED[which] = compile_call(*launched, products)
        found = COMPILED[which]
        never = options == "{}" and found["kernel"] in BACKWARD
        assert found["from_registers"] == 0 or not never, found
        print(json.dumps({"call": call, **found}), flush=True)


def calls_of(words: list[str]) -> list[list[str]]:
    """The words of each call."""
    calls: list[list[str]] = [[]]
    for word in words:
        calls.append([]) if word == "+" else calls[-1].append(word)
    return calls


if __name__ == "__main__":
    for i, words in enumerate(calls_of(sys.argv[1:])):
        *sizes, width = words[2:6]
        d, _, dv = width.partition("x")
        main(i, words[0], words[1], (*map(int, sizes), int(d)), "".join(words[6:]), int(dv or 0))
