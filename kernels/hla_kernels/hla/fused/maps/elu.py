"""elu and its derivative. Of bfloat16 numbers two at a time are taken apart and put together by instructions that the
compiler does not find: three where it takes up to six."""

import triton
import triton.language as tl


@triton.jit
def below(x):
    """1 - exp(x) where x < 0, otherwise 0: cut to 0..1 by the instruction that subtracts."""
    return tl.clamp(1.0 - tl.exp2(x * 1.4426950408889634), 0.0, 1.0)


@triton.jit
def elu(x):
    """elu(x), 0 at 0: exp(x) - 1 is at least x."""
    return tl.maximum(x, below(x) * -1.0)


@triton.jit
def elu16(x):
    """elu(x) in the dtype of x, two at a time."""
    if x.dtype == tl.bfloat16:
        y = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c, d;
            shl.b32 a, $1, 16; and.b32 b, $1, 0xffff0000;
            mul.f32 c, a, 0f3fb8aa3b; mul.f32 d, b, 0f3fb8aa3b;
            ex2.approx.ftz.f32 c, c; ex2.approx.ftz.f32 d, d;
            sub.sat.f32 c, 0f3f800000, c; sub.sat.f32 d, 0f3f800000, d;
            neg.f32 c, c; neg.f32 d, d;
            max.f32 a, a, c; max.f32 b, b, d;
            cvt.rn.bf16x2.f32 $0, b, a;
            }""",
            "=r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        y = elu(x.to(tl.float32)).to(x.dtype)
    return y


@triton.jit
def wide(x):
    """x in float32, as `elu16` takes it apart."""
    if x.dtype == tl.bfloat16:
        y = tl.inline_asm_elementwise(
            "{ .reg .b32 a; mov.b32 a, $2; shl.b32 $0, a, 16; and.b32 $1, a, 0xffff0000; }",
            "=f,=f,r", [x], dtype=tl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        y = x.to(tl.float32)
    return y


@triton.jit
def elu_slope(f, g):
    """g (1 + min(f, 0)): d loss / d x of elu from its value f and g = d loss / d f in float32."""
    if f.dtype == tl.bfloat16:
        y = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b;
            mov.b32 a, 0; min.bf16x2 a, $2, a;
            and.b32 b, a, 0xffff0000; shl.b32 a, a, 16;
            fma.rn.f32 a, a, $3, $3; fma.rn.f32 b, b, $4, $4;
            mov.b32 $0, a; mov.b32 $1, b;
            }""",
            "=f,=f,r,f,f", [f, g], dtype=tl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        y = g + g * tl.minimum(f.to(tl.float32), 0.0)
    return y
