"""Mixing of the moments of all blocks. Reading order: kernels, launch."""

from .launch import add, mixed, mixed_back, sum_of_mixing

__all__ = ["add", "mixed", "mixed_back", "sum_of_mixing"]
