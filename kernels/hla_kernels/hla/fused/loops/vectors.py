"""Sums and matrix-vector products by tensor cores, instead of reductions across threads.

And numbers in the layout of their operands.

bfloat16 tokens: a float32 vector is two columns, its rounding and what that left, or three (EXACT). float32 tokens, and
float16, which lacks the exponents: elementwise.
"""

import triton
import triton.language as tl

from ..tiles import rowdot, zeros2


@triton.jit
def as_row(x):
    """Return a vector as one row of a token tile."""
    return x[0][None, :], x[1][None, :]


@triton.jit
def column(x, dtype: tl.constexpr, EXACT: tl.constexpr = False):
    """x [K] as a matrix [K, 16] of `dtype` whose rows sum to x."""
    high = x.to(dtype)
    left = x - high.to(tl.float32)
    low = left.to(dtype)
    c = tl.arange(0, 16)[None, :]
    zero = tl.zeros([x.shape[0], 16], dtype)
    if EXACT:
        zero = tl.where(c == 2, (left - low.to(tl.float32)).to(dtype)[:, None], zero)
    return tl.where(c == 0, high[:, None], tl.where(c == 1, low[:, None], zero))


@triton.jit
def columns(x, dtype: tl.constexpr, W: tl.constexpr, EXACT: tl.constexpr = False):
    """Return `column` of both parts of a vector, or the vector; dtype: of the features in the product."""
    out = x
    if dtype == tl.bfloat16:
        c1 = column(x[0], dtype, EXACT)
        c2 = c1
        if W.D2 > 0:
            c2 = column(x[1], dtype, EXACT)
        out = (c1, c2)
    return out


@triton.jit
def times_vector(x, c, W: tl.constexpr):
    """Return the product of each token of a tile with the vector of `columns`, [BN] in float32."""
    if x[0].dtype == tl.bfloat16:
        y = tl.dot(x[0], c[0])
        if W.D2 > 0:
            y = tl.dot(x[1], c[1], y)
        out = tl.sum(y, 1)
    else:
        out = rowdot(x, as_row(c), W)
    return out


@triton.jit
def common_row(x, dtype: tl.constexpr, W: tl.constexpr):
    """Return a vector for `add_common`: as rows of a matrix, where tokens have its exponents."""
    out = x
    if dtype == tl.bfloat16:
        c1, c2 = columns(x, dtype, W)
        out = (tl.trans(c1), tl.trans(c2))
    return out


@triton.jit
def ones_tile(ptr, BN: tl.constexpr):
    """Ones [BN, 16] of the dtype of ptr, of which nothing is read. What is loaded stays in shared memory as operand A;
    a constant would be one register four times over, and ptxas 13.4 then sets only the first of four before a product.
    """
    never = (tl.arange(0, 16) < 0)[None, :]
    return tl.load(ptr + tl.zeros([BN, 16], tl.int32), mask=never, other=1.0)


@triton.jit
def add_common(acc, x, ones, W: tl.constexpr):
    """acc + the vector of `common_row` for every token of a tile; as a product with `ones_tile` it holds no registers
    between tiles."""
    o1, o2 = acc
    if x[0].dtype == tl.bfloat16:
        o1 = tl.dot(ones, x[0], o1)  # rows of a matrix beyond the two are zero
        if W.D2 > 0:
            o2 = tl.dot(ones, x[1], o2)
    else:
        o1 = o1 + x[0][None, :]
        if W.D2 > 0:
            o2 = o2 + x[1][None, :]
    return o1, o2


@triton.jit
def beside(x, r):
    """Return x in the layout of the product r, in which row sums need few exchanges of threads. It is x | 0; the
    compiler detects the 0 only after it has chosen layouts."""
    zero = (r.to(tl.uint32, bitcast=True) >> 16) >> 16
    return (x.to(tl.uint32, bitcast=True) | zero).to(tl.float32, bitcast=True)


@triton.jit
def reciprocal(den, live, dtype: tl.constexpr):
    """1 / den, 0 where not live. For bfloat16 tokens one instruction, without scaling for numbers near the greatest."""
    if dtype == tl.bfloat16:
        inverse = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [den], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        inverse = 1.0 / den
    return tl.where(live, inverse, 0.0)


@triton.jit
def begin_pairs(BN: tl.constexpr, W: tl.constexpr):
    """Return the accumulator of `add_pairs`."""
    x2 = tl.zeros([1], tl.float32)
    if W.D2 > 0:
        x2 = tl.full([BN // 16, 8, W.D2], 0.0, tl.float32)
    return tl.full([BN // 16, 8, W.D1], 0.0, tl.float32), x2


@triton.jit
def pairs(x):
    """Rows 8 apart added: those that one thread holds of a product on tensor cores."""
    return tl.sum(tl.reshape(x, [x.shape[0] // 16, 2, 8, x.shape[1]]), 1)


@triton.jit
def add_pairs(s, w, x, W: tl.constexpr):
    """Return s + w x for a tile of tokens x and a number w of each: their sum without an exchange of threads."""
    if W.D2 > 0:
        out = (add_pair(s[0], w, x[0]), add_pair(s[1], w, x[1]))
    else:
        out = (s[0] + pairs(x[0] * w[:, None]), s[1])
    return out


@triton.jit
def two_rows(x):
    """Rows 8 apart, as two tiles."""
    return tl.split(tl.permute(tl.reshape(x, [x.shape[0] // 16, 2, 8, x.shape[1]]), (0, 2, 3, 1)))


@triton.jit
def add_pair(s, w, x):
    """Return s + `pairs` of w x, without a tile of products."""
    x1, x2 = two_rows(x)
    w1, w2 = two_rows(tl.broadcast_to(w[:, None], x.shape))
    return (s + x1 * w1) + x2 * w2


@triton.jit
def end_pairs(s, W: tl.constexpr):
    """Return the vector that `add_pairs` summed, or s if it is that."""
    out = s
    if len(s[0].shape) > 1:
        s2 = zeros2(W)[1]
        if W.D2 > 0:
            s2 = tl.sum(tl.sum(s[1], 1), 0)
        out = (tl.sum(tl.sum(s[0], 1), 0), s2)
    return out
