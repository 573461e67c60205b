"""Static table of tiles, warps and stages per pass; `paths` chooses the path of a call."""

from __future__ import annotations

import torch

from ..spec import Spec, Width, Widths
from .paths import PROGRAMS, cut, narrow, plain

INVARIANT = {"on": False}
DIVIDE = {"BN": 64, "num_warps": 4, "num_stages": 2}  # tiles of `hla_divide_grads`
SUMMED_MIDDLE = {"num_warps": 4, "num_stages": 1}  # of `hla_summed_middle`


def set_batch_invariant(on: bool) -> None:
    """Make the results of the Triton forms for a sample bitwise independent of the rest of the batch; off by default.

    If on, plans are made for 64 heads whatever B and H are, which is slower for many or few heads. Plans still depend
    on N (padding included) or max_seqlen: results of packed sequences are reproducible for equal max_seqlen. The
    setting holds for the process, forward and backward. Set it before the first call, compilation or graph capture.
    """
    if not isinstance(on, bool):
        raise ValueError(f"set_batch_invariant takes True or False, got {on!r}.")
    INVARIANT["on"] = on


def planned(batch_heads: int) -> int:
    """Return the number of (batch, head) pairs that a plan is made for."""
    return 64 if INVARIANT["on"] else batch_heads


def head_config(direction: str, spec: Spec, w: Widths, dtype: torch.dtype) -> dict[str, int]:
    """Return the tiles of `hla_head_forward` (BN sums, BO reads out) and `hla_head_backward`."""
    if dtype == torch.float32:
        return {"BN": 32, "BO": 32, "num_stages": 2, "num_warps": 8}
    if direction == "backward":
        return {"BN": 64, "BO": 64, "num_warps": 4, "num_stages": 3 if w.F.D2 == 0 else 2}
    if spec.normalize:
        return {"BN": 32 if w.F.D2 > 0 else 64, "BO": 64, "num_warps": 4, "num_stages": 3}
    return {"BN": 32, "BO": 64, "num_warps": 4, "num_stages": 3 if w.F.D2 > 0 else 4}


def summed_config(spec: Spec, w: Widths) -> dict[str, int]:
    """Return the tiles of `hla_summed_forward`."""
    wide = w.F.D2 > 0
    more = {} if wide or not spec.sums else {"maxnreg": 168}  # three programs a multiprocessor
    return {"BN": 32, "BO": 64, "num_warps": 4, "num_stages": 3 if wide or spec.sums else 4, **more}


def reduce_config(spec: Spec, w: Widths, dtype: torch.dtype) -> dict[str, int]:
    """Return the tiles of `hla_reduce_moments`, and of `hla_reduce_readout` without a normaliser."""
    if dtype == torch.float32:
        return {"BN": 16 if w.wide > 96 else 32, "num_warps": 8, "num_stages": 2}
    if spec.op == "polynomial" and w.wide > 64 and plain(spec):
        return {"BN": 64 if w.F.D == w.V.D == 128 else 32, "num_warps": 4, "num_stages": 3}
    if spec.op == "polynomial" and narrow(w) and plain(spec):
        return {"BN": 32, "num_warps": 4, "num_stages": 4}
    if w.wide > 80 or spec.op == "polynomial":  # of learned ones a tile is what tensor cores add up
        return {"BN": 32 if w.wide <= 32 else 64, "num_warps": 8, "num_stages": 3}
    full = w.wide > 64 and spec.op == "hla3" and spec.normalize  # three moments and three sums
    return {"BN": 32 if w.wide > 64 else 64, "num_warps": 8 if full else 4, "num_stages": 3}


def readout_config(spec: Spec, w: Widths, dtype: torch.dtype) -> dict[str, int]:
    """Return the tiles of `hla_reduce_readout`."""
    if not spec.normalize or dtype == torch.float32:
        return reduce_config(spec, w, dtype)
    return query_config(w) | ({"BN": 32} if spec.op == "polynomial" and cut(w) else {})


