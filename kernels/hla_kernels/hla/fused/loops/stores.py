"""Stores of token tiles, and of the two numbers per token of a ratio.

Apart, since four files of passes (`first`, `writes`, `wide`, `ratio`) use them.
"""

import triton
import triton.language as tl

from ..tiles import store_rows


@triton.jit
def store_tokens(ptr, i, stride, live, x, W: tl.constexpr):
    """Store rows of tokens like `store_rows`. Rows that end in half a sector of 32 bytes are written by one
    instruction: two blocks of columns would write twice as many partial sectors."""
    dtype: tl.constexpr = ptr.dtype.element_ty
    if W.D2 > 0 and W.D % 16 > 0 and dtype != tl.float32:
        BN: tl.constexpr = x[0].shape[0]
        x2 = tl.broadcast_to(x[1].to(dtype)[:, None, :], [BN, W.D1 // W.D2, W.D2])  # columns beyond D are not written
        whole = tl.join(x[0].to(dtype), tl.reshape(x2, [BN, W.D1]))
        whole = tl.reshape(tl.permute(whole, (0, 2, 1)), [BN, 2 * W.D1])
        c = tl.arange(0, 2 * W.D1)
        tl.store(ptr + i[:, None] * stride + c[None, :], whole, mask=live[:, None] & (c < W.D)[None, :])
    else:
        store_rows(ptr, i, stride, live, x, W)


@triton.jit
def put_ratio(ratio, i, live, inverse, total):
    """Store 1 / den and d loss / d den of tokens i in ratio [*, 2]. As neighbours they need one layout conversion
    within a warp, without a barrier; two separate rows would need four."""
    tl.store(ratio + 2 * i[:, None] + tl.arange(0, 2)[None, :], tl.join(inverse, total), mask=live[:, None])


@triton.jit
def get_ratio(ratio, i, live):
    """Load the values of `put_ratio` for tokens i, 0 where not live."""
    inverse = tl.load(ratio + 2 * i, mask=live, other=0.0)
    return inverse, tl.load(ratio + 2 * i + 1, mask=live, other=0.0)
