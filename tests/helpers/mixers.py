"""Mixers of a small host, and their inputs."""

import math

import torch

from zoo.mixers import MIXERS, Context, build_mixer

DELTA = ("hdla", "gdn", "deltanet", "gla", "mamba2", "retnet")
OWN_TESTS = (
    *("softmax", "mhla", "mhla2", "taylor2", "multipole", "mala", "rala", "inline", "mesa", "resolvent"), *DELTA,
)  # fmt: skip
LINEAR = [name for name in MIXERS if name not in OWN_TESTS]
DIM, HEADS, HEAD_DIM, GRID, PREFIX = 24, 3, 8, (4, 5), 1


def inputs(seed: int = 0, batch: int = 2, dtype: torch.dtype = torch.float64):
    g = torch.Generator().manual_seed(seed)
    n = PREFIX + math.prod(GRID)
    q, k, v = (torch.randn(batch, n, HEADS, HEAD_DIM, generator=g, dtype=dtype) for _ in range(3))
    x = torch.randn(batch, n, DIM, generator=g, dtype=dtype)
    return q, k, v, Context(x=x, grid=GRID, prefix=PREFIX)


def make(name: str, **options):
    return build_mixer(name, DIM, HEADS, HEAD_DIM, dtype=torch.float64, **options)