def divides(spec: Spec, w: Widths, dtype: torch.dtype) -> bool:
    """Whether the denominators of a ratio are computed in a separate pass, `loops.wide`."""
    return spec.normalize and w.wide > 80 and dtype != torch.float32


def in_halves(w: Width) -> Width:
    """Return 128 channels as two halves, with one in registers at a time; other widths as they are."""
    return Width(w.D, 64, 64) if w.D1 == 128 else w


def query_config(w: Widths) -> dict[str, int]:
    """Return the tiles of `hla_query_grads`."""
    return {"BN": 64, "num_warps": 8 if w.wide > 80 else 4, "num_stages": 3}


def key_config(w: Widths) -> dict[str, int]:
    """Return the tiles of `hla_key_grads`."""
    return {"BN": 64, "num_warps": 4, "num_stages": 2 if w.wide > 80 else 3}


def reduce_roles(spec: Spec, w: Widths, dtype: torch.dtype) -> int:
    """Return the number of programs per part of `hla_reduce_moments`: 2 or 5 if the moments of `polynomial` do not fit
    in the registers of one program."""
    fits = w.F.padded <= 64 and w.V.padded <= 64
    if spec.op != "polynomial" or (fits and dtype == torch.bfloat16):
        return 1
    wide = min(w.F.padded, w.V.padded) > 80
    return 5 if wide and not spec.normalize and spec.ridge == 0 and dtype == torch.bfloat16 else 2


def apply_config(
    direction: str, spec: Spec, w: Widths, dtype: torch.dtype, grouped: bool = False
) -> dict[str, int]:
    """Tiles of `hla_apply` and `hla_apply_grads`; `grouped`: heads share keys, whose gradients are written in
    float32."""
    wide = w.wide > 64
    if dtype == torch.float32:
        fits = w.wide <= 96  # two weights of 128 do not fit in shared memory
        config = {"BN": 32 if fits or direction == "forward" else 16, "num_warps": 8, "num_stages": 1}
        if direction == "backward":
            # by default, ptxas uses 128 registers for the products of hla3
            config |= {"ROLES": 2 if fits else 3} | ({"maxnreg": 255} if spec.op == "hla3" else {})
        return config
    if direction == "forward":
        return {"BN": 64, "num_warps": 4, "num_stages": 3}
    very = w.wide > 80
    third, whole = spec.op in ("hla3", "polynomial"), narrow(w) and w.F.D1 == w.V.D1 == 64
    if very and spec.op == "polynomial":
        return {"BN": 32, "num_warps": 8, "num_stages": 3 if plain(spec) else 2, "ROLES": 2}
    once = plain(spec) and spec.op != "polynomial"
    # with two stages a tile is loaded when the one before it is done with; two programs a head have room for three
    deep = once or (whole and spec.op != "polynomial" and (spec.op == "hla2" or not spec.normalize))
    stages = 3 if very or (not wide and (deep or spec.op == "hla3")) else 2
    if grouped and very and spec.op == "ahla":  # three take more shared memory than there is
        stages = 2
    if spec.op == "polynomial" and cut(w):  # two programs per multiprocessor
        stages = 1
    warps = 8 if very else 4
    roles = 3 if once and cut(w) and not third else 2 if wide or third or deep or spec.normalize else 1
    # three programs per multiprocessor
    more = {"maxnreg": 168} if once and cut(w) and third else {}
    return {"BN": 64, "num_warps": warps, "num_stages": stages, "ROLES": roles, **more}


def precisions(spec: Spec, w: Widths, dtype: torch.dtype, n: int, batch_heads: int) -> dict[str, str]:
    """Return the precision of products. PREC: products of token tiles (without "ieee" for float32 tokens only); MID:
    of D x D matrices.

    tf32 is enough where the result is rounded to bf16, but what a ratio through R or W reads of many tokens cancels:
    but for 1 / sqrt(N) of the operator its outputs are alike. Float32 tokens are
    as exact as torch's where errors of tf32x3 add up.
    """
    bf16 = dtype == torch.bfloat16
    sums_up = spec.op in ("hla2", "hla3") or spec.normalize or spec.feature_map == "elu1"
    if (spec.op == "polynomial" and not bf16) or (sums_up and dtype == torch.float32):
        return {"PREC": "ieee", "MID": "ieee"}
    cancels = spec.normalize and spec.op in ("ahla", "hla3", "polynomial") and n > 8192
    mid = "tf32" if bf16 and not cancels else "tf32x3"
    if spec.op == "polynomial" and n > 2048 and narrow(w) and batch_heads < 64:
        mid = "tf32x3"  # S and W are nearly multiples of the identity then, so that orders cancel if coefficients do
    return {"PREC": "tf32x3", "MID": mid}


