"""Compile the kernels of a bfloat16 Taylor attention call for sm_90a without a GPU.

    python taylor_gate.py NORMALIZE B H N D R    (R: width of the narrow pair, or 0)

Prints one JSON line per kernel.
"""

from __future__ import annotations

import json
import sys

import torch

from hla_kernels.softmax.taylor import fused
from hla_kernels.softmax.taylor.fused import launch
from tests.ops.fused.offline.gate import Recorder
from tests.ops.fused.offline.judge import compile_call


def record(normalize: bool, b: int, h: int, n: int, d: int, r: int = 0) -> list:
    """(kernel, arguments, keywords) of each launch of a forward and a backward of packed tokens."""
    kernels = {name: kernel for name, kernel in vars(launch).items() if hasattr(kernel, "arg_names")}
    Recorder.calls = []
    qkv = torch.empty(b, n, 3, h, d, dtype=torch.bfloat16, device="meta")
    q2 = k2 = qkv.new_empty(b, n, h, r) if r else None
    rest = (torch.empty(h, 2, device="meta"), q2, k2, None, normalize, 0.125)
    try:
        for name, kernel in kernels.items():
            setattr(launch, name, Recorder(kernel))
        o, saved = fused.forward(*qkv.unbind(2), *rest, True)
        fused.backward(torch.empty_like(o), o, *qkv.unbind(2), *rest, (*torch.empty_like(qkv).unbind(2), q2, k2), saved)
    finally:
        for name, kernel in kernels.items():
            setattr(launch, name, kernel)
    return Recorder.calls


def main(normalize: str, *sizes: str) -> None:
    """Compile each launch."""
    for call in record(normalize == "1", *map(int, sizes)):
        print(json.dumps(compile_call(*call)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
