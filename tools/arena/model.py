"""Network of the arena: embedding, blocks of a mixer and an MLP, and a head per token."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zoo
from arena.tasks import Task

WIDTH = 4  # tokens that the short convolution reads


class ShortConvolution(nn.Module):
    """x + depthwise convolution of each token and the 3 before it, [B, N, C] -> [B, N, C]."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH, dim).uniform_(-(WIDTH**-0.5), WIDTH**-0.5))

    def forward(self, x: Tensor) -> Tensor:
        earlier = F.pad(x, (0, 0, WIDTH - 1, 0))
        return x + sum(self.weight[i] * earlier[:, i : i + x.shape[1]] for i in range(WIDTH))


class Block(nn.Module):
    """Pre-norm block: x + attention(conv(norm(x))), then x + mlp(norm(x)). [B, N, C] -> [B, N, C]."""

    def __init__(self, attention: nn.Module, dim: int, convolution: bool, causal: bool) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(dim), attention, nn.LayerNorm(dim)
        self.conv = ShortConvolution(dim) if convolution else nn.Identity()
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.causal = causal

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.conv(self.norm1(x)), is_causal=self.causal)
        return x + self.mlp(self.norm2(x))


class Network(nn.Module):
    """Network for one task: symbols [B, N] or numbers [B, N, channels] -> logits [B, N, classes] or numbers [B, N].

    Sequences get a learned position embedding, initially as large as the symbols; points get none. For compression,
    every output is computed from the last token and the position. causal: every output from the tokens before it.
    """

    def __init__(
        self, task: Task, size: int, mixer: str, options: dict, dim: int, heads: int, layers: int, causal: bool = False
    ) -> None:
        super().__init__()
        grid = task.grid(size)
        self.one_token = task.one_token
        self.embed = nn.Embedding(task.inputs(size), dim) if task.symbols else perceptron(task.inputs(size), dim)
        places = grid[0] if task.symbols and grid is not None else 0
        self.positions = nn.Parameter(torch.randn(places, dim)) if places else None
        arms = (zoo.Attention(dim, heads, mixer=mixer, grid=grid, layer_index=i, **options) for i in range(layers))
        self.blocks = nn.Sequential(*(Block(arm, dim, task.convolution, causal) for arm in arms))
        self.norm = nn.LayerNorm(dim)
        self.decoder = perceptron(2 * dim, dim) if self.one_token else nn.Identity()
        self.head = nn.Linear(dim, task.outputs(size) if task.outputs else 1)

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.embed(inputs)
        if self.positions is not None:
            x = x + self.positions
        x = self.norm(self.blocks(x))
        if self.one_token:
            assert self.positions is not None
            x = torch.cat([x[:, -1:].expand_as(x), self.positions.expand_as(x)], -1)
        x = self.decoder(x)
        with torch.autocast(x.device.type, enabled=False):  # bfloat16 rounds numbers to 0.4 %
            out = self.head(x.float())
        return out if out.shape[-1] > 1 else out.squeeze(-1)


def perceptron(inputs: int, dim: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
