"""Compilation of the blocks of a model by torch.compile."""

import torch
from torch import nn

AVX2 = 256  # bits


def compile_block(block: nn.Module) -> None:
    """Compile a block in place.

    On CPUs with AVX-512 the code uses AVX2, since torch 2.14 compiles a layer norm of the sum of a transposed float32
    tensor and a bfloat16 tensor to AVX-512 code that returns NaN.
    """
    on_cpu = all(p.device.type == "cpu" for p in block.parameters())
    faulty = on_cpu and torch.backends.cpu.get_cpu_capability() == "AVX512"
    block.compile(options={"cpp.simdlen": AVX2} if faulty else None)
