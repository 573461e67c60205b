"""Mixing of the moments of all blocks. Reading order: kernels, launch."""

from .launch import add, mixed, mixed_back

__all__ = ["add", "mixed", "mixed_back"]