def middle_config(kernel: str, spec: Spec, w: Widths, rows: int, batch_heads: int, mid: str) -> dict[str, int]:
    """Return the rows per block and the warps of `hla_middle` and of the "middle_grads" kernels: all rows of a head at
    once if the heads fill the GPU."""
    tile = max(w.F.D1, w.V.D1)
    if mid in ("tf32x3", "ieee"):
        return {"BR": 16, "num_warps": 8, "num_stages": 1}
    if batch_heads >= PROGRAMS // 2 and tile <= 64:
        block = 128 if rows > 64 else tile
        return {"BR": block, "num_warps": 8 if block * tile > 4096 else 4, "num_stages": 1}
    if w.F.D2 + w.V.D2 > 0:
        return {"BR": 16 if spec.op == "polynomial" and w.F.D2 > 16 else 32, "num_warps": 4, "num_stages": 1}
    # left to itself an assembler spills for the sake of programs that are not there; the anchor and the product of hla2
    # read one matrix, which it may keep in registers
    most = 168 if kernel == "middle" and spec.op == "hla2" and spec.normalize and w.F.D1 > 64 else 128
    more = {} if spec.op == "polynomial" else {"maxnreg": most}
    return {"BR": 16, "num_warps": 8 if tile > 64 else 4, "num_stages": 1, **more}


def middle_widths(spec: Spec, w: Widths, mid: str) -> Widths:
    """Return the widths in `hla_middle_grads_key`: `in_halves` where rows, their tf32 remainders and a full
    matrix do not fit in registers."""
    return Widths(in_halves(w.F), in_halves(w.V)) if spec.op == "hla2" and mid == "tf32x3" else w


def divided(whole: int, parts: int, unit: int = 1) -> tuple[int, int]:
    """Return (parts, size of a part) of `whole` cut into at most so many parts of whole units."""
    chunk = -(-whole // (parts * unit)) * unit
    return -(-whole // chunk), chunk


def reduce_parts(batch_heads: int, n: int, bn: int) -> tuple[int, int]:
    """Return (parts, tokens per part): enough programs to fill the GPU, with at least 256 tokens each. Depends on sizes
    only."""
    return divided(n, max(1, min(-(-n // 256), round(PROGRAMS / batch_heads))), bn)


def query_parts(batch_heads: int, n: int, bn: int) -> tuple[int, int]:
    """Return `reduce_parts` of `hla_query_grads`, which runs two programs per multiprocessor: two parts per head if
    full heads would leave most of a second wave idle."""
    halves = PROGRAMS < batch_heads <= 3 * PROGRAMS // 2
    return reduce_parts(PROGRAMS // 2 if halves else batch_heads, n, bn)


def apply_parts(w: Widths, batch_heads: int, n: int, bn: int, long: bool = False) -> tuple[int, int]:
    """Return (parts, tokens per part): up to 8 tiles per program if that leaves 8 programs per multiprocessor.

    16 tiles for the large weights of wide heads; 3 if rows do not start on cache lines, so that more loads must be in
    flight (unless a tile takes `long`), or a head of 4 tiles at once.
    """
    total, half = -(-n // bn), w.F.D2 + w.V.D2 > 0
    most = (4 if total == 4 else 3) if half and not long else 16 if max(w.F.D1, w.V.D1) > 64 else 8
    tiles = max(1, min(most, (batch_heads * total + 2 * PROGRAMS * half) // (4 * PROGRAMS)))
    return -(-n // (tiles * bn)), tiles * bn
