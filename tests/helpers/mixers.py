"""Mixers of a small host, and their inputs."""

import math

import torch

from zoo.mixers import MIXERS, Context, build_mixer
from zoo.mixers.delta import DeltaMixer

DELTA = [name for name, kind in MIXERS.items() if issubclass(kind, DeltaMixer)]
MATRICES = {  # linear mixer -> its N x N weights, of those A [B, H, N, N] of linear attention
    "la": lambda a: a,
    "hla2": lambda a: a @ a.mT,
    "ahla": lambda a: a @ a,
    "hla3": lambda a: a @ a.mT @ a,
    "poly": lambda a: a,
}
GRIDLESS = [name for name, kind in MIXERS.items() if not kind.defaults.needs_grid]
DIM, HEADS, HEAD_DIM, GRID, PREFIX = 24, 3, 8, (4, 5), 1


def inputs(seed: int = 0, batch: int = 2, dtype: torch.dtype = torch.float64):
    g = torch.Generator().manual_seed(seed)
    n = PREFIX + math.prod(GRID)
    q, k, v = (torch.randn(batch, n, HEADS, HEAD_DIM, generator=g, dtype=dtype) for _ in range(3))
    x = torch.randn(batch, n, DIM, generator=g, dtype=dtype)
    return q, k, v, Context(x=x, grid=GRID, prefix=PREFIX)


def make(name: str, **options):
    return build_mixer(name, DIM, HEADS, HEAD_DIM, grid=GRID, prefix=PREFIX, dtype=torch.float64, **options)


def options_of(name: str, **wanted):
    """The given options without those that the mixer does not have."""
    return {key: value for key, value in wanted.items() if hasattr(MIXERS[name].defaults, key)}
