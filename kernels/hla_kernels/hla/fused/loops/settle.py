"""Waiting for tensor-core products at the end of a loop iteration.

Apart, since three families of kernels use it.
"""

import os

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def settled(acc):
    """Return acc, the sum of the last product of a loop iteration, after all products have finished.

    Products run asynchronously beyond their iteration. Triton (3.6, 3.8) tracks the buffers of loads for them, but not
    if a tile is read by something else too: the next tile then overwrites it too early. Reading a sum waits for all
    products.
    """
    if INTERPRETED:
        out = acc
    else:
        out = tl.inline_asm_elementwise("", "=f,0", [acc], dtype=tl.float32, is_pure=True, pack=1)
    return out


@triton.jit
def settled4(acc, X: tl.constexpr, Y: tl.constexpr, TWICE: tl.constexpr = False):
    """A matrix of `tiles.outer4`, whose products are the last of a turn, likewise. Where both widths are one part no
    tile is read twice, except with TWICE."""
    a11 = acc[0]
    a12 = acc[1]
    a21 = acc[2]
    if X.D2 > 0:
        a21 = settled(acc[2])
    elif Y.D2 > 0:
        a12 = settled(acc[1])
    elif TWICE:
        a11 = settled(acc[0])
    return a11, a12, a21, acc[3]
