"""Compile for sm_90a, without a GPU, what `power_pair` of packed tokens launches; one JSON line per kernel.

python power_gate.py D DTYPE [+ D DTYPE ...]

`+` begins another call; every line says of which call it is, the first is 0. Not under TRITON_INTERPRET: interpreted
functions cannot be compiled.
"""

import json
import sys
from unittest.mock import patch

import torch

from hla_kernels.features import power_kernels
from tests.ops.fused.offline.gate import Recorder, calls_of
from tests.ops.fused.offline.judge import compile_call


def main(call: int, d: int, dtype: torch.dtype) -> None:
    """q with 6 heads, k with 2; rows are read 16 bytes at a time."""
    q, k = torch.empty(2, 197, 10, d, dtype=dtype, device="meta").split([6, 4], 2)
    given = q, k[:, :, :2], torch.empty(6, device="meta"), torch.empty(2, device="meta")
    Recorder.calls = []
    with patch.object(power_kernels, "power_tiles", Recorder(power_kernels.power_tiles)):
        power_kernels.backward(power_kernels.forward(*given), *given)
    for launched in Recorder.calls:
        assert launched[2]["ALIGN"] * dtype.itemsize == 16
        print(json.dumps({"call": call, **compile_call(*launched)}), flush=True)


if __name__ == "__main__":
    for i, words in enumerate(calls_of(sys.argv[1:])):
        main(i, int(words[0]), getattr(torch, words[1]))
