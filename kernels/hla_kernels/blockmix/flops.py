"""Floating-point operations of block mixing, for torch.utils.flop_counter.FlopCounterMode.

Only matrix products are counted, as one multiplication and one addition per term, by running the torch form on meta
tensors: moments, their mixing, products of mixed moments, read-out; in the causal form also scores and values inside a
block. The denominator and rotations are not counted; narrow blocks count as wide ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, register_flop_formula

from .operator import options_of
from .torch_form import evaluate, gradient

Shape = tuple[int, ...]


def _register(name: str, packed: bool) -> None:
    """Register the formulas of the operators of q, k, v or of one packed qkv [B, N, 3, H, D]."""

    def counted(args: tuple, grads: tuple[Shape, ...]) -> int:
        tokens = ((*args[0][:2], *args[0][3:]),) * 3 if packed else args[:3]
        mixing, _, _, _, *options = args[1 if packed else 3 :]
        shapes = (*grads, *tokens, mixing)
        given = (*(torch.empty(x, device="meta") for x in shapes), options_of(*options[:12])._replace(normalize=False))
        with FlopCounterMode(display=False) as counter:
            gradient(*given, None, None) if grads else evaluate(*given)  # type: ignore[call-arg, arg-type]
        return counter.get_total_flops()

    @register_flop_formula(getattr(torch.ops.hla_kernels, name))
    def forward(*args: Any, out_shape: Any = None) -> int:
        return counted(args, ())

    @register_flop_formula(getattr(torch.ops.hla_kernels, f"{name}_backward"))
    def backward(grad: Shape, saved: Shape, *args: Any, out_shape: Any = None) -> int:
        return counted(args, (grad,))


_register("mhla", False)
_register("mhla_qkvpacked", True)
