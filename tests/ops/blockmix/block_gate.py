"""Compile for sm_90a, without a GPU, what a bfloat16 call of block mixing launches; one JSON line per kernel.

python block_gate.py MAP NORMALIZE B H GRID BLOCKS D
"""

from __future__ import annotations

import json
import sys

import torch

from hla_kernels.blockmix import fused
from hla_kernels.blockmix.fused import launch
from tests.ops.blockmix.fused_cases import options_of
from tests.ops.fused.offline_gate import Recorder, compile_call


def main(feature_map: str, normalize: str, b: str, h: str, grid: str, blocks: str, d: str) -> None:
    """Record a forward and a backward of packed tokens, then compile each launch once."""
    for name, kernel in vars(launch).copy().items():
        if hasattr(kernel, "arg_names"):
            setattr(launch, name, Recorder(kernel))
    sizes = (tuple(map(int, x.split(","))) for x in (grid, blocks))
    o = options_of(*sizes, feature_map=feature_map, normalize=normalize == "1")
    n, m = o.layout.n_tokens, o.layout.n_blocks
    qkv = torch.empty(int(b), n, 3, int(h), int(d), dtype=torch.bfloat16, device="meta")
    grad, mixing = torch.empty_like(qkv[:, :, 0]), torch.empty(m, m, device="meta")
    saved = fused.forward(*qkv.unbind(2), mixing, o, None, True)[1]
    fused.backward(grad, *qkv.unbind(2), mixing, o, None, torch.empty_like(qkv).unbind(2), saved)
    seen = set()
    for fn, args, kwargs in Recorder.calls:
        types = [x.dtype for x in args if isinstance(x, torch.Tensor)]
        key = f"{fn.__name__} {types} {sorted(kwargs.items(), key=str)}"
        if key not in seen:
            seen.add(key)
            print(json.dumps(compile_call(fn, args, kwargs)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
