"""Compiled blocks against eager ones, with the sum that torch compiles to NaN for AVX-512."""

import torch
from torch import nn

from zoo.models.compiling import compile_block


class Block(nn.LayerNorm):
    def forward(self, x, y):
        return super().forward(x + y)


def test_a_layer_norm_of_a_transposed_residual():
    torch.manual_seed(0)
    block, x = Block(192), torch.randn(8, 192, 256).mT
    y = torch.randn(8, 256, 192, dtype=torch.bfloat16)
    expected = block(x, y)
    compile_block(block)
    torch.testing.assert_close(block(x, y), expected)
