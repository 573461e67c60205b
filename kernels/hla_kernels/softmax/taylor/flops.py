"""Floating-point operations of Taylor attention, for torch.utils.flop_counter.FlopCounterMode.

Only matrix products are counted, as one multiplication and one addition per term. Padding counts as tokens, and grouped
keys count once per query head. The backward is the forward again, and two products for each of its products.
"""

from __future__ import annotations

from typing import Any

from torch.utils.flop_counter import register_flop_formula

from .operator import OPERATORS
from .torch_form import by_state, multiplications

Shape = tuple[int, ...]


def _forward(count: int, tokens: tuple[Shape, ...]) -> int:
    q, _, v, *narrow = tokens if count > 1 else ((*tokens[0][:2], *tokens[0][3:]),) * 3
    b, n, h, d = q
    r = narrow[0][3] if narrow else 0
    return 2 * b * n * h * multiplications(n, d, r, v[3], by_state(n, d, r, v[3]))


def _register(count: int) -> None:
    own, back = OPERATORS[count]

    @register_flop_formula(own.overload.overloadpacket)
    def forward(*args: Any, out_shape: Any = None) -> int:
        return _forward(count, args[:count])

    @register_flop_formula(back.overload.overloadpacket)
    def backward(grad: Shape, saved: Shape, *args: Any, out_shape: Any = None) -> int:
        return 3 * _forward(count, args[:count])


for _count in OPERATORS:
    _register(_count)
