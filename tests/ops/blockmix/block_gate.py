"""Compile for sm_90a, without a GPU, what a bfloat16 call of block mixing launches; one JSON line per kernel.

python block_gate.py OPTIONS B H GRID BLOCKS D [rotary | shared | ones] [+ OPTIONS ...]

OPTIONS: options of `mhla`, as JSON. shared: devices share the tokens. ones: v is a tensor of ones, with which `mhla`
computes denominators. `+` begins another call; every line says of which call it is, the first is 0.
"""

from __future__ import annotations

import json
import sys

import torch

from hla_kernels.blockmix import fused
from hla_kernels.blockmix.fused import launch
from hla_kernels.blockmix.fused import pair_launch as pairs
from hla_kernels.blockmix.fused.mixing import launch as mixing
from hla_kernels.features import map_kernels
from tests.ops.blockmix.fused_cases import options_of
from tests.ops.fused.offline.gate import Recorder, calls_of
from tests.ops.fused.offline.judge import compile_call, key
from zoo.mixers.base import ONES


def record(o, b: int, h: int, d: int, kind: str = "") -> list:
    """(kernel, arguments, keywords) of each launch of a forward and a backward of packed tokens."""
    kernels = [
        (module, name, kernel)
        for module in (launch, mixing, pairs, map_kernels)
        for name, kernel in vars(module).items()
        if hasattr(kernel, "arg_names")
    ]
    Recorder.calls = []
    n, m = o.layout.n_tokens, o.layout.n_blocks
    qkv = torch.empty(b, n, 3, h, d, dtype=torch.bfloat16, device="meta")
    q, k, v = qkv.unbind(2)
    if kind == "ones":
        v = v.new_empty(ONES).expand(b, n, h, ONES)
    grad, matrix = torch.empty_like(v), torch.empty(m, m, device="meta")
    turns = tuple(torch.empty(n, d // 2, device="meta") for _ in range(2)) if kind == "rotary" else None
    try:
        for module, name, kernel in kernels:
            setattr(module, name, Recorder(kernel))
        if kind == "shared":
            shared_call((q, k, v), matrix, o, grad)
            return Recorder.calls
        saved = fused.forward(q, k, v, matrix, o, None, turns, True)[1]
        outs = *torch.empty_like(qkv).unbind(2)[:2], torch.empty_like(grad)
        fused.backward(grad, q, k, v, matrix, o, None, turns, outs, saved)
    finally:
        for module, name, kernel in kernels:
            setattr(module, name, kernel)
    return Recorder.calls


def shared_call(tokens, matrix, o, grad) -> None:
    """Forward and backward of tokens that devices share."""
    from hla_kernels.blockmix.fused.shared import Shared

    share = torch.empty(o.layout.n_blocks, 3, dtype=torch.int32, device="meta")
    call = Shared(*tokens, matrix, o._replace(scale=1.0), None, None, share)
    saved = torch.empty(call.size().saved, device="meta")
    call.local(saved)
    call.outputs(saved, torch.empty_like(grad))
    call.token_grads(grad, saved, *call.operator_grads(grad, saved))


def main(at: int, options: str, b: str, h: str, grid: str, blocks: str, d: str, kind: str = "") -> None:
    """Compile each launch once."""
    sizes = (tuple(map(int, x.split(","))) for x in (grid, blocks))
    o = options_of(*sizes, **json.loads(options))
    for call in {key(*call): call for call in record(o, int(b), int(h), int(d), kind)}.values():
        print(json.dumps({"call": at, **compile_call(*call)}), flush=True)


if __name__ == "__main__":
    for i, words in enumerate(calls_of(sys.argv[1:])):
        main(i, *words)
